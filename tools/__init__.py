"""Tools: the command line, reports and benchmarks; they join the other folders."""

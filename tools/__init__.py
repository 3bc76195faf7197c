"""The command line: a file for each command, its reports and pictures."""

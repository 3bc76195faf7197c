"""Passes that rewrite the graph before a schedule is chosen."""

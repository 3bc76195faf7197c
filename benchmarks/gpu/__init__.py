"""Runs every path for a GPU and holds irc's promises against what is measured; on a CPU, the parts for it."""

"""The published tables of Large Model Support and OME, beside what the planner finds on the same networks."""

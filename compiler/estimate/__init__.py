"""Estimates without weights: what a step takes on a machine, and the largest one that fits."""

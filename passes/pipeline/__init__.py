"""Pipelines: which stage runs what, in which order, and what each stage exchanges with its neighbours."""

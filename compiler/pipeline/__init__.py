"""Pipelines: from a model and its devices to the stages that each rank trains."""

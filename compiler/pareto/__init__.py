"""The memory/time front of a model."""

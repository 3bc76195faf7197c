"""Frontends: models in, as graphs."""

"""Backends: schedules out as something that runs."""

"""Backends compile schedules to programs and run them."""

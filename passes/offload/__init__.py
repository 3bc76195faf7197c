"""Offloading: which storages, parameters and optimizer states are copied to a tier, and when."""

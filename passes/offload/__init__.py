"""Offloading: the choice of which storages, parameters and optimizer states go to a tier, and when."""

"""Costs of operations and copies: measured on this machine, or modelled for another."""

"""Rematerialisation: which storages are kept for backward, and which are computed again."""

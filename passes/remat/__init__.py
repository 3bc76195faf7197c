"""Rematerialisation: the choice of which storages are kept for backward, and which are computed again."""

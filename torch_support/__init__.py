"""Holds what frontends, backends and the compiler share about torch."""

"""What frontends, backends and the compiler share about torch."""

"""What torch traces otherwise than eager runs it, mended while a module is captured."""

"""Corrects, while a module is captured, what torch traces otherwise than eager runs it."""

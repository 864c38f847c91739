"""Dialects: one module for each API that callers may use, with its bodies and answers."""

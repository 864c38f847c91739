"""The HTTP side: decode, validate, ask the engine, answer."""

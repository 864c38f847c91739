"""The engine's own process: the server's side and the child's side of it."""

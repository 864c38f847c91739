"""The engine in a process of its own: the server's side and the child's side."""

"""What callers may send: a module for each dialect, its bodies, answers and one engine call."""

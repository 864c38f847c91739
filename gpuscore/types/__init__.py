"""Plain data that every part may import."""

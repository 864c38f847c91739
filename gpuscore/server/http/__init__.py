"""HTTP connections: parsing, deadlines, caps, and who is let in."""

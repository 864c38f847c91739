"""HTTP connections: parsing, deadlines, limits, and the gate that admits or refuses requests."""

"""`gpuscore parity`: whether two ways to score agree, and by how much they differ."""

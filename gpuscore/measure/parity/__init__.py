"""`gpuscore parity`: measure by how much two ways to score differ, and judge it."""

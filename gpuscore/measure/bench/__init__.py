"""`gpuscore bench`: the reports' experiments on any server, and the comparison of their results."""

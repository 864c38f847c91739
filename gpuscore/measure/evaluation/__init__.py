"""`gpuscore eval`: how well a model ranks or classifies, beside other runs of the same data."""

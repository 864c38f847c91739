"""Fronts: several HTTP processes of one server, and the parent that starts and ends them."""

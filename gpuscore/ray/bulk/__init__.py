"""Engines in actors on a Ray cluster, for `gpuscore batch --ray`."""

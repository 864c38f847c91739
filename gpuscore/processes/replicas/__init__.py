"""Replicas of one model, one engine process each: their devices, and the routing of requests."""

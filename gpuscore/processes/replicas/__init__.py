"""Replicas of one model, one engine process each: where they run, and which request goes where."""

"""Text to token ids, and prompts to requests."""

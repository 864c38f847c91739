"""`gpuscore batch`: files in, files out. docs/how-to/score-a-file.md describes it."""

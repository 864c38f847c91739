"""`gpuscore convert`: GGUF files and pickled weights into what `serve` takes."""

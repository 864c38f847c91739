"""`gpuscore convert`: turns GGUF files and pickled weights into a directory that `serve` takes."""

"""A model's directory: names, files, formats that are refused."""

"""Make the reference pages of the documentation from the code, and check the built site."""

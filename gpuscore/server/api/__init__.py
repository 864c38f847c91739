"""Routes: what is asked over HTTP, and how it is answered."""

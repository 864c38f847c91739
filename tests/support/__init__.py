"""Code that several tests share: tiny models, the oracle of the mask rule, a running server."""

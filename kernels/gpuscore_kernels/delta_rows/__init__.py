"""The functions of rows of linear layers: `delta_net/reference.py` documents them."""

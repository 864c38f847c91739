"""Linear attention by the gated delta rule (Yang et al., 2024), over the tree of segments."""

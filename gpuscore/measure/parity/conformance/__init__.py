"""`gpuscore parity check-server`: the conformance suite over HTTP."""

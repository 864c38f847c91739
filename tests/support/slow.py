"""Cases that `make test` skips and `make test-all` runs."""

import pytest


def slow(*cases):
    """Return the cases as pytest parameters marked slow; a tuple holds several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]

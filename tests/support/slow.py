"""Cases that make test leaves to make test-all."""

import pytest


def slow(*cases):
    """pytest's parameters of these cases, marked slow; a tuple holds several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]

"""The contract's error table: bodies, and notes of what is tested."""

import pytest

GOOD = {"query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": [3, 17]}
CHUNKED = "Transfer-Encoding: chunked"


def covers(*codes):
    """Note that a test provokes these codes; test_error_table.py reads the notes."""
    return lambda test: test


def table(code, cases):
    """Return parameters for the cases, a dict of id -> one value or a tuple of values."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), id=k) for k, v in cases.items()]

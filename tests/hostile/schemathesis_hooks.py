"""Runs in Schemathesis' own process, see schemathesis.toml."""

import schemathesis

UNKNOWN = "x-schemathesis-unknown-property"  # a header that no operation reads


@schemathesis.hook
def filter_case(context: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    """Without such headers: they are ignored as HTTP has it (RFC 9110, 5.1), and no error."""
    return UNKNOWN not in (case.headers or {})

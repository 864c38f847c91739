"""Hooks that run in Schemathesis' own process, see schemathesis.toml."""

import schemathesis

UNKNOWN = "x-schemathesis-unknown-property"  # a header that no operation reads


@schemathesis.hook
def filter_case(context: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    """Drop cases with unknown headers: HTTP ignores them (RFC 9110, 5.1), so they are no error."""
    return UNKNOWN not in (case.headers or {})

"""Checks and their outcomes; the suite's checks are in `checks_scores` and `checks_requests`.

Known deviations of other kinds of servers are listed, so that no check must be loosened for them.
They come from the servers' code and issues (September 2026); "not run" marks those that were only
read, not observed. The report also names deviations that did not occur: the list may be outdated.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gpuscore.measure.parity.conformance.server import CheckedServer, RequestRefused, Skipped

OK, FAILED, KNOWN, SKIPPED = "ok", "FAIL", "known", "skip"


@dataclass(frozen=True, slots=True)
class Check:
    """A promise. `find` returns the fault or None; it may raise RequestRefused and Skipped."""

    id: str  # C1 to C20 of the suite, a dot and a word
    promise: str
    find: Callable[[CheckedServer], str | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a check: OK, FAILED, KNOWN (an expected deviation) or SKIPPED."""

    check: Check
    state: str
    detail: str


def check(id: str, promise: str) -> Callable[[Callable[[CheckedServer], str | None]], Check]:
    """Return a decorator that turns a function into a check."""
    return lambda find: Check(id, promise, find)


def run_checks(
    checks: Iterable[Check], server: CheckedServer, known: Mapping[str, str]
) -> Iterable[Outcome]:
    """Run the checks one by one and yield their outcomes.

    Args:
        checks: the suite.
        server: the server under test.
        known: id of a check -> why this kind of server fails it.
    """
    for check in checks:
        state, detail = _run(check, server)
        if state == FAILED and check.id in known:
            state, detail = KNOWN, f"{known[check.id]}; here: {detail}"
        elif state == OK and check.id in known:
            detail = f"not seen here: {known[check.id]}"
        yield Outcome(check, state, detail)


def _run(check: Check, server: CheckedServer) -> tuple[str, str]:
    try:
        wrong = check.find(server)
    except Skipped as reason:
        return SKIPPED, str(reason)
    except RequestRefused as reason:
        return FAILED, str(reason)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return FAILED, f"an answer has another form than expected: {error!r}"
    return (OK, "") if wrong is None else (FAILED, wrong)


_PYDANTIC = "true is read as 1, as pydantic does unless told otherwise (not run)"
_NO_LABELS = "RuntimeError 'output_logprobs is empty', a 500"
_MIXED = "only the query's type is checked; the items' lists become part of the text"
_VOCAB = "ids are compared with tokenizer.vocab_size, which does not count added tokens"

_SGLANG = {
    "C13.empty-labels": _NO_LABELS,
    "C14.label-boolean": _PYDANTIC,
    "C14.mixed-types": _MIXED,
    "C15.first-and-last": _VOCAB,
    "C15.negative-label": "not checked before SGLang #28088; reads another token",
    "C15.negative-token": "not checked (not run)",
    "C17.repeat": "its own tests require only 5 to 6 equal decimal places (not run)",
}
_SGLANG_MIS = _SGLANG | {
    "C1.usage": "prompt_tokens counts the delimiters, SGLang #18381",
    "C6.text": "query and items are tokenised separately, with a BOS each",
    "C7.item_first": "item_first is ignored",
    "C8.text": "query and items are tokenised separately, with a BOS each",
    "C9.text": "one item is tokenised with its query, several separately (not run)",
    "C13.empty-item": "the row of the delimiter before it is read (not run)",
    "C16.large": "one sequence of all items; the context may be too short for it",
}
_SGL_JAX = {
    "C1.usage": "usage is null",
    "C13.empty-labels": "becomes null inside the server, then an IndexError, a 500",
    "C13.no-items": "400 for token ids",
    "C14.label-boolean": _PYDANTIC,
    "C15.first-and-last": _VOCAB,
    "C15.negative-label": "not checked; reads another token",
    "C15.negative-token": "not checked (not run)",
    "C17.repeat": "its own tests require only 2 equal decimal places (not run)",
}

DEVIATIONS: Mapping[str, Mapping[str, str]] = {
    "strict": {},
    "gpuscore": {},
    "sglang": _SGLANG,
    "sglang-mis": _SGLANG_MIS,
    "sgl-jax": _SGL_JAX,
}

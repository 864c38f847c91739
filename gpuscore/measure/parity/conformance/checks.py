"""Checks and their outcomes; the suite's checks are in `checks_scores` and `checks_requests`."""

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
    for one in checks:
        state, detail = _run(one, server)
        if state == FAILED and one.id in known:
            state, detail = KNOWN, f"{known[one.id]}; here: {detail}"
        elif state == OK and one.id in known:
            detail = f"not seen here: {known[one.id]}"
        yield Outcome(one, state, detail)


def _run(one: Check, server: CheckedServer) -> tuple[str, str]:
    try:
        wrong = one.find(server)
    except Skipped as reason:
        return SKIPPED, str(reason)
    except RequestRefused as reason:
        return FAILED, str(reason)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return FAILED, f"an answer has another form than expected: {error!r}"
    return (OK, "") if wrong is None else (FAILED, wrong)

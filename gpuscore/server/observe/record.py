"""What is known about one HTTP request: it grows while the request is served, and is counted,
logged and traced when it is over."""

import re
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from secrets import token_hex
from time import monotonic
from typing import Any

from gpuscore.request import Timings

STAGES = ("tokenize", "queue", "batch", "device", "respond")
# How far a request has come: its body is read and checked, ..., its answer is made.
RECEIVE, TOKENIZE, ENGINE, RESPOND = PROGRESS = ("receive", "tokenize", "engine", "respond")
UNMATCHED = "unmatched"  # route of what matches none: paths are the caller's text
OTHER_METHOD = "other"
CLIENT_LEFT, LEFT_CODE = 499, "client_left"  # nginx's number; never on the wire
_METHODS = {
    name.encode(): name
    for name in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

_PROCESS, _numbers = token_hex(10), count()

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case


@dataclass(slots=True)
class RequestRecord:
    """One request. Nothing in it is the caller's own text, except for an id that was checked."""

    request_id: str
    bad_request_id: bool = False  # the caller's was refused, this one was made here
    method: str = OTHER_METHOD
    route: str = UNMATCHED  # a route's template
    started: float = field(default_factory=monotonic)
    seconds: float = 0.0  # set when it is over, like the next two
    status: int = 0  # 499 where the client left before its answer
    code: str = ""  # of the error that was answered, as in the contract
    variant: str = ""  # which of its dialect's kinds of bodies it has, if errors differ by that
    tenant: str | None = None
    bytes_in: int = 0  # of the body, as far as it was read
    bytes_out: int = 0  # of the answer's body
    progress: str = RECEIVE  # one of PROGRESS
    items: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    trace_id: str | None = None
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)  # start and seconds

    @property
    def accepted(self) -> bool:
        """Whether the engine has taken it."""
        return self.progress in (ENGINE, RESPOND)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one of PROGRESS, also one that fails."""
        self.progress = name
        start = monotonic()
        try:
            yield
        finally:
            self.stages[name] = start, monotonic() - start

    def engine_stages(self, start: float, timings: Timings) -> None:
        """Note what the engine says of a request that it got at `start`."""
        for name, seconds in (
            ("queue", timings.queue),
            ("batch", timings.batch),
            ("device", timings.device),
        ):
            self.stages[name] = start, seconds
            start += seconds

    def refuse(self, status: int, code: str) -> None:
        """Note the error that is answered; the first one counts."""
        if not self.status:
            self.status, self.code = status, code


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """The record of a request, made on first sight of it."""
    state = scope.setdefault("state", {})
    if "record" not in state:
        state["record"] = new_record(scope["method"].encode("latin-1"), scope["headers"])
    record: RequestRecord = state["record"]
    return record


def new_record(method: bytes, headers: Headers) -> RequestRecord:
    """The record of a request with this head."""
    request_id, good = _request_id(headers)
    return RequestRecord(request_id, not good, _METHODS.get(method, OTHER_METHOD))


def new_request_id() -> str:
    """Nobody else's: random digits of this process, then a number."""
    return f"{_PROCESS}{next(_numbers):012x}"


def _request_id(headers: Headers) -> tuple[str, bool]:
    """The caller's id if it is one, else a new one; and whether the caller is to be believed."""
    given = [value for name, value in headers if name == b"x-request-id"]
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
        return given[0].decode("ascii"), True
    return new_request_id(), not given

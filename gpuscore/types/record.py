"""What the server notes about one HTTP request, for its metrics, log and traces."""

import os
import re
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from secrets import token_hex
from time import monotonic
from typing import Any

from gpuscore.types.request import Timings

STAGES = ("tokenize", "queue", "batch", "device", "respond")
# How far a request has come, from reading its body to writing its answer.
RECEIVE = "receive"
TOKENIZE = "tokenize"
ENGINE = "engine"
RESPOND = "respond"
PROGRESS = (RECEIVE, TOKENIZE, ENGINE, RESPOND)
UNMATCHED = "unmatched"  # the route of any unknown path; that path is never recorded
OTHER_METHOD = "other"
CLIENT_LEFT = 499  # the status that nginx logs for it; never sent
CLIENT_LEFT_CODE = "client_left"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"))
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

_process_id = token_hex(10)  # random; not the operating system's process id
_numbers = count()


def _renew_process_id() -> None:
    """Make another random id, so that a forked process's request ids differ."""
    global _process_id
    _process_id = token_hex(10)


os.register_at_fork(after_in_child=_renew_process_id)

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case


@dataclass(slots=True)
class RequestRecord:
    """The record of one request; the caller's only text in it is a valid request id."""

    request_id: str
    bad_request_id: bool = False  # the caller's id was not valid, so `request_id` is ours
    method: str = OTHER_METHOD
    route: str = UNMATCHED  # the path with names in place of its parameters
    started: float = field(default_factory=monotonic)
    seconds: float = 0.0  # set when the request is over
    status: int = 0  # 0 until an answer begins; 499 if the client left before it
    code: str = ""  # the code of the error that was answered
    model: str = ""  # the served name; empty until the body was read
    variant: str = ""  # the kind of body, if it decides the format of errors
    tenant: str | None = None
    deadline: float | None = None  # on time.monotonic's clock
    bytes_in: int = 0  # bytes of the body that were read
    bytes_out: int = 0  # bytes of the answer's body
    progress: str = RECEIVE  # one of PROGRESS
    items: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    label_tokens: int = 0  # tokens of multi-token labels, computed after the prompts
    trace_id: str | None = None
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)  # start time, duration

    @property
    def accepted(self) -> bool:
        """True if the request was admitted to the engine."""
        return self.progress in (ENGINE, RESPOND)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside as a stage of PROGRESS, even if it fails."""
        self.progress = name
        start = monotonic()
        try:
            yield
        finally:
            self.stages[name] = start, monotonic() - start

    def add_engine_stages(self, start: float, timings: Timings) -> None:
        """Add the engine's stages of a request that it received at `start`."""
        for name, seconds in (
            ("queue", timings.queue),
            ("batch", timings.batch),
            ("device", timings.device),
        ):
            self.stages[name] = start, seconds
            start += seconds

    def refuse(self, status: int, code: str) -> None:
        """Note the error that is answered, unless a status is already set."""
        if not self.status:
            self.status = status
            self.code = code


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """Return the record of a request; make it on the first call.

    The id is the caller's if it sent one valid id. Otherwise it is a new one: random digits of this
    process, then a count.
    """
    state = scope.setdefault("state", {})
    if "record" not in state:
        ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
        good = len(ids) == 1 and _REQUEST_ID.fullmatch(ids[0]) is not None
        request_id = ids[0].decode("ascii") if good else f"{_process_id}{next(_numbers):012x}"
        method = scope["method"] if scope["method"] in _METHODS else OTHER_METHOD
        state["record"] = RequestRecord(request_id, bool(ids) and not good, method)
    record: RequestRecord = state["record"]
    return record

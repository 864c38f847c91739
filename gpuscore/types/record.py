"""The record of one HTTP request: filled in while the request is served; counted, logged and
traced when it is over."""

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
# Stages that a request goes through, from reading its body to making its answer.
RECEIVE = "receive"
TOKENIZE = "tokenize"
ENGINE = "engine"
RESPOND = "respond"
PROGRESS = (RECEIVE, TOKENIZE, ENGINE, RESPOND)
UNMATCHED = "unmatched"  # recorded instead of an unknown path, which is the caller's text
OTHER_METHOD = "other"
CLIENT_LEFT = 499  # nginx's number; never sent
LEFT_CODE = "client_left"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"))
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

_process_id = token_hex(10)  # random, not the system's
_numbers = count()


def _renew_process_id() -> None:
    """Give a forked process ids of its own."""
    global _process_id
    _process_id = token_hex(10)


os.register_at_fork(after_in_child=_renew_process_id)

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case


@dataclass(slots=True)
class RequestRecord:
    """One request. It holds no text of the caller's, except for an id that was checked."""

    request_id: str
    bad_request_id: bool = False  # the caller's id was refused; `request_id` was made here
    method: str = OTHER_METHOD
    route: str = UNMATCHED  # a route's template
    started: float = field(default_factory=monotonic)
    seconds: float = 0.0  # set when the request is over
    status: int = 0  # 0 until an answer begins; 499 if the client left before it
    code: str = ""  # the code of the error that was answered
    model: str = ""  # the served name; empty until the body has told which
    variant: str = ""  # the kind of body, in a dialect whose errors differ by it
    tenant: str | None = None
    deadline: float | None = None  # on time.monotonic's clock
    bytes_in: int = 0  # bytes of the body that were read
    bytes_out: int = 0  # bytes of the answer's body
    progress: str = RECEIVE  # one of PROGRESS
    items: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    label_tokens: int = 0  # of labels of several tokens, computed after the prompts
    trace_id: str | None = None
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)  # start and seconds

    @property
    def accepted(self) -> bool:
        """True if the request was admitted to the engine."""
        return self.progress in (ENGINE, RESPOND)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of PROGRESS, even if it fails."""
        self.progress = name
        start = monotonic()
        try:
            yield
        finally:
            self.stages[name] = start, monotonic() - start

    def engine_stages(self, start: float, timings: Timings) -> None:
        """Note the engine's timings of a request that it got at `start`."""
        for name, seconds in (
            ("queue", timings.queue),
            ("batch", timings.batch),
            ("device", timings.device),
        ):
            self.stages[name] = start, seconds
            start += seconds

    def refuse(self, status: int, code: str) -> None:
        """Note the error that is answered; no effect if a status is already set."""
        if not self.status:
            self.status = status
            self.code = code


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """Return the record of a request; make it on the first call.

    Its id is the caller's if that is valid, or else unique: random digits of this process, then a
    number.
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

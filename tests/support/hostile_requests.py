"""Hostile requests as data: a reader of tests/hostile/http/*.toml, and a client that sends them.

A text in these files stands for bytes. A line break is CR LF; `\\r`, `\\n`, `\\t`, `\\xHH` and
`\\\\` are one byte each; `\\(1000*text)` repeats a text; `\\[name]` is a text of parts.toml. All
other characters are ASCII.
"""

import re
import socket
import struct
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeAlias

FOLDER = Path(__file__).parent.parent / "hostile" / "http"
PROBE = b"GET /probe HTTP/1.1\r\nHost: probe\r\n\r\n"
PROBED = 404
PATIENCE = 3.5  # seconds to wait for an event; the server closes idle connections after 5

_TOKEN = re.compile(
    r"\\\((?P<times>\d+)\*(?P<text>(?:[^)\\]|\\.)*)\)|\\\[(?P<part>\w+)\]|\\x(?P<hex>[0-9a-f]{2})"
    r"|\\(?P<letter>[rnt\\])|(?P<line>\n)|(?P<plain>[ -~])",
    re.DOTALL,
)
_LETTERS = {"r": b"\r", "n": b"\n", "t": b"\t", "\\": b"\\"}
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) [ -~]*")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([ -~]*)")

Step: TypeAlias = "bytes | dict[str, Any]"
Statuses: TypeAlias = "tuple[frozenset[int], ...]"


@dataclass(frozen=True)
class Entry:
    """A hostile request.

    Args:
        name: a short description.
        steps: bytes to send and actions between them: `pause` (seconds), `drip` (a text, one byte
            `every` that many seconds), `answer` (wait for one), `end` ("half": close our sending
            side, "reset": reset the connection).
        answers: the right statuses of each answer, in order. A file has a list, or a text such as
            "100 x 404, 400".
        optional: True if the last answer may be missing.
        closes: True if the server then closes the connection, False if it answers one more request,
            None if it may do either.
        fails: True if our server is known to give wrong answers.
        bodiless: numbers, from 0, of the answers without a body (to HEAD).
        slow: True if it takes more than some milliseconds.
        rfc: the place that defines the right answer, if there is one.
        why: the reason for the right answer, in a sentence.
    """

    name: str
    steps: tuple[Step, ...]
    answers: Statuses
    optional: bool
    closes: bool | None
    fails: bool
    bodiless: frozenset[int]
    slow: bool
    rfc: str
    why: str


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


@dataclass
class Outcome:
    """The answers on one connection, and its end.

    Args:
        answers: complete answers, in order.
        end: "closed", "reset", "open" (it still answers), "silent" (it does not), or "left" by us.
        rest: bytes after the last complete answer.
    """

    answers: list[Answer] = field(default_factory=list)
    end: str = ""
    rest: bytes = b""

    @property
    def statuses(self) -> tuple[int, ...]:
        return tuple(answer.status for answer in self.answers)


def decoded(text: str, parts: dict[str, str]) -> bytes:
    """Return the bytes that a text of a file stands for; raises ValueError."""
    content, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"not understood: {text[at : at + 20]!r}")
        content.append(_bytes_of(token, parts))
        at = token.end()
    return b"".join(content)


def _bytes_of(token: re.Match[str], parts: dict[str, str]) -> bytes:
    kind, text = token.lastgroup, token[token.lastgroup or 0]
    if kind == "text":
        return decoded(text, parts) * int(token["times"])
    if kind == "part":
        return decoded(parts[text], parts)
    if kind == "hex":
        return bytes.fromhex(text)
    if kind == "letter":
        return _LETTERS[text]
    return b"\r\n" if kind == "line" else text.encode("ascii")


def entries(name: str) -> list[Entry]:
    """Return all entries of a file, such as "smuggling"."""
    parts = tomllib.loads((FOLDER / "parts.toml").read_text())
    requests = tomllib.loads((FOLDER / f"{name}.toml").read_text())["request"]
    return [_entry(request, parts) for request in requests]


def names() -> list[str]:
    """Return the names of all files with entries."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "parts")


def _entry(fields: dict[str, Any], parts: dict[str, str]) -> Entry:
    fields = dict(fields)
    sent = fields.pop("send")
    steps = tuple(_step(step, parts) for step in (sent if isinstance(sent, list) else [sent]))
    answers = _statuses(fields.pop("answers"))
    bodiless = frozenset(fields.pop("bodiless", ()))
    usual = {"slow": False, "optional": False, "rfc": "", "closes": None, "fails": False}
    return Entry(**(usual | fields), steps=steps, answers=answers, bodiless=bodiless)


def _statuses(written: str | list[Any]) -> Statuses:
    if isinstance(written, list):
        return tuple(frozenset(s if isinstance(s, list) else [s]) for s in written)
    choices: list[frozenset[int]] = []
    for text in written.split(", "):
        times, _, status = text.rpartition(" x ")
        choices += [frozenset([int(status)])] * int(times or 1)
    return tuple(choices)


def shown(statuses: Iterable[int]) -> str:
    """Return statuses as text, such as "2 x 404, 400", or "none"."""
    runs = [(status, len(list(some))) for status, some in groupby(statuses)]
    texts = [str(status) if times == 1 else f"{times} x {status}" for status, times in runs]
    return ", ".join(texts) or "none"


def _step(step: str | dict[str, Any], parts: dict[str, str]) -> Step:
    if isinstance(step, str):
        return decoded(step, parts)
    known = {"pause"}, {"drip", "every"}, {"answer"}, {"end"}
    if set(step) not in known:
        raise ValueError(f"not understood: {step}")
    return step | {"drip": decoded(step["drip"], parts)} if "drip" in step else step


class Attacker:
    """One connection that sends an entry and reads the answers.

    Args:
        bodiless: see Entry.
    """

    def __init__(self, address: tuple[str, int], bodiless: Iterable[int] = ()) -> None:
        self.outcome = Outcome()
        self._bodiless = frozenset(bodiless)
        self._socket = socket.create_connection(address, timeout=PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def __enter__(self) -> "Attacker":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def perform(self, steps: Iterable[Step]) -> None:
        try:
            for step in steps:
                self._do(step)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has answered and does not want the rest

    def _do(self, step: Step) -> None:
        if isinstance(step, bytes):
            self._socket.sendall(step)
        elif "pause" in step:
            sleep(step["pause"])
        elif "drip" in step:
            for i in range(len(step["drip"])):
                self._socket.sendall(step["drip"][i : i + 1])
                sleep(step["every"])
        elif "answer" in step:
            self.read(len(self.outcome.answers) + 1)
        elif step["end"] == "half":
            self._socket.shutdown(socket.SHUT_WR)
        else:
            linger = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._socket.close()
            self.outcome.end = "left"

    def read(self, most: int | None, patience: float = PATIENCE) -> None:
        """Read until there are `most` answers or, without a number, until the connection ends."""
        deadline = monotonic() + patience
        while not self.outcome.end and (most is None or len(self.outcome.answers) < most):
            if not self._take() and not self._receive(deadline):
                return

    def finish(self, expected: int, closes: bool | None, patience: float = PATIENCE) -> Outcome:
        """Read the expected answers, then see the connection end or answer once more."""
        self.read(expected, patience)
        if closes:
            self.read(None, patience)
            self.outcome.end = self.outcome.end or "silent"
        elif closes is False and not self.outcome.end:
            self._probe(len(self.outcome.answers), patience)
        self.outcome.rest = self._buffer
        return self.outcome

    def _probe(self, before: int, patience: float) -> None:
        self.perform([PROBE])
        self.read(before + 1, patience)
        if self.outcome.end:
            return
        probed = [answer.status for answer in self.outcome.answers[before:]] == [PROBED]
        self.outcome.end = "open" if probed else "silent"
        if probed:
            self.outcome.answers.pop()

    def _receive(self, deadline: float) -> bool:
        self._socket.settimeout(max(0.001, deadline - monotonic()))
        try:
            data = self._socket.recv(2**16)
        except TimeoutError:
            return False
        except ConnectionResetError:
            self.outcome.end = "reset"
            return False
        if not data:
            self.outcome.end = "closed"
        self._buffer += data
        return bool(data)

    def _take(self) -> bool:
        """Take one complete answer from the buffer; raises ValueError if it is not HTTP."""
        head, blank_line, rest = self._buffer.partition(b"\r\n\r\n")
        if not blank_line:
            return False
        status, headers = _head(head)
        number = sum(answer.status >= 200 for answer in self.outcome.answers)
        bare = status < 200 or status in (204, 304) or number in self._bodiless
        length = 0 if bare else int(headers["content-length"])
        if len(rest) < length:
            return False
        self.outcome.answers.append(Answer(status, headers, rest[:length]))
        self._buffer = rest[length:]
        return True


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.split(b"\r\n")
    status, fields = _STATUS.fullmatch(first), [_FIELD.fullmatch(line) for line in lines]
    if status is None or None in fields:
        raise ValueError(f"not an answer: {head[:200]!r}")
    headers = {m[1].decode().lower(): m[2].decode() for m in fields if m is not None}
    return int(status[1]), headers


def sent(entry: Entry, address: tuple[str, int], patience: float = PATIENCE) -> Outcome:
    """Send an entry to a server; raises ValueError if it sends back bytes that are not HTTP."""
    with Attacker(address, entry.bodiless) as attacker:
        attacker.perform(entry.steps)
        return attacker.finish(len(entry.answers), entry.closes, patience)


def faults(entry: Entry, outcome: Outcome) -> Iterator[str]:
    """Yield the errors in our server's answers to an entry."""
    statuses = outcome.statuses
    if {"end": "half"} in entry.steps:  # an interim answer shows whether the client has left
        statuses = tuple(status for status in statuses if status >= 200)
    if not right(entry, statuses):
        allowed = [sorted(codes) for codes in entry.answers][:9]
        yield f"answered {shown(statuses)}, right is {allowed}"
    if outcome.rest:
        yield f"{outcome.rest[:100]!r} is behind the last answer"
    # A reset after the answers only means that the server did not wait for the rest of the input.
    ends = {"closed", "reset", "left"} if entry.closes else {"open"}
    if outcome.end not in ends and entry.closes is not None:
        yield f"the connection is {outcome.end}, right is {' or '.join(sorted(ends))}"
    yield from (fault for answer in outcome.answers for fault in _shape_faults(answer))


def right(entry: Entry, statuses: tuple[int, ...]) -> bool:
    missing = len(entry.answers) - len(statuses)
    return missing in (0, int(entry.optional)) and all(
        status in allowed for status, allowed in zip(statuses, entry.answers, strict=False)
    )


def _shape_faults(answer: Answer) -> Iterator[str]:
    if answer.status >= 500 and answer.status != 501:
        yield f"{answer.status}: {answer.body[:200]!r}"
    if answer.status >= 200 and "x-request-id" not in answer.headers:
        yield f"{answer.status} without X-Request-Id"
    if answer.status >= 400 and answer.body and not answer.body.startswith(b'{"error":{'):
        yield f"{answer.status} without the error object: {answer.body[:200]!r}"

"""Good requests with a few bytes changed by a seeded generator."""

import random
from collections.abc import Iterator

from support.hostile_requests import Attacker, Outcome, entries, names

# Bytes that a change may insert: characters and fields that mean something to a parser.
PIECES = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"%", b"#", b"\x7f", b"\xff"),
    *(b"\r\n\r\n", b"0\r\n\r\n", b"ffffffffffffffff", b"HTTP/1.0", b"HTTP/2.0", b"chunked"),
    *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Host: b\r\n"),
    *(b"Connection: close\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
    *(b"Expect: 100-continue\r\n", b"X-Request-Id: a\r\n", b"A" * 300, b"\r\n " * 20),
)


def good_requests() -> list[bytes]:
    """Return the stream of each quick entry that has only one, no HEAD, and 200 for every
    answer."""
    quick = [entry for name in names() for entry in entries(name) if not entry.slow]
    return [
        entry.steps[0]
        for entry in quick
        if len(entry.steps) == 1
        and isinstance(entry.steps[0], bytes)
        and len(entry.steps[0]) < 2_000
        and not entry.bodiless
        and all(allowed == {200} for allowed in entry.answers)
    ]


def mutations(seed: int, count: int) -> Iterator[bytes]:
    rng, good = random.Random(seed), good_requests()
    for _ in range(count):
        data = rng.choice(good)
        for _ in range(rng.randint(1, 4)):
            data = _changed(rng, data)
        yield data


def _changed(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((0, 1, 2, 8, 40)))
    kind = rng.randrange(4)
    if kind == 0:  # replace
        return data[:start] + rng.choice(PIECES) + data[end:]
    if kind == 1:  # repeat
        return data[:end] + data[start:]
    if kind == 2:  # remove
        return data[:start] + data[end:]
    return data[:start] + rng.randbytes(end - start) + data[end:]


def told(address: tuple[str, int], data: bytes) -> Outcome:
    """Send these bytes, then no more, and return everything received until the connection ends."""
    with Attacker(address) as attacker:
        attacker.perform([data, {"end": "half"}])
        return attacker.finish(0, True)

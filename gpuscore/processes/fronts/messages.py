"""The messages between the parent and its fronts, encoded as MessagePack in frames."""

from functools import partial
from typing import TypeAlias

import msgspec

from gpuscore.processes.worker.frames import Message, decoded
from gpuscore.server.observe.sums import Samples, Snapshot
from gpuscore.types.stats import EngineStats


class Stop(Message, frozen=True):
    """Command to a front: drain after the first one, end after the second (see `serve`)."""

    signal: int


class ValidKeys(Message, frozen=True):
    """The digests of the API keys that are valid from now on; the first message to a front."""

    digests: list[bytes]


class GiveUp(Message, frozen=True):
    """Command to a front: end, because the server has failed for good."""

    reason: str


class AskCounts(Message, frozen=True):
    """Question to a front: what has it counted?"""

    number: int  # the parent's


class Sums(Message, frozen=True):
    """The parent's answer to `AskSums`."""

    number: int  # the front's
    samples: Samples  # of all other fronts, also of those that have ended
    engines: list[EngineStats]


class Began(Message, frozen=True):
    """The first message of a front."""

    pid: int


class Serving(Message, frozen=True):
    """A front's message that it can score; the text is for people, once all fronts can."""

    text: str


class Counted(Message, frozen=True):
    """A report of what a front has counted; answers an `AskCounts` if it has a number."""

    counts: Snapshot
    number: int | None = None


class AskSums(Message, frozen=True):
    """A front's question: what have the others counted? It brings the front's own counts, which it
    is about to show."""

    number: int
    counts: Snapshot


class Ended(Message, frozen=True):
    """The last message of a front; `refusal` says why the model or a setting cannot be served."""

    code: int
    refusal: str | None = None


ToFront: TypeAlias = Stop | ValidKeys | GiveUp | AskCounts | Sums
FromFront: TypeAlias = Began | Serving | Counted | AskSums | Ended

_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
_from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
# They raise ProtocolError if a frame is no message to a front, or from one.
decode_to_front, decode_from_front = partial(decoded, _to_front), partial(decoded, _from_front)

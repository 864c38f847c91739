"""Fields of other servers' bodies that have no meaning here; others.toml lists them.

Values that change nothing are accepted. Any other value is refused by the field's name, with the
reason, because an answer that ignored it would not be what the caller asked for.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from gpuscore.errors import InvalidRequest

StructT = TypeVar("StructT", bound=msgspec.Struct)

REFUSED = "x-refused"
SHORT = 64  # bytes: longer values are none of those that change nothing


class Other(NamedTuple):
    """A field of other servers: the values besides null that change nothing, and why others are
    refused; without a reason, any value is ignored."""

    neutral: tuple[object, ...]
    reason: str

    @property
    def meta(self) -> Meta:
        if not self.reason:
            return Meta(description="Accepted and ignored.")
        shown = " or ".join(f"`{_json(value)}`" for value in self.neutral)
        words = f"Accepted as {shown} only" if shown else "Refused unless it is null"
        extra = {REFUSED: True, "deprecated": True}
        return Meta(description=f"{words}: {self.reason}.", extra_json_schema=extra)

    def check(self, name: str, raw: Raw) -> None:
        """Raise InvalidRequest for a value that would change something."""
        given = bytes(raw)
        if not self.reason:
            return
        if len(given) <= SHORT:
            value = msgspec.json.decode(given)
            # 0 == False, but 0 may be a token id.
            same = [value == one for one in self.neutral if _is_flag(value) == _is_flag(one)]
            if value is None or any(same):
                return
        accepted = " or ".join(["null", *map(_json, self.neutral)])
        raise InvalidRequest(f"{name} must be {accepted}: {self.reason}", param=name)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


_KINDS = tomllib.loads(Path(__file__).with_name("others.toml").read_text(encoding="utf-8"))
_OF: dict[type, dict[str, Other]] = {}


def accepting(*kinds: str) -> Callable[[type[StructT]], type[StructT]]:
    """Return a decorator that adds the fields of these kinds of bodies to a body's struct;
    `check_others` checks them."""
    others = {
        name: Other(tuple(entry.get("neutral", ())), entry.get("reason", ""))
        for kind in kinds
        for entry in _KINDS[kind]
        for name in entry["fields"].split()
    }
    added = [(name, Annotated[Raw | UnsetType, one.meta], UNSET) for name, one in others.items()]

    def extended(body: type[StructT]) -> type[StructT]:
        made = msgspec.defstruct(
            body.__name__,
            added,
            bases=(body,),
            namespace={"__doc__": body.__doc__},
            module=body.__module__,
            forbid_unknown_fields=True,
            kw_only=True,
        )
        _OF[made] = others
        return cast("type[StructT]", made)

    return extended


def others_of(body: type[msgspec.Struct]) -> dict[str, Other]:
    return _OF.get(body, {})


def check_others(body: msgspec.Struct) -> None:
    """Raise InvalidRequest for the first field of other servers whose value is not neutral.

    Forget the values, which would keep the whole body in memory.
    """
    for name, other in others_of(type(body)).items():
        raw = getattr(body, name)
        if raw is not UNSET:
            setattr(body, name, UNSET)
            other.check(name, raw)

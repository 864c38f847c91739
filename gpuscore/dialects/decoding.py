"""Decoding of bodies, and fields of other servers that have no meaning here (others.toml).

Values of such fields that change nothing are accepted. Any other value is refused by the field's
name, with the reason, because an answer that ignored it would not be what the caller asked for.
"""

import difflib
import hashlib
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import filterfalse
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from gpuscore.config import RequestLimits
from gpuscore.dialects.parts import PartsDecoder
from gpuscore.dialects.wire import ScoringBody
from gpuscore.errors import InvalidRequest
from gpuscore.types.record import RequestRecord
from gpuscore.types.request import Terms

StructT = TypeVar("StructT", bound=msgspec.Struct)

REFUSED = "x-refused"
SHORT = 64  # bytes; a longer value is never one that changes nothing


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
        struct = msgspec.defstruct(
            body.__name__,
            added,
            bases=(body,),
            namespace={"__doc__": body.__doc__},
            module=body.__module__,
            forbid_unknown_fields=True,
            kw_only=True,
        )
        _OF[struct] = others
        return cast("type[StructT]", struct)

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


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_KNOWN_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_AT_PATH = re.compile(r"^(.*?) - at `\$\.?([^`]*)`$", re.DOTALL)
_CHOICES = re.compile(r"Expected `str` matching regex '\^\((.*)\)\\\\Z'")


def strict_decoder(
    body: type[StructT], check: Callable[[StructT], None] = lambda _: None
) -> Callable[[bytes, RequestRecord, RequestLimits | None], StructT]:
    """Return the `decode` of a dialect: it decodes JSON as this struct, and checks it.

    `decode` raises InvalidRequest, whose message never holds the body's text. A body with texts to
    score gets its terms, for which the record needs its tenant and its deadline.
    """
    at_once = msgspec.json.Decoder(body)
    in_parts = PartsDecoder(body)

    def decoded(data: bytes, record: RequestRecord, limits: RequestLimits | None) -> StructT:
        with _decoding_errors(body):
            data.decode()  # because msgspec takes bytes that are not UTF-8 as Raw
            fields = at_once.decode(data) if limits is None else in_parts.decode(data, limits)
            check_others(fields)
        if isinstance(fields, ScoringBody):
            salt = engine_salt(record.tenant, fields.cache_salt)
            fields.__dict__["terms"] = Terms(fields.priority or 0, salt, record.deadline)
        check(fields)
        return fields

    return decoded


def engine_salt(tenant: str | None, salt: str | None) -> str:
    """Return the salt that two requests must have in common to share a cached prefix.

    It always depends on the key's owner: a hit shows in `cached_tokens` and in time, so a shared
    cache would tell one owner which queries another has sent. The caller's salt can only narrow it
    further. It is hashed, so that neither a caller's text nor a key's digest reaches the engine.
    """
    return hashlib.sha256(f"{tenant or ''}:{salt or ''}".encode()).hexdigest()


@contextmanager
def _decoding_errors(body: type[msgspec.Struct]) -> Iterator[None]:
    """Turn every error that msgspec raises while decoding a body into InvalidRequest, whose message
    never holds the body's text."""
    try:
        yield
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def check_not_negative(body: msgspec.Struct, *fields: str) -> None:
    """Raise InvalidRequest for the first of these fields that is below 0."""
    for field in fields:
        value = getattr(body, field)
        if value is not None and value < 0:
            raise InvalidRequest(f"{field} is {value}, it must not be negative", param=field)


def _invalid(message: str, body: type[msgspec.Struct]) -> InvalidRequest:
    """Return msgspec's message about a body as InvalidRequest, without text of the caller's.

    The messages hold types, numbers and a path; only the name of an unknown field is the caller's.
    """
    unknown = _UNKNOWN_FIELD.match(message)
    if unknown is not None:
        name = unknown.group(1)
        if _KNOWN_NAME.fullmatch(name):
            ours = [*filterfalse(others_of(body).__contains__, body.__struct_encode_fields__)]
            close = difflib.get_close_matches(name, ours, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            return InvalidRequest(f"unknown field {name}{meant}", param=name)
        return InvalidRequest("unknown field")
    at = _AT_PATH.match(message)
    if at is None:
        return InvalidRequest(message[:500])
    text = _CHOICES.sub(lambda found: f"must be one of {found[1].replace('|', ', ')}", at[1])
    path = at[2]
    return InvalidRequest(f"{path}: {text}"[:500], param=path[:100] or None)

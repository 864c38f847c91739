"""Decoding of large bodies of /v1/score part by part, so that no other thread waits for the whole.

msgspec holds the GIL while it decodes. Ten thousand lists of labels, a million numbers, would take
it a tenth of a second in one call.
"""

from typing import Any

import msgspec

from gpuscore.dialects.score_types import Ids, ScoreBody, Text

PART = 2**15  # bytes of entries that are decoded in one call
# Of the fields with many entries.
_decoders: dict[str, msgspec.json.Decoder[list[Any]]] = {
    "items": msgspec.json.Decoder(list[Text | Ids | None]),
    "label_token_ids": msgspec.json.Decoder(list[int | Ids]),
}
_raw_entries = msgspec.json.Decoder(list[msgspec.Raw])
_NULL = msgspec.Raw(b"null")
_outer = msgspec.json.Decoder(
    msgspec.defstruct(
        "OuterScoreBody",
        [
            (field.name, msgspec.Raw, _NULL)
            if field.name in _decoders
            else (field.name, field.type, field.default)
            for field in msgspec.structs.fields(ScoreBody)
        ],
        forbid_unknown_fields=True,
    )
)


def decode_in_parts(body: bytes) -> ScoreBody | None:
    """Return what msgspec makes of a body; None if the whole is to be decoded at once.

    That is so for a wrong body, whose error then names the right place.
    """
    try:
        outer = _outer.decode(body)
        fields = {name: getattr(outer, name) for name in outer.__struct_fields__}
        for name, decoder in _decoders.items():
            fields[name] = _entries(fields[name], decoder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return ScoreBody(**fields)


def _entries(given: msgspec.Raw, decoder: msgspec.json.Decoder[list[Any]]) -> list[Any] | None:
    if given == _NULL:
        return None
    found: list[Any] = []
    some, size = list[msgspec.Raw](), 0
    for entry in _raw_entries.decode(given):
        some.append(entry)
        size += len(memoryview(entry))
        if size > PART:
            found += decoder.decode(b"[%b]" % b",".join(some))
            some, size = [], 0
    return found + decoder.decode(b"[%b]" % b",".join(some))

"""Descriptions of bodies' fields: the only source of /openapi.json and of the reference.

A field is `Annotated[type | None, about(...)]`; `null` means the same as leaving the field out.
"""

from typing import Annotated

from msgspec import Meta

# msgspec writes a field's own default, which is null nearly everywhere. The value that null stands
# for is kept under another name, and `schema` makes it the default.
DEFAULT = "x-default"
REFUSED = "x-refused"


def about(text: str, default: bool | int | float | str | None = None) -> Meta:
    """Describe a field.

    Args:
        text: its meaning, in a sentence.
        default: the value that null stands for, if there is one.
    """
    extra = None if default is None else {DEFAULT: default}
    return Meta(description=text, extra_json_schema=extra)


def refused(text: str = "") -> Meta:
    """Describe a field of the original API that is known only so that it is refused by name."""
    words = f"Refused unless it is null. {text}".strip()
    return Meta(description=words, extra_json_schema={REFUSED: True, "deprecated": True})


def only(text: str) -> Meta:
    """Describe a field of text generation that is accepted only at values that change nothing."""
    words = f"Accepted as {text}; anything else is refused, because nothing is generated."
    return Meta(description=words)


CacheSalt = Annotated[
    Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")] | None,
    about(
        "Separates prefix caches: a request finds only what requests with the same API key and the "
        "same salt have cached."
    ),
]
Priority = Annotated[
    Annotated[int, Meta(ge=-100, le=100)] | None,
    about("Requests with a lower number run first.", 0),
]
ModelName = Annotated[
    str | None,
    about(
        "A served model's name (see GET /v1/models); any other name is answered 404. null and "
        "`default` mean the only model, or the one of `--default-model`; without that, a server of "
        "several models answers 400."
    ),
]
ErrorMode = Annotated[
    Annotated[str, Meta(pattern=r"^(fail|null)\Z")] | None,
    about(
        "What an item that cannot be scored does. `fail`: it fails the request. `null`: it gets no "
        "score and stands in `errors`, and the others are scored. Errors of the whole request are "
        "the same with both.",
        "fail",
    ),
]
Unused = Annotated[str | None, about("Accepted and ignored.")]
RawFlag = bool | str | None  # some clients send booleans as text
ReturnMass = Annotated[
    bool | None,
    about(
        "Adds `label_mass`: the probability of all labels together, over the whole vocabulary. A "
        "mass near 0 means that the model would have said something else.",
        False,
    ),
]
MostTokens = Annotated[
    int | None,
    about("Cuts longer documents at their end, to this many tokens; 0 means never.", 0),
]
Truncate = Annotated[
    RawFlag,
    about("Cuts documents at their end where their prompts would not fit the model.", False),
]
Instruction = Annotated[
    str | None,
    about("Replaces the family's own instruction; refused where the family has none."),
]
# Fields of answers.
AnswerId = Annotated[str, about("The request's id, as in the header X-Request-Id.")]
AnsweredModel = Annotated[str, about("The model's name as the request gave it, or else its own.")]
Created = Annotated[int, about("Time of the answer, in seconds since 1970.")]
Index = Annotated[int, about("Number of the document in the request, from 0.")]
Truncated = Annotated[bool, about("true if it was cut, as the request allowed.")]

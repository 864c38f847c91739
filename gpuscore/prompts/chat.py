"""A model's chat template, rendered with marks for callers' texts.

A request's texts replace the marks after rendering. The template never sees them, so no text can
change how it renders, and no request has to wait for it: it is rendered when the model is loaded.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gpuscore.errors import ConfigError
from gpuscore.models.files import MAX_TEMPLATE, as_object, read_object, read_text, shown
from gpuscore.prompts.family import DOCUMENT, INSTRUCTION, QUERY, Ends, Messages, literal
from gpuscore.prompts.rendering import TemplateLimit, render
from gpuscore.text.declared import token_text

TEMPLATE = "chat_template.jinja"
WHITE = " \n"  # the white space that is tried around texts
# Placeholders for the callers' texts while a chat template is rendered; no template contains them.
MARKS = {INSTRUCTION: "\ue001i\ue001", QUERY: "\ue002q\ue002", DOCUMENT: "\ue003d\ue003"}
WITHOUT_FAMILY = (
    "without a family (--family none; family='none' in Python) the model still scores query, items "
    "and labels"
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat template of a model directory.

    Args:
        text: the template in Jinja, as in Hugging Face tokenizers.
        variables: the special tokens that the template may use, such as bos_token.
        file: the name of its file.
    """

    text: str
    variables: Mapping[str, str]
    file: str = TEMPLATE

    @classmethod
    def read(cls, directory: Path) -> "ChatTemplate | None":
        """Return the template, or None if there is none; raise ConfigError for unreadable files."""
        path = directory / "tokenizer_config.json"
        file = TEMPLATE
        config = read_object(path) or {}
        template = read_text(directory / file, MAX_TEMPLATE)
        if template is None:
            file = path.name
            template = _configured(config.get("chat_template"), f"{path}: chat_template")
        if template is None:
            return None
        tokens = {name: token_text(config.get(name)) for name in config if name.endswith("_token")}
        return cls(
            template, {name: text for name, text in tokens.items() if text is not None}, file
        )

    def marked_and_ends(
        self, messages: Messages, options: Mapping[str, object], pieces: bool | None = None
    ) -> tuple[str, dict[str, Ends]]:
        """Render with marks in place of the fields, and return the white space that the template
        drops around each text.

        Args:
            messages: the conversation; its contents may have fields like the parts of a family.
            options: variables of the template.
            pieces: contents are lists of pieces, as templates of models that also read images
                expect them, or plain texts; None: plain texts if they render right, else pieces.
        """
        fields = [f for f in MARKS if any("{" + f + "}" in content for _, content in messages)]
        bare, *spaced = self._marked(messages, options, fields, pieces)
        per_field = [spaced[i : i + len(WHITE)] for i in range(0, len(spaced), len(WHITE))]
        try:
            ends = {
                field: _ends(field, bare, texts)
                for field, texts in zip(fields, per_field, strict=True)
            }
        except ConfigError as error:
            raise self._refused(error) from error
        return bare, ends

    def _marked(
        self,
        messages: Messages,
        options: Mapping[str, object],
        fields: list[str],
        pieces: bool | None,
    ) -> list[str]:
        """Render the messages, and again with each of WHITE around each mark, in one process.

        Only one field at a time gets white space, which between two fields could be of either.
        """
        arounds = [("", ""), *((field, char) for field in fields for char in WHITE)]
        conversations = [
            conversation for around in arounds for conversation in _conversations(messages, *around)
        ]
        try:
            rendered = render(self.text, {**self.variables, **options}, conversations)
        except TemplateLimit as error:
            raise TemplateLimit(f"{self.file}: {error}; {WITHOUT_FAMILY}") from error
        try:
            pairs = [rendered[i : i + 2] for i in range(0, len(rendered), 2)]
            return [
                _chosen(pair if pieces is None else pair[pieces:][:1], fields) for pair in pairs
            ]
        except ConfigError as error:
            raise self._refused(error) from error

    def _refused(self, error: ConfigError) -> ConfigError:
        return ConfigError(f"{self.file}: the chat template {error}; {WITHOUT_FAMILY}")


def _ends(field: str, bare: str, spaced: Sequence[str]) -> Ends:
    """Return what a template drops around the text of a field.

    Args:
        field: the text's.
        bare, spaced: the prompt without, and with each one of WHITE around the text.

    Raises:
        ConfigError: it drops white space at one place of the text and keeps it at another.
    """
    before = ""
    after = ""
    for char, text in zip(WHITE, spaced, strict=True):
        # The template's own text beside the mark may be the same character.
        pairs = zip(
            _beside(MARKS[field], text, char), _beside(MARKS[field], bare, char), strict=True
        )
        dropped = {
            (with_char[0] == without[0], with_char[1] == without[1]) for with_char, without in pairs
        }
        if len(dropped) > 1:
            raise ConfigError(f"drops white space around one {field} and keeps it around another")
        ((drops_before, drops_after),) = dropped
        before += char * drops_before
        after += char * drops_after
    return None if before == WHITE else before, None if after == WHITE else after


def _beside(mark: str, text: str, char: str) -> list[tuple[int, int]]:
    """Return how often a character stands directly before and directly after each mark."""
    pieces = text.split(mark)
    return [
        (len(before) - len(before.rstrip(char)), len(after) - len(after.lstrip(char)))
        for before, after in pairwise(pieces)
    ]


def _configured(value: object, name: str) -> str | None:
    """Return the template in a tokenizer's configuration; of several, the one named "default"."""
    if isinstance(value, list):
        every = [as_object(entry, f"an entry of {name}") for entry in value]
        value = next(
            (entry.get("template") for entry in every if entry.get("name") == "default"), None
        )
    if not isinstance(value, str | None):
        raise ConfigError(f"{name} must be a text, found {shown(value)}")
    return value


def _conversations(
    messages: Messages, spaced: str, around: str
) -> Iterator[list[dict[str, object]]]:
    """Yield the conversation with marks in place of fields, one of them spaced, in two forms:
    with plain texts, then with lists of pieces."""
    marks = MARKS | ({spaced: f"{around}{MARKS[spaced]}{around}"} if spaced else {})
    texts = [(role, content.format_map(marks)) for role, content in messages]
    yield [{"role": role, "content": text} for role, text in texts]
    yield [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]


def _chosen(rendered: Sequence[str | ConfigError], fields: list[str]) -> str:
    """Return the first rendering that has the fields; raise ConfigError if none has."""
    first = rendered[0]
    if isinstance(first, ConfigError):
        raise ConfigError(f"cannot be rendered: {first}")
    for text in rendered:
        if isinstance(text, str) and not _wrong(text, fields):
            return text
    raise ConfigError(f"has the {_wrong(first, fields)}")


def _wrong(rendered: str, fields: list[str]) -> str:
    """Return what is wrong with the fields in a prompt; empty if it has all, the document once."""
    for field in fields:
        count = rendered.count(MARKS[field])
        if count == 0 or (field == DOCUMENT and count > 1):
            return f"{field} {count} times, not once"
        if not all(between.strip() for between in rendered.split(MARKS[field])[1:-1]):
            return f"{field} twice side by side"
    return ""


def parts_of(text: str, specials: Sequence[str]) -> tuple[str, ...]:
    """Split a rendered prompt into a family's parts; parts with fields have no special tokens."""
    pieces = []
    start = 0
    for end, token in _special_tokens(text, specials):
        pieces += [text[start : end - len(token)], token]
        start = end
    pieces.append(text[start:])
    parts: list[str] = []
    fixed = True  # the last part has no fields
    for piece in pieces:
        part = literal(piece)
        for field, mark in MARKS.items():
            part = part.replace(mark, "{" + field + "}")
        has_field = part != literal(piece)
        if fixed and not has_field and parts:
            parts[-1] += part
        elif part:
            parts.append(part)
            fixed = not has_field
    return tuple(parts)


def _special_tokens(text: str, specials: Sequence[str]) -> list[tuple[int, str]]:
    """Return (end, token) of every special token in the text; at each place, the longest one."""
    ordered = sorted(filter(None, specials), key=len, reverse=True)
    if not ordered:
        return []
    any_of_them = re.compile("|".join(map(re.escape, ordered)))
    return [(match.end(), match.group()) for match in any_of_them.finditer(text)]

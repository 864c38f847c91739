"""A model's chat template, rendered with marks for callers' texts.

A request's texts replace the marks after rendering. The template never sees them, so no text can
change how it renders, and no request has to wait for it: it is rendered when the model is loaded.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuscore.errors import ConfigError
from gpuscore.models.files import MAX_TEMPLATE, as_object, read_object, read_text, shown
from gpuscore.prompts.family import DOCUMENT, INSTRUCTION, QUERY, Ends, literal
from gpuscore.prompts.rendering import TemplateLimit, render
from gpuscore.text.declared import token_text

TEMPLATE = "chat_template.jinja"
WHITE = " \n"  # the white space that is tried around texts
# Placeholders for the callers' texts while a chat template is rendered; no template contains them.
MARKS = {INSTRUCTION: "\ue001i\ue001", QUERY: "\ue002q\ue002", DOCUMENT: "\ue003d\ue003"}
Messages = Sequence[tuple[str, str]]  # (role, content); the content has fields such as {query}
BESIDE = (
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
        path, file = directory / "tokenizer_config.json", TEMPLATE
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
        self, messages: Messages, options: Mapping[str, object]
    ) -> tuple[str, dict[str, Ends]]:
        """Render with marks in place of the fields, and return the white space that the template
        drops around each text.

        Args:
            messages: the conversation; its contents may have fields like the parts of a family.
            options: variables of the template.
        """
        bare, *spaced = self._marked(messages, options)
        fields = [field for field in MARKS if MARKS[field] in bare]
        return bare, {field: _ends(MARKS[field], bare, spaced) for field in fields}

    def _marked(self, messages: Messages, options: Mapping[str, object]) -> list[str]:
        """Render with nothing and with each of WHITE around each mark, in one process."""
        fields = [f for f in MARKS if any("{" + f + "}" in content for _, content in messages)]
        arounds = ("", *WHITE)
        conversations = [made for around in arounds for made in _conversations(messages, around)]
        try:
            made = render(self.text, {**self.variables, **options}, conversations)
        except TemplateLimit as error:
            raise TemplateLimit(f"{self.file}: {error}; {BESIDE}") from error
        try:
            return [_chosen(made[i : i + 2], fields) for i in range(0, len(made), 2)]
        except ConfigError as error:
            raise ConfigError(f"{self.file}: the chat template {error}; {BESIDE}") from error


def _ends(mark: str, bare: str, spaced: Sequence[str]) -> Ends:
    """Return what a template drops around the text of a mark.

    Args:
        mark: of the text.
        bare, spaced: the prompt without, and with each one of WHITE around the text.
    """
    before, after = "", ""
    for char, text in zip(WHITE, spaced, strict=True):
        # The template's own text beside the mark may be the same character.
        before += char * (_beside(mark, text, char)[0] == _beside(mark, bare, char)[0])
        after += char * (_beside(mark, text, char)[1] == _beside(mark, bare, char)[1])
    return None if before == WHITE else before, None if after == WHITE else after


def _beside(mark: str, text: str, char: str) -> tuple[int, int]:
    """Return how often a character stands directly before and directly after the mark."""
    before, after = text.split(mark)
    return len(before) - len(before.rstrip(char)), len(after) - len(after.lstrip(char))


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


def _conversations(messages: Messages, around: str) -> Iterator[list[dict[str, object]]]:
    """Yield the conversation with marks in place of fields, in two forms.

    Contents are first plain text, then lists of pieces, as templates of models that also read
    images expect them.
    """
    marks = {field: f"{around}{mark}{around}" for field, mark in MARKS.items()}
    texts = [(role, content.format_map(marks)) for role, content in messages]
    yield [{"role": role, "content": text} for role, text in texts]
    yield [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]


def _chosen(made: Sequence[str | ConfigError], fields: list[str]) -> str:
    """Return the rendering of plain contents if it has all fields once, else pieces' rendering."""
    plain, pieces = made
    if isinstance(plain, ConfigError):
        raise ConfigError(f"cannot be rendered: {plain}")
    wrong = _wrong(plain, fields)
    if not wrong:
        return plain
    if isinstance(pieces, ConfigError) or _wrong(pieces, fields):
        raise ConfigError(f"has the {wrong}")
    return pieces


def _wrong(rendered: str, fields: list[str]) -> str:
    """Return the field that does not occur once, or stands after the document; empty if none."""
    for field in fields:
        if (count := rendered.count(MARKS[field])) != 1:
            return f"{field} {count} times, not once"
    late = [
        field for field in fields if rendered.find(MARKS[field]) > rendered.find(MARKS[DOCUMENT])
    ]
    return f"{late[0]} after the document, not before it" if late and DOCUMENT in fields else ""


def parts_of(text: str, specials: Sequence[str]) -> tuple[str, ...]:
    """Split a rendered prompt into a family's parts; parts with fields have no special tokens."""
    pieces, start = [], 0
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

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
from gpuscore.prompts.family import DOCUMENT, INSTRUCTION, QUERY, literal
from gpuscore.prompts.rendering import TemplateLimit, render
from gpuscore.text.declared import token_text

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
    """

    text: str
    variables: Mapping[str, str]

    @classmethod
    def read(cls, directory: Path) -> "ChatTemplate | None":
        """Return the template, or None if there is none; raise ConfigError for unreadable files."""
        path = directory / "tokenizer_config.json"
        config = read_object(path) or {}
        template = read_text(directory / "chat_template.jinja", MAX_TEMPLATE)
        if template is None:
            template = _configured(config.get("chat_template"), f"{path}: chat_template")
        if template is None:
            return None
        tokens = {name: token_text(config.get(name)) for name in config if name.endswith("_token")}
        return cls(template, {name: text for name, text in tokens.items() if text is not None})

    def marked(self, messages: Messages, options: Mapping[str, object], around: str = "") -> str:
        """Render the template with marks in place of the fields.

        Args:
            messages: the conversation; its contents may have fields like the parts of a family.
            options: variables of the template.
            around: text to put before and after each mark.
        """
        return self.marked_each(messages, options, (around,))[0]

    def marked_each(
        self, messages: Messages, options: Mapping[str, object], arounds: Sequence[str]
    ) -> list[str]:
        """Render as `marked` does for several `arounds`, in one process."""
        fields = [f for f in MARKS if any("{" + f + "}" in content for _, content in messages)]
        conversations = [made for around in arounds for made in _conversations(messages, around)]
        try:
            made = render(self.text, {**self.variables, **options}, conversations)
        except TemplateLimit as error:
            raise TemplateLimit(f"{error}; {BESIDE}") from error
        return [_chosen(made[i : i + 2], fields) for i in range(0, len(made), 2)]


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
        raise ConfigError(f"the chat template cannot be rendered: {plain}; {BESIDE}")
    wrong = _wrong(plain, fields)
    if not wrong:
        return plain
    if isinstance(pieces, ConfigError) or _wrong(pieces, fields):
        raise ConfigError(f"the chat template has the {wrong}, not once; {BESIDE}")
    return pieces


def _wrong(rendered: str, fields: list[str]) -> str:
    """Return a field that does not occur exactly once, with its count; empty if there is none."""
    counts = {field: rendered.count(MARKS[field]) for field in fields}
    return next((f"{field} {count} times" for field, count in counts.items() if count != 1), "")


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

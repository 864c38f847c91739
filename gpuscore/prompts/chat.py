"""A model's chat template, rendered once when the model is loaded, with marks for callers' texts.

What a request brings is put where the marks are and is never seen by the template, so no text can
do anything to it, and prompts are ready before the first request.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuscore.errors import ConfigError
from gpuscore.model_files import MAX_TEMPLATE, as_object, read_object, read_text, shown
from gpuscore.prompts.family import DOCUMENT, INSTRUCTION, QUERY, literal
from gpuscore.prompts.rendering import TemplateLimit, render
from gpuscore.text.tokenizer_info import token_text

# Stand for the callers' texts while a chat template is rendered; no template holds them.
MARKS = {INSTRUCTION: "\ue001i\ue001", QUERY: "\ue002q\ue002", DOCUMENT: "\ue003d\ue003"}
Messages = Sequence[tuple[str, str]]  # role and content, which has fields
_BESIDE = "--family none serves /v1/score without it"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The template of a model directory.

    Args:
        text: in Jinja, as Hugging Face's tokenizers have it.
        variables: the special tokens that it may name, such as bos_token.
    """

    text: str
    variables: Mapping[str, str]

    @classmethod
    def read(cls, directory: Path) -> "ChatTemplate | None":
        """None if the directory has none. Raises ConfigError for files that cannot be read."""
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
        """Rendered with marks in the place of the fields.

        Args:
            messages: their contents may have fields, as parts of a family have them.
            options: variables of the template.
            around: stands before and behind each mark.
        """
        return self.marked_each(messages, options, (around,))[0]

    def marked_each(
        self, messages: Messages, options: Mapping[str, object], arounds: Sequence[str]
    ) -> list[str]:
        """`marked` for several `arounds`, in one process."""
        fields = [f for f in MARKS if any("{" + f + "}" in content for _, content in messages)]
        conversations = [made for around in arounds for made in _conversations(messages, around)]
        try:
            made = render(self.text, {**self.variables, **options}, conversations)
        except TemplateLimit as error:
            raise TemplateLimit(f"{error}; {_BESIDE}") from error
        return [_chosen(made[i : i + 2], fields) for i in range(0, len(made), 2)]


def _configured(value: object, name: str) -> str | None:
    """The template that a tokenizer's configuration holds, the default one of several."""
    if isinstance(value, list):
        every = [as_object(one, f"an entry of {name}") for one in value]
        value = next((one.get("template") for one in every if one.get("name") == "default"), None)
    if not isinstance(value, str | None):
        raise ConfigError(f"{name} must be a text, found {shown(value)}")
    return value


def _conversations(messages: Messages, around: str) -> Iterator[list[dict[str, object]]]:
    """With marks in the place of fields: plain, and as templates of models that also take pictures
    want them, as lists of pieces."""
    marks = {field: f"{around}{mark}{around}" for field, mark in MARKS.items()}
    texts = [(role, content.format_map(marks)) for role, content in messages]
    yield [{"role": role, "content": text} for role, text in texts]
    yield [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]


def _chosen(made: Sequence[str | ConfigError], fields: list[str]) -> str:
    """The plain conversation if the template takes it, else that of pieces."""
    plain, pieces = made
    if isinstance(plain, ConfigError):
        raise ConfigError(f"the chat template cannot be rendered: {plain}; {_BESIDE}")
    wrong = _wrong(plain, fields)
    if not wrong:
        return plain
    if isinstance(pieces, ConfigError) or _wrong(pieces, fields):
        raise ConfigError(f"the chat template has the {wrong}, not once; {_BESIDE}")
    return pieces


def _wrong(rendered: str, fields: list[str]) -> str:
    """A field that is not there once, and how often it is."""
    counts = {field: rendered.count(MARKS[field]) for field in fields}
    return next((f"{field} {count} times" for field, count in counts.items() if count != 1), "")


def parts_of(text: str, specials: Sequence[str]) -> tuple[str, ...]:
    """A rendered prompt as the parts of a family: special tokens stand in parts without fields."""
    pieces, start = [], 0
    for end, token in _found(text, specials):
        pieces += [text[start : end - len(token)], token]
        start = end
    pieces.append(text[start:])
    parts: list[str] = []
    fixed = True  # whether the last part has no fields
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


def _found(text: str, specials: Sequence[str]) -> list[tuple[int, str]]:
    """Where special tokens end, from left to right, the longest first."""
    ordered = sorted(filter(None, specials), key=len, reverse=True)
    if not ordered:
        return []
    any_of_them = re.compile("|".join(map(re.escape, ordered)))
    return [(match.end(), match.group()) for match in any_of_them.finditer(text)]

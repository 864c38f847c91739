"""A model's chat template, rendered once when the model is loaded, with marks for callers' texts.

What a request brings is put where the marks are and is never seen by the template, so no text can
do anything to it, and prompts are ready before the first request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpuscore.errors import ConfigError
from gpuscore.families.family import DOCUMENT, INSTRUCTION, QUERY, literal
from gpuscore.families.files import read_json
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
        config = read_json(directory / "tokenizer_config.json") or {}
        path = directory / "chat_template.jinja"
        template = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(template, list):  # of several, by name
            named = {one.get("name"): one.get("template") for one in template}
            template = named.get("default")
        if not isinstance(template, str):
            return None
        tokens = {name: token_text(config.get(name)) for name in config if name.endswith("_token")}
        return cls(template, {name: text for name, text in tokens.items() if text is not None})

    def render(self, messages: Sequence[Mapping[str, object]], **options: object) -> str:
        """As transformers renders chat templates, in Jinja's sandbox; the date is not known to it,
        or prompts would change with it."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self.text)
            return template.render(messages=messages, **self.variables, **options)
        except (TemplateError, TypeError, AttributeError, LookupError) as error:
            raise ConfigError(
                f"the chat template cannot be rendered: {error}; {_BESIDE}"
            ) from error

    def marked(self, messages: Messages, options: Mapping[str, object], around: str = "") -> str:
        """Rendered with marks in the place of the fields.

        Args:
            messages: their contents may have fields, as parts of a family have them.
            options: variables of the template.
            around: stands before and behind each mark.
        """
        marks = {field: f"{around}{mark}{around}" for field, mark in MARKS.items()}
        texts = [(role, content.format_map(marks)) for role, content in messages]
        fields = [f for f in MARKS if any("{" + f + "}" in content for _, content in messages)]
        plain = self.render([{"role": r, "content": text} for r, text in texts], **options)
        wrong = _wrong(plain, fields)
        if not wrong:
            return plain
        # Templates of models that also take pictures want a list of pieces.
        pieces = [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in texts]
        try:
            rendered = self.render(pieces, **options)
        except ConfigError:
            rendered = ""
        if _wrong(rendered, fields):
            raise ConfigError(f"the chat template has the {wrong}, not once; {_BESIDE}")
        return rendered


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
    ordered, found, at = sorted(specials, key=len, reverse=True), [], 0
    while at < len(text):
        token = next((t for t in ordered if t and text.startswith(t, at)), None)
        at += 1 if token is None else len(token)
        if token is not None:
            found.append((at, token))
    return found


def _refuse(message: str) -> NoReturn:
    """What templates call for conversations that they do not take."""
    raise TemplateError(message)

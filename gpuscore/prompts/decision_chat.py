"""The conversation around typed questions: the chat template's, with or without instructions.

The template is rendered when the model is loaded. A request with variables of its own
(`chat_template_kwargs`) or with instructions needs another rendering, which is kept for the next
request with the same ones.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from threading import Lock
from typing import Any

from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.prompts.chat import ChatTemplate, parts_of
from gpuscore.prompts.decision_texts import SINGLE
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.family import PromptFamily, fields_of
from gpuscore.text.joining import PromptBuilder

KEPT = 16  # renderings
MOST = 4096  # characters of a request's variables, as JSON
PARAM = "chat_template_kwargs"
ASKED = "{query}\n\n{document}"
OWN = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents")
THINKING = "enable_thinking"
RESERVED = "special tokens are for the server alone"


class DecisionChat:
    """The renderings of one served model.

    Args:
        template: the model's; None: prompts are plain text.
        specials: the tokenizer's special tokens.
        builder: of the model's requests.

    Raises:
        ConfigError: on creation, if the plain rendering fails or a label is not one token.
    """

    def __init__(
        self, template: ChatTemplate | None, specials: Sequence[str], builder: PromptBuilder
    ) -> None:
        self._template, self._specials, self._builder = template, specials, builder
        self._kept: OrderedDict[tuple[bool, str], FamilyPrompts] = OrderedDict()
        self._lock = Lock()
        self.plain = self._made(self._parts(False, {}))

    def prompts(self, instructed: bool, variables: Mapping[str, Any]) -> FamilyPrompts:
        """Return the prompts for a request; a new rendering takes a process and some 0.2 seconds.

        Args:
            instructed: the request has instructions.
            variables: of the template; raises InvalidRequest for those that it may not have.
        """
        if not instructed and not variables:
            return self.plain
        key = instructed, self._checked(variables)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        try:
            parts = self._parts(instructed, variables)
            if parts[-1] != self.plain.family.parts[-1] and not fields_of(parts[-1]):
                # Labels might be other tokens there.
                raise ConfigError("the prompt would end otherwise")
            made = self._made(parts)
        except ConfigError as error:
            what = PARAM if variables else "instructions"
            raise InvalidRequest(f"{what}: {error}", param=what) from error
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made

    def _made(self, parts: tuple[str, ...]) -> FamilyPrompts:
        strip = self._template is not None
        family = PromptFamily("decisions", "", parts, SINGLE, classes=SINGLE, strip=strip)
        return FamilyPrompts(family, self._builder)

    def _parts(self, instructed: bool, variables: Mapping[str, Any]) -> tuple[str, ...]:
        before = "{instruction}\n\n" if instructed else ""
        if self._template is None:
            return (f"{before}{ASKED}\n\nAnswer:\n",)
        options = {"add_generation_prompt": True, THINKING: False} | dict(variables)
        if not instructed:
            return self._rendered([("user", ASKED)], options)
        try:
            return self._rendered([("system", "{instruction}"), ("user", ASKED)], options)
        except ConfigError:  # a template without that turn raises, or leaves the text out
            return self._rendered([("user", before + ASKED)], options)

    def _rendered(
        self, messages: Sequence[tuple[str, str]], options: Mapping[str, object]
    ) -> tuple[str, ...]:
        assert self._template is not None  # noqa: S101  (the caller has checked)
        text = self._template.marked(messages, options)
        self._check_values(text, options)
        return parts_of(text, self._specials)

    def _check_values(self, text: str, options: Mapping[str, object]) -> None:
        """Raise ConfigError if a variable's text is part of a control token of the prompt.

        Words do not count: templates make markers of the words that they know.
        """
        values = {value.strip() for value in _texts(options) if not value.strip().isalnum()} - {""}
        places = self._builder.need_encoder(PARAM).control_places(text) if values else ()
        for start, end in places:
            if any(v in text[max(0, start - len(v) + 1) : end + len(v) - 1] for v in values):
                raise ConfigError(RESERVED)

    def _checked(self, variables: Mapping[str, Any]) -> str:
        """Return variables as a key; raise InvalidRequest for those that no request may set."""
        if not variables:
            return ""
        key = json.dumps(variables, ensure_ascii=False)
        wrong = ""
        if self._template is None:
            wrong = "this model has no chat template"
        elif own := [name for name in OWN if name in variables]:
            wrong = f"{own[0]} is set by the server"
        elif variables.get(THINKING):
            wrong = f"{THINKING} must be false, because the answer is what the model says first"
        elif len(key) > MOST:
            wrong = f"{len(key)} characters, the limit is {MOST}"
        elif any(token and token in key for token in self._specials):
            wrong = RESERVED
        if wrong:
            raise InvalidRequest(f"{PARAM}: {wrong}", param=PARAM)
        return key


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for one in chain(value, value.values() if isinstance(value, Mapping) else ()):
            yield from _texts(one)

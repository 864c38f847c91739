"""Prompts for typed questions about one input: yes or no, one of several choices, a level.

The input comes first in all prompts, so it is computed once for N questions. The labels are scored
as what comes next. The model's files may say how it was trained to be asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from gpuscore.config import RequestLimits
from gpuscore.errors import ConfigError, InvalidRequest, PromptTooLong, TooManyTokens
from gpuscore.models.files import read_object, shown
from gpuscore.prompts.calibration import Calibration, Temperature, same_temperature
from gpuscore.prompts.chat import ChatTemplate, DecisionChat
from gpuscore.prompts.decision_reads import DecisionReads, with_labels
from gpuscore.prompts.decision_texts import PAIRS, SINGLE, DecisionQuestion, json_text
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.boundaries import ALONE, Turns
from gpuscore.text.joining import PromptBuilder
from gpuscore.types.request import LabelTrie, ScoreRequest

FIXED, BALANCED = ORDERS = "fixed", "balanced"  # balanced: choices are read in two orders


@dataclass(frozen=True, slots=True)
class DecisionSettings:
    """Settings of typed questions, from the command line and from the model's files.

    Args:
        order: "fixed" or "balanced".
        calibration: of the probabilities; None: the model's own.
        json_state: the model was made for a state in JSON, also if it is a text.
        refused: the reason why the model answers no questions; empty if it may.
    """

    order: str = FIXED
    calibration: Calibration | None = None
    json_state: bool = False
    refused: str = ""

    @property
    def in_force(self) -> Calibration:
        return self.calibration or Calibration()


@dataclass(frozen=True, slots=True)
class DecisionInput:
    """A caller's input and questions.

    Args:
        input: what the questions are about.
        questions: at least one.
        instructions: for the model, before the input.
        chat: variables of the chat template.
        is_json: the input is JSON already.
        priority: of the request; a lower value runs first.
        need_top: ask for the most probable token.
        name: the caller's name for the questions, for errors.
        input_name: the caller's name for the input, for errors.
    """

    input: str
    questions: Sequence[DecisionQuestion]
    instructions: str | None = None
    chat: Mapping[str, Any] = field(default_factory=dict)
    is_json: bool = False
    priority: int = 0
    need_top: bool = False
    name: str = "questions"
    input_name: str = "input"


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """A request to the engine, and how its result is read."""

    request: ScoreRequest
    reads: DecisionReads


class DecisionPrompts:
    """The prompts of one served model: its chat template, or plain text if it has none.

    Raises:
        ConfigError: on creation, if a label is not one token; the message says why the model
            cannot answer such questions.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        specials: Sequence[str],
        builder: PromptBuilder,
        settings: DecisionSettings | None = None,
    ) -> None:
        self.settings = settings or DecisionSettings()
        if self.settings.refused:
            raise ConfigError(self.settings.refused)
        if builder.encoder is None or builder.backend.classes is not None:
            raise ConfigError("typed questions need a language model with a tokenizer")
        self._builder = builder
        self._chat = DecisionChat(template, specials, builder)
        self._prompts = self._chat.plain
        self._ids = dict(zip(SINGLE, self._prompts.label_ids, strict=True))
        self._tries: dict[tuple[str, ...], LabelTrie] = {}

    @property
    def limits(self) -> RequestLimits:
        return self._builder.limits

    def build(self, inputs: DecisionInput, turns: Turns = ALONE) -> DecisionRequest:
        """Return the request for these questions; raises GpuscoreError as `FamilyPrompts.build`."""
        reads = self._reads(inputs.questions)
        texts = [question.turned if turned else question.text for _, question, turned in reads]
        tries = [self._trie(question.labels) for _, question, _ in reads]
        text = inputs.input
        if self.settings.json_state and not inputs.is_json:
            text = json_text(text)
        asked = RerankInput(
            query=text,
            documents=texts,
            instruction=inputs.instructions,
            priority=inputs.priority,
            need_lse=True,
            name=inputs.name,
            query_name=inputs.input_name,
        )
        prompts = self._chat.prompts(inputs.instructions is not None, inputs.chat)
        first = [trie.next_ids[0].tolist() for trie in tries]
        request = prompts.build(asked, turns, first).request
        self._check_lengths(request, tries, inputs.name)
        request = replace(request, num_top=int(inputs.need_top))
        backend, calibration = self._builder.backend, self.settings.in_force
        kinds = [(number, question.kind, turned) for number, question, turned in reads]
        made, answers = with_labels(request, tries, kinds, backend, calibration)
        if made.num_tokens > self.limits.max_request_tokens:
            raise TooManyTokens(
                f"{made.num_tokens} tokens, the limit is {self.limits.max_request_tokens}",
                param=inputs.name,
            )
        return DecisionRequest(made, answers)

    def _reads(
        self, questions: Sequence[DecisionQuestion]
    ) -> list[tuple[int, DecisionQuestion, bool]]:
        """Return each read's question with its number, and whether its options are turned.

        Turned reads come last, so that the place of a prompt in an error is its question's number.
        """
        reads = [(number, question, False) for number, question in enumerate(questions)]
        if self.settings.order == BALANCED:
            reads += [
                (n, question, True)
                for n, question, _ in reads
                if question.turned and len(question.labels) > 1
            ]
        return reads

    def _trie(self, labels: tuple[str, ...]) -> LabelTrie:
        if labels not in self._tries:  # at most one for each number of options
            single = tuple((self._ids[label],) for label in labels if label in self._ids)
            self._tries[labels] = LabelTrie(single or self._pairs[: len(labels)])
        return self._tries[labels]

    @cached_property
    def _pairs(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of labels of two letters; raises InvalidRequest if they cannot be labels."""
        try:
            pairs = tuple(tuple(self._prompts.label_tokens(label)) for label in PAIRS)
        except ConfigError as error:
            raise InvalidRequest(f"over 26 options: {error}") from error
        if len(LabelTrie(pairs).counted) < len(pairs):
            raise InvalidRequest(
                "over 26 options: with this tokenizer a label of two letters begins another"
            )
        return pairs

    def _check_lengths(self, request: ScoreRequest, tries: Sequence[LabelTrie], name: str) -> None:
        """Raise PromptTooLong for a prompt after which its longest label does not fit."""
        limit = self._builder.backend.max_model_len
        for number, (item, trie) in enumerate(zip(request.item_ids, tries, strict=True)):
            length = len(request.query_ids) + len(item) + trie.longest - 1
            if length > limit:
                raise PromptTooLong(
                    f"{name}[{number}] has {length} tokens with a label, the limit is {limit}",
                    param=f"{name}[{number}]",
                )


TEMPERATURE, STATE_FORMAT = "decision_temperature", "decision_state_format"
FORMATS = ("text", "json")
ENTRY = "decision"  # every entry of config.json that begins so says something about questions
# Formats of their own, which come with templates or heads that this server does not know.
OTHERS = ("decision_config.json", "decision_template.jinja", "kenning.json", "s1_config.json")


def read_asking(order: str, calibration: str | None) -> DecisionSettings:
    """Return the command line's settings; raise ConfigError for an invalid calibration.

    Args:
        order: "fixed" or "balanced".
        calibration: a file, in place of the temperature that the model's files name.
    """
    if calibration is None:
        return DecisionSettings(order)
    scalings = Calibration.read(Path(calibration))
    fitted = scalings.about.get("decision_order", order)
    if fitted != order:
        raise ConfigError(
            f"--calibration {calibration} was fitted with --decision-order {shown(fitted)}, not "
            f"{order}"
        )
    return DecisionSettings(order, scalings)


def read_decision_settings(directory: Path, asked: DecisionSettings) -> DecisionSettings:
    """Return the settings `asked` for on the command line, completed from the model's files.

    Raises:
        ConfigError: an entry of config.json has a value that it cannot have.
    """
    path = directory / "config.json"
    entries = {k: v for k, v in (read_object(path) or {}).items() if k.startswith(ENTRY)}
    own = asked.calibration
    try:
        temperature = convert(entries.get(TEMPERATURE), Temperature | None)
    except ValidationError as error:
        raise ConfigError(f"{path}: {TEMPERATURE}: {error}") from error
    if own is None and temperature is not None:
        own = same_temperature(temperature)
    form = entries.get(STATE_FORMAT, FORMATS[0])
    if form not in FORMATS:
        raise ConfigError(f"{path}: {STATE_FORMAT} must be text or json, found {shown(form)}")
    refused = _refused(directory, entries)
    return replace(asked, calibration=own, json_state=form == "json", refused=refused)


def _refused(directory: Path, entries: Mapping[str, Any]) -> str:
    """Return the reason why our prompts do not fit the model; empty if they do."""
    unknown = sorted(set(entries) - {TEMPERATURE, STATE_FORMAT})
    if unknown:
        return f"its config.json has {shown(unknown[0])}, a way to ask that is not supported"
    for name in OTHERS:
        if (directory / name).exists():
            return f"its folder has {name}, a way to ask that is not supported"
    return ""

"""The answer of /v1/completions, made one prompt at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import msgspec
import numpy as np

from gpuscore.arrays import NO_TOKENS, Int32Array
from gpuscore.probabilities import PositionLogprobs, position_logprobs, top_logprobs
from gpuscore.request import ScoreResult
from gpuscore.server.api.fields import AnsweredModel, AnswerId, Created, about
from gpuscore.server.api.schema import PromptTokensDetails, TokenUsage
from gpuscore.text.tokenizer import TextEncoder

About = tuple[str, int, str]  # id, time and model


class Logprobs(msgspec.Struct):
    tokens: Annotated[list[str], about("The text of each token.")]
    token_logprobs: Annotated[
        list[float | None], about("Natural logarithms; null for a prompt's first token.")
    ]
    top_logprobs: Annotated[
        list[dict[str, float] | None] | None,
        about("With `logprobs` over 0: each token and the most probable ones in its place."),
    ]
    text_offset: Annotated[list[int], about("Characters before each token.")]


class CompletionChoice(msgspec.Struct):
    index: Annotated[int, about("Number of the prompt in the request, from 0.")]
    text: Annotated[str, about("The prompt, with `echo`, and the next token, with `max_tokens` 1.")]
    logprobs: Annotated[Logprobs | None, about("If asked for.")]
    finish_reason: Annotated[str, about("Always `length`.")] = "length"


class CompletionAnswer(msgspec.Struct):
    """Answer of POST /v1/completions."""

    id: AnswerId
    object: Annotated[str, about("Always `text_completion`.")]
    created: Created
    model: AnsweredModel
    choices: Annotated[list[CompletionChoice], about("One per prompt, in the request's order.")]
    usage: TokenUsage


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """The parts of a choice that the request asks for."""

    echo: bool  # the prompt itself
    next_token: bool  # the most probable token after it
    logprobs: int | None  # 0: of the returned tokens; over 0: of as many best ones, too

    @property
    def every_position(self) -> bool:
        return self.echo and self.logprobs is not None


@dataclass(frozen=True, slots=True)
class AnsweredPrompts:
    """Prompts of one request to the engine, with its result.

    Args:
        prompts: their numbers.
        shared: first tokens of all of them, whose rows the result has once if every position was
            asked for.
        result: of every position, or else of each prompt's end.
    """

    prompts: Sequence[int]
    shared: int
    result: ScoreResult


@dataclass(frozen=True, slots=True)
class Entries:
    """The returned tokens of one prompt, with log-probabilities; its first token has none."""

    ids: list[int]
    logprobs: list[float | None]
    top_ids: list[list[int] | None]
    top: list[list[float] | None]


class TokenTexts:
    """The text of each token by itself; `token_id:N` for a token without text."""

    def __init__(self, encoder: TextEncoder | None, *parts: Int32Array) -> None:
        ids = np.unique(np.concatenate([part.reshape(-1) for part in parts])).tolist()
        texts = [""] * len(ids) if encoder is None else encoder.token_texts(ids)
        self._texts = dict(zip(ids, texts, strict=True))

    def __call__(self, id: int) -> str:
        return self._texts[id] or self.name(id)

    @staticmethod
    def name(id: int) -> str:
        return f"token_id:{id}"

    def values(
        self, id: int, value: float, others: Sequence[int], of_others: Sequence[float]
    ) -> dict[str, float]:
        """Return a token's value and others' by text.

        Of different tokens with equal texts the first one keeps it; the others get their names.
        """
        found = {self(id): value}
        for other, of_other in zip(others, of_others, strict=True):
            if other != id:
                text = self(other)
                found[self.name(other) if text in found else text] = of_other
        return found


def completion_json(
    prompts: Sequence[Int32Array],
    texts: Sequence[str] | None,
    answered: Sequence[AnsweredPrompts],
    asked: CompletionOptions,
    encoder: TextEncoder | None,
    cached_tokens: int,
    about: About,
) -> bytes:
    """Return the answer as JSON.

    Args:
        prompts: token ids of the prompts.
        texts: the prompts as they were sent; None if they were token ids.
        answered: the prompts with the engine's results; empty if the engine was not asked.
        asked: the parts that the request asks for.
        encoder: the model's tokenizer, if it has one.
        cached_tokens: for the usage.
        about: the answer's id, time and model.
    """
    rows = _rows(prompts, answered, asked.every_position)
    say = TokenTexts(encoder, *(part.top_ids for part in rows), *prompts)
    choices = []
    for index, prompt in enumerate(prompts):
        entries = _entries(prompt, rows[index], asked)
        text = ""
        if asked.echo:
            text = texts[index] if texts is not None else _text(prompt, encoder, say)
        if asked.next_token:
            text += say(entries.ids[-1])
        shown = None if asked.logprobs is None else _logprobs(entries, say, asked.logprobs)
        choices.append(msgspec.Raw(msgspec.json.encode(CompletionChoice(index, text, shown))))
    total, new = sum(map(len, prompts)), len(prompts) if asked.next_token else 0
    usage = TokenUsage(total, total + new, new, PromptTokensDetails(cached_tokens))
    id, created, model = about
    encoded = cast(list[CompletionChoice], choices)  # encoded one by one to save memory
    answer = CompletionAnswer(id, "text_completion", created, model, encoded, usage)
    return msgspec.json.encode(answer)


def _rows(
    prompts: Sequence[Int32Array], answered: Sequence[AnsweredPrompts], every: bool
) -> list[PositionLogprobs]:
    """Return log-probabilities of each prompt's positions, or of its end, which has no label."""
    nothing = PositionLogprobs(np.empty(0), np.empty((0, 1)), NO_TOKENS.reshape(0, 1))
    found = [nothing] * len(prompts)
    for part in answered:
        labels = [following(prompts[index]) for index in part.prompts] if every else []
        shared = part.shared if every else 0
        rows = PositionLogprobs(np.empty(0), *top_logprobs(part.result))
        if every:
            first, rest = labels[0][:shared], [ids[shared:] for ids in labels]
            rows = position_logprobs(part.result, [first, *rest])
        start = shared
        for place, index in enumerate(part.prompts):
            stop = start + (len(labels[place]) - shared if every else 1)
            found[index] = rows.part(slice(shared), slice(start, stop))
            start = stop
    return found


def following(prompt: Int32Array) -> Int32Array:
    """Return the token that follows each token; the last one's value is not used."""
    return np.append(prompt[1:], prompt[:1])


def _entries(prompt: Int32Array, rows: PositionLogprobs, asked: CompletionOptions) -> Entries:
    """Return the entries that were asked for: of the prompt's tokens and of the best next token."""
    top, ids = rows.top.tolist(), rows.top_ids.tolist()
    best, best_ids = [row[0] for row in top[-1:]], [row[0] for row in ids[-1:]]
    entries = Entries(best_ids, best, ids[-1:], top[-1:])
    if asked.every_position:
        entries = Entries(
            [*prompt.tolist(), *best_ids],
            [None, *rows.label.tolist()[:-1], *best],
            [None, *ids],
            [None, *top],
        )
    if asked.next_token:
        return entries
    parts = (entries.ids, entries.logprobs, entries.top_ids, entries.top)
    return Entries(*(part[:-1] for part in parts))  # type: ignore[arg-type]


def _logprobs(entries: Entries, say: TokenTexts, count: int) -> Logprobs:
    tokens = [say(id) for id in entries.ids]
    offsets = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
    top: list[dict[str, float] | None] | None = None
    if count:
        top = [
            None
            if own is None or top_ids is None or values is None
            else say.values(id, own, top_ids, values)
            for id, own, top_ids, values in zip(
                entries.ids, entries.logprobs, entries.top_ids, entries.top, strict=True
            )
        ]
    return Logprobs(tokens, entries.logprobs, top, offsets)


def _text(prompt: Int32Array, encoder: TextEncoder | None, say: TokenTexts) -> str:
    ids = prompt.tolist()
    return "".join(map(say, ids)) if encoder is None else encoder.text(ids)

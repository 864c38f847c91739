"""The answer of /v1/completions, made one prompt at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import msgspec
import numpy as np

from gpuscore.arrays import NO_TOKENS, Int32Array
from gpuscore.probabilities import PositionLogprobs, best_logprobs, position_logprobs
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
        about("With `logprobs` 1: each token and the most probable one in its place."),
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
    """What is to be told of each prompt."""

    echo: bool  # the prompt itself
    next_token: bool  # the most probable one behind it
    logprobs: int | None  # log-probabilities, and of how many tokens beside those told

    @property
    def every_position(self) -> bool:
        return self.echo and self.logprobs is not None


@dataclass(frozen=True, slots=True)
class Entries:
    """What is told of one prompt, token by token; of the first of a prompt nothing is known."""

    ids: list[int]
    logprobs: list[float | None]
    best_ids: list[int | None]
    best: list[float | None]


class TokenTexts:
    """What tokens say, each by itself; `token_id:N` of one that says nothing, or is unknown."""

    def __init__(self, encoder: TextEncoder | None, *parts: Int32Array) -> None:
        ids = np.unique(np.concatenate(parts)).tolist()
        texts = [""] * len(ids) if encoder is None else encoder.token_texts(ids)
        self._texts = dict(zip(ids, texts, strict=True))

    def __call__(self, id: int) -> str:
        return self._texts[id] or self.name(id)

    @staticmethod
    def name(id: int) -> str:
        return f"token_id:{id}"

    def pair(self, id: int, value: float, other: int, of_other: float) -> dict[str, float]:
        """Both, also where they say the same."""
        one, two = self(id), self(other)
        if one == two and id != other:
            two = self.name(other)
        return {one: value, two: of_other}


def completion_json(
    prompts: Sequence[Int32Array],
    texts: Sequence[str] | None,
    result: ScoreResult | None,
    asked: CompletionOptions,
    encoder: TextEncoder | None,
    cached_tokens: int,
    about: About,
) -> bytes:
    """The answer as JSON.

    Args:
        prompts: their ids.
        texts: the prompts as they were sent, where they were text.
        result: what the engine says of every position, or else of each prompt's end; None where it
            was not asked.
        asked: what is to be told.
        encoder: of the model, if it has one.
        cached_tokens: for the usage.
        about: what else stands in the answer.
    """
    rows = _rows(prompts, result, asked.every_position)
    say = TokenTexts(encoder, rows.best_ids, *prompts)
    choices, start = [], 0
    for index, prompt in enumerate(prompts):
        stop = start + (len(prompt) if asked.every_position else 1)
        entries = _entries(prompt, rows, slice(start, stop), asked)
        text = ""
        if asked.echo:
            text = texts[index] if texts is not None else _text(prompt, encoder, say)
        if asked.next_token:
            text += say(entries.ids[-1])
        shown = None if asked.logprobs is None else _logprobs(entries, say, asked.logprobs)
        choices.append(msgspec.Raw(msgspec.json.encode(CompletionChoice(index, text, shown))))
        start = stop
    total, new = sum(map(len, prompts)), len(prompts) if asked.next_token else 0
    usage = TokenUsage(total, total + new, new, PromptTokensDetails(cached_tokens))
    id, created, model = about
    encoded = cast(list[CompletionChoice], choices)  # there is only one at a time that is not
    answer = CompletionAnswer(id, "text_completion", created, model, encoded, usage)
    return msgspec.json.encode(answer)


def _rows(
    prompts: Sequence[Int32Array], result: ScoreResult | None, every: bool
) -> PositionLogprobs:
    """What the engine says, of every position or of the ends, of which there are no labels."""
    if result is None:
        return PositionLogprobs(np.empty(0), np.empty(0), NO_TOKENS)
    if every:
        return position_logprobs(result, [following(prompt) for prompt in prompts])
    best, ids = best_logprobs(result)
    return PositionLogprobs(np.empty(0), best, ids)


def following(prompt: Int32Array) -> Int32Array:
    """Each token's next one; nobody asks for that of the last."""
    return np.append(prompt[1:], prompt[:1])


def _entries(
    prompt: Int32Array, rows: PositionLogprobs, which: slice, asked: CompletionOptions
) -> Entries:
    """Of a prompt's tokens if they are told, and of the best next one behind it if it is."""
    best, ids = rows.best[which].tolist(), rows.best_ids[which].tolist()
    entries = Entries(ids[-1:], best[-1:], ids[-1:], best[-1:])
    if asked.every_position:
        entries = Entries(
            [*prompt.tolist(), *ids[-1:]],
            [None, *rows.label[which].tolist()[:-1], *best[-1:]],
            [None, *ids],
            [None, *best],
        )
    if asked.next_token:
        return entries
    parts = (entries.ids, entries.logprobs, entries.best_ids, entries.best)
    return Entries(*(part[:-1] for part in parts))  # type: ignore[arg-type]


def _logprobs(entries: Entries, say: TokenTexts, count: int) -> Logprobs:
    tokens = [say(id) for id in entries.ids]
    offsets = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
    top: list[dict[str, float] | None] | None = None
    if count:
        top = [
            None
            if own is None or best_id is None or best is None
            else say.pair(id, own, best_id, best)
            for id, own, best_id, best in zip(
                entries.ids, entries.logprobs, entries.best_ids, entries.best, strict=True
            )
        ]
    return Logprobs(tokens, entries.logprobs, top, offsets)


def _text(prompt: Int32Array, encoder: TextEncoder | None, say: TokenTexts) -> str:
    ids = prompt.tolist()
    return "".join(map(say, ids)) if encoder is None else encoder.text(ids)

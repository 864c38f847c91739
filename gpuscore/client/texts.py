"""Calls of `classify` and `completions`."""

from collections.abc import Iterable, Sequence

import numpy as np

from gpuscore.client.calls import Answered, ClientCall, Common, list_call
from gpuscore.client.options import ClassifyRequestOptions, PromptRequestOptions, fields_of
from gpuscore.client.results import ClassifyResponse, Completion, CompletionsResponse
from gpuscore.client.split import Body, SplitLimits, as_json
from gpuscore.dialects.answers import ClassifyAnswer, CompletionAnswer, CompletionChoice, Logprobs
from gpuscore.types.call_arguments import Ids, checked_options, listed, text_or_ids, token_ids
from gpuscore.types.call_arguments import texts as texts_of


def classify_call(
    limits: SplitLimits, texts: str | Iterable[str], given: ClassifyRequestOptions
) -> ClientCall[ClassifyResponse]:
    options = checked_options(ClassifyRequestOptions, given)
    shared = fields_of(ClassifyRequestOptions, options)
    elements = texts_of([texts] if isinstance(texts, str) else texts, "texts")
    body = Body(shared, {"input": [as_json(text) for text in elements]})

    def join(found: Sequence[Answered[ClassifyAnswer]], common: Common) -> ClassifyResponse:
        asked = options["labels"]
        classes = list(found[0].answer.labels if asked is None else asked)
        for one in found:
            told = one.answer
            one.check_table([text.probs for text in told.data], [len(classes)] * one.count)
            right = told.labels == classes and all(text.label in classes for text in told.data)
            one.check(right, f"{len(told.labels)} other classes than the {len(classes)} asked for")
        data = [text for one in found for text in one.answer.data]
        return ClassifyResponse(
            classes=tuple(found[0].answer.labels),
            probabilities=np.array([text.probs for text in data], dtype=np.float64),
            best=tuple(text.label for text in data),
            truncated=np.array([text.truncated for text in data], dtype=np.bool_),
            **common,
        )

    return list_call("/v1/classify", body, ClassifyAnswer, options, limits, join)


def completions_call(
    limits: SplitLimits,
    prompts: str | Ids | Iterable[str] | Iterable[Ids],
    given: PromptRequestOptions,
) -> ClientCall[CompletionsResponse]:
    options = checked_options(PromptRequestOptions, given)
    shared = fields_of(PromptRequestOptions, options, "max_tokens", "echo", "logprobs")
    shared |= {"max_tokens": options["max_tokens"], "echo": options["echo"]}
    if options["logprobs"] is not None:  # 0 is not the default of the route
        shared["logprobs"] = options["logprobs"]
    body = Body(shared, {"prompt": [as_json(prompt) for prompt in _prompts(prompts)]})

    def join(found: Sequence[Answered[CompletionAnswer]], common: Common) -> CompletionsResponse:
        for one in found:
            one.check(len(one.answer.choices) == one.count, f"{len(one.answer.choices)} choices")
            right = all(_is_whole(choice, options["logprobs"]) for choice in one.answer.choices)
            one.check(right, "lists of tokens and log-probabilities of different lengths")
        choices = [choice for one in found for choice in one.answer.choices]
        return CompletionsResponse(tuple(map(_completion, choices)), **common)

    return list_call("/v1/completions", body, CompletionAnswer, options, limits, join)


def _prompts(given: str | Ids | Iterable[str] | Iterable[Ids]) -> list[str | list[int]]:
    """Return the prompts as a list, also if there is one text or one list of token ids."""
    if isinstance(given, str):
        return [text_or_ids(given, "prompts")]
    elements = listed(given, "prompts")
    if elements and isinstance(elements[0], int | np.integer):
        return [token_ids(elements, "prompts")]
    return [text_or_ids(one, f"prompts[{index}]") for index, one in enumerate(elements)]


def _is_whole(choice: CompletionChoice, asked: int | None) -> bool:
    """Return True if each token has a log-probability, and with `asked` over 0 the best ones."""
    found = choice.logprobs
    if found is None:
        return asked is None
    best = found.top_logprobs
    lengths = {len(found.tokens), len(found.token_logprobs)}
    return len(lengths | ({len(best)} if best is not None else set())) == 1 and (
        best is not None or not asked
    )


def _completion(choice: CompletionChoice) -> Completion:
    found = choice.logprobs or Logprobs([], [], None, [])
    values = [np.nan if value is None else value for value in found.token_logprobs]
    best = found.top_logprobs or [None] * len(values)
    numbers = np.array(values, dtype=np.float64)
    return Completion(choice.text, tuple(found.tokens), numbers, tuple(best))

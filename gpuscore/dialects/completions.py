"""The dialect of /v1/completions: OpenAI's body and answer, for log-probabilities of prompts.

Nothing is generated: `max_tokens` is 0, or 1 for the most probable next token, which needs no
decoding. Fields of generation that clients send by habit are accepted at values that change
nothing; other values are refused, and the error names the field.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from gpuscore.dialects.answers import CompletionAnswer
from gpuscore.dialects.completion_answer import (
    AnsweredPrompts,
    CompletionOptions,
    SentPrompts,
    completion_json,
    following,
)
from gpuscore.dialects.decoding import accepting, strict_decoder
from gpuscore.dialects.dialect import Dialect, PreparedBody
from gpuscore.dialects.paths import COMPLETIONS_PATH
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import SCORES_ONLY, ScoringBody, about
from gpuscore.errors import InvalidRequest, MixedInputTypes, TooManyTokens
from gpuscore.text.joining import PromptBuilder, Prompts
from gpuscore.types.batch import BackendLimits, Int32Array, common_prefix, sorted_order
from gpuscore.types.request import MAX_TOP, Readouts, ScoreRequest

# Prompts that begin alike are a request of their own, so that the prefix cache keeps what they
# share. Each gets as large a share of every batch as another caller's request.
MAX_GROUPS = 16
LEAST_SHARED = 4  # tokens: a cut costs all items one more pass of attention
# Of every token its own and the best tokens'. An answer takes about fifty bytes for each.
MAX_ECHO_LOGPROBS = 2**19


@accepting("completion")
class CompletionBody(ScoringBody):
    """Body of POST /v1/completions. `null` means a field's default."""

    # `_check` checks that all prompts are of one kind.
    prompt: Annotated[
        str | list[str | int | list[int]] | None,
        about("Required. A text, several, the token ids of one prompt, or several lists of ids."),
    ] = None
    max_tokens: Annotated[
        int | None,
        about(
            "Required: 0 (with `echo`), or 1 for the most probable next token. Null is refused, "
            "because OpenAI's default is 16."
        ),
    ] = None
    echo: Annotated[bool | None, about("Returns the prompt itself, too.", False)] = None
    logprobs: Annotated[
        int | None,
        about(
            "Log-probability of every returned token: 0 for these alone, 1 to 20 to add as many of "
            "the most probable tokens at each position."
        ),
    ] = None
    add_special_tokens: Annotated[
        bool | None, about("true: texts get the tokenizer's special tokens.", True)
    ] = None
    temperature: Annotated[
        float | None, about("Ignored; with `max_tokens` 1, only 0 is accepted.")
    ] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list; only for a body that was checked."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: Any = self.prompt
        return [prompts] if isinstance(prompts[0], int) else prompts

    @property
    def num_items(self) -> int:
        return len(self.prompts)

    @property
    def asked(self) -> CompletionOptions:
        return CompletionOptions(bool(self.echo), self.max_tokens == 1, self.logprobs)


def _check(body: CompletionBody) -> None:
    _check_tokens(body)
    if not body.prompt and body.prompt != "":
        raise InvalidRequest("prompt is required", param="prompt")
    if isinstance(body.prompt, list) and len(set(map(type, body.prompt))) > 1:
        raise MixedInputTypes("prompts must be all text or all token ids", param="prompt")


def _check_tokens(body: CompletionBody) -> None:
    if body.max_tokens not in (0, 1):
        asked = "16 by default" if body.max_tokens is None else str(body.max_tokens)
        raise InvalidRequest(
            f"max_tokens is {asked}, but {SCORES_ONLY}: it must be 0, or 1 for the most probable "
            "next token",
            param="max_tokens",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens 0 without echo asks for nothing", param="max_tokens")
    if body.max_tokens == 1 and body.temperature:
        raise InvalidRequest(
            f"temperature: {SCORES_ONLY}, so the next token is the most probable one: it must be 0 "
            "with max_tokens 1",
            param="temperature",
        )
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP:
        raise InvalidRequest(
            f"logprobs is {body.logprobs}; supported: 0, or up to {MAX_TOP} of the most probable "
            "tokens at each position",
            param="logprobs",
        )


def prepare_completion(model: LoadedModel, body: CompletionBody) -> PreparedBody[CompletionBody]:
    """Build the engine's request.

    Raises:
        GpuscoreError: the request is invalid, or the model predicts classes instead of tokens.
    """
    if model.engine.limits.classes is not None:
        raise InvalidRequest("this model predicts classes, not tokens; use /v1/score")
    builder, special = model.prompts.builder, body.add_special_tokens is not False
    prompts = builder.whole_prompts(body.prompts, special=special, name="prompt")
    texts = body.prompts if isinstance(body.prompts[0], str) else None
    notes = SentPrompts(prompts, texts, builder.encoder, builder.backend.vocab_rows)
    total = sum(map(len, prompts))
    if not body.asked.every_position:
        request = _next_token(builder, body, prompts) if body.max_tokens else None
        return PreparedBody(body, request, total, notes)
    _check_total(builder, body, total)
    request = _every_position(builder, body, prompts)
    groups = alike(prompts, MAX_GROUPS)
    if len(groups) == 1:
        return PreparedBody(body, request, total, notes)
    parts = [_every_position(builder, body, [prompts[i] for i in group]) for group in groups]
    return PreparedBody(body, request, total, notes, parts=tuple(parts), places=groups)


def _check_total(builder: PromptBuilder, body: CompletionBody, total: int) -> None:
    """Raise TooManyTokens if the answer would have too many log-probabilities."""
    most = MAX_ECHO_LOGPROBS // (1 + _num_top(body, builder))
    if total > most:
        raise TooManyTokens(
            f"{total} tokens, the limit for log-probabilities of prompts is {most} with this "
            "logprobs",
            param="prompt",
        )


def _every_position(
    builder: PromptBuilder, body: CompletionBody, prompts: Sequence[Int32Array]
) -> ScoreRequest:
    """Return the engine's request for prompts that begin alike."""
    labels = tuple(map(following, prompts))
    cut = positions_cut(prompts, builder.backend)
    items = tuple(prompt[cut:] for prompt in prompts)
    return ScoreRequest(
        prompts[0][:cut],
        items,
        tuple(ids[cut:] for ids in labels),
        need_lse=True,
        num_top=_num_top(body, builder),
        readouts=Readouts.every(items, labels[0][:cut]),
        **body.terms._asdict(),
    )


def _next_token(
    builder: PromptBuilder, body: CompletionBody, prompts: tuple[Int32Array, ...]
) -> ScoreRequest:
    """Return a request for each prompt's next token only, so that cached prefixes can be used."""
    shared = len(prompts[0]) if len(prompts) == 1 else 0
    return builder.from_prompts(
        Prompts(lambda start: iter(prompts[start:]), len(prompts), shared, "prompt"),
        [0],
        body.terms,
        need_lse=True,
        num_top=_num_top(body, builder),
    )


def _num_top(body: CompletionBody, builder: PromptBuilder) -> int:
    """Return the number of most probable tokens to ask for: 1 even if no token is shown.

    The most probable token is the answer's next token, and shows whether the prompt's own token is
    the best.
    """
    return min(max(1, body.logprobs or 0), builder.backend.vocab_rows)


def completion_bytes(prepared: PreparedBody[CompletionBody]) -> int:
    sent: SentPrompts = prepared.notes
    return sent.most_bytes(prepared.body.asked)


def encode_completion(prepared: PreparedBody[CompletionBody]) -> Iterator[bytes]:
    """Return the answer as JSON, made a few positions at a time."""
    sent: SentPrompts = prepared.notes
    asked, results, places = prepared.parts, prepared.results, prepared.places
    if prepared.result is not None:  # of the undivided request
        asked, results, places = (prepared.asked,), (prepared.result,), [range(len(sent.ids))]
    shared = [len(request.query_ids) for request in asked]
    answered = [*map(AnsweredPrompts, places, shared, results)]
    head = prepared.head("text_completion")
    return completion_json(sent, answered, prepared.body.asked, prepared.cached_tokens, head=head)


COMPLETIONS = Dialect(
    paths=(COMPLETIONS_PATH,),
    summary="Log-probabilities of prompts",
    description="OpenAI's completions with `max_tokens` 0 or 1: `echo` and `logprobs` give the "
    "log-probability of every token of a prompt, and the best tokens at each position. Nothing is "
    "generated.",
    bodies=(CompletionBody,),
    answers=(CompletionAnswer,),
    decode=strict_decoder(CompletionBody, _check),
    prepare=prepare_completion,
    encode=encode_completion,
    answer_bytes=completion_bytes,
    example={
        "prompt": "query: a red lamp\nitem: A red steel lamp.",
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
    },
)


def alike(prompts: Sequence[Int32Array], most: int) -> list[list[int]]:
    """Divide prompts into groups that share most of their tokens, such as choices of one context.

    Sorted prompts are neighbours if they begin alike, and stay together if they share three
    quarters of the shorter one.

    Returns:
        The numbers of each group's prompts, in order; one group of all if there would be over
        `most` groups.
    """
    order = sorted_order(prompts)
    groups = [order[:1]]
    for previous, other in zip(order, order[1:], strict=False):
        shorter = min(len(prompts[previous]), len(prompts[other]))
        if 4 * common_prefix(prompts[previous], prompts[other]) < 3 * shorter:
            groups.append([])
        groups[-1].append(other)
    if len(groups) > most:
        return [[*range(len(prompts))]]
    return sorted(sorted(group) for group in groups)


def positions_cut(prompts: Sequence[Int32Array], backend: BackendLimits) -> int:
    """Return the number of first tokens that are scored once for all these prompts.

    All rows up to the cut get the same labels, the tokens that follow. So the cut is one token
    before the end of what the prompts share. Of a single prompt, full pages are enough, because
    nothing else is found again. It is 0 if sharing saves nothing, or if the pages are too few.
    """
    first = prompts[0]
    shared = min([len(first), *(common_prefix(first, prompt) for prompt in prompts[1:])])
    # With the bits of a prompt that is scored alone, all segments begin where chunks do.
    whole = backend.deterministic_chunk or (backend.page_size if len(prompts) == 1 else 1)
    cut = (shared - 1) // whole * whole
    pages = -(-max(map(len, prompts)) // backend.page_size) + 1
    return cut if cut >= LEAST_SHARED and pages <= backend.num_pages else 0

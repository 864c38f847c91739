"""The dialect of /v1/completions: OpenAI's body and answer, for log-probabilities of prompts.

Nothing is generated: `max_tokens` is 0, or 1 for the most probable next token, which needs no
decoding. Fields of generation that clients send by habit are accepted at values that change
nothing; other values are refused, and the error names the field.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from gpuscore.dialects.answers import CompletionAnswer
from gpuscore.dialects.completion_answer import (
    AskedPrompts,
    completion_bytes,
    encode_completion,
)
from gpuscore.dialects.decoding import accepting, strict_decoder
from gpuscore.dialects.dialect import Dialect, PreparedBody
from gpuscore.dialects.paths import COMPLETIONS_PATH
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import SCORES_ONLY, ScoringBody, about
from gpuscore.errors import InvalidRequest, MixedInputTypes, TooManyTokens
from gpuscore.text.joining import PromptBuilder, Prompts
from gpuscore.text.readouts import IDS, NO_CANDIDATES, START, Candidates, request_of
from gpuscore.types.batch import Int32Array, common_prefix, sorted_order
from gpuscore.types.request import MAX_TOP, ScoreRequest

# Prompts that begin alike are a request of their own, so that the prefix cache keeps what they
# share. Each gets as large a share of every batch as another caller's request.
MAX_GROUPS = 16
# Log-probabilities of an answer, those of the best tokens included. Each takes about fifty bytes.
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
    prompt_logprob_token_ids: Annotated[
        list[int | list[int]] | None,
        about(
            "With `echo`: adds `prompt_token_id_logprobs`, the log-probabilities of these tokens "
            "after the tokens of each prompt, in order. One list for all rows, or for a single "
            "prompt a list per row, of any lengths up to 256."
        ),
    ] = None
    prompt_logprob_start: Annotated[
        int | None,
        about("The first of these rows; row r belongs to the prompt's token r + 1.", 0),
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


def _check(body: CompletionBody) -> None:
    _check_tokens(body)
    if body.prompt_logprob_token_ids is not None and not body.echo:
        raise InvalidRequest(f"{IDS} needs echo", param=IDS)
    if body.prompt_logprob_start and body.prompt_logprob_token_ids is None:
        raise InvalidRequest(f"{START} needs {IDS}", param=START)
    if not body.prompt and body.prompt != "":
        raise InvalidRequest("prompt is required", param="prompt")
    if isinstance(body.prompt, list) and len(set(map(type, body.prompt))) > 1:
        raise MixedInputTypes("prompts must be all text or all token ids", param="prompt")


def _check_tokens(body: CompletionBody) -> None:
    if body.max_tokens not in (0, 1):
        given = "16 by default" if body.max_tokens is None else str(body.max_tokens)
        raise InvalidRequest(
            f"max_tokens is {given}, but {SCORES_ONLY}: it must be 0, or 1 for the most probable "
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
    builder = model.prompts.builder
    special = body.add_special_tokens is not False
    prompts = builder.whole_prompts(body.prompts, special=special, name="prompt")
    candidates = None
    ids = body.prompt_logprob_token_ids
    if ids is not None:
        candidates = Candidates.read(ids, body.prompt_logprob_start or 0, prompts, builder.checks)
    asked = AskedPrompts(
        ids=prompts,
        texts=body.prompts if isinstance(body.prompts[0], str) else None,
        encoder=builder.encoder,
        vocab_rows=builder.backend.vocab_rows,
        echo=bool(body.echo),
        next_token=body.max_tokens == 1,
        logprobs=body.logprobs,
        candidates=candidates,
    )
    total = sum(map(len, prompts))
    if not asked.every_position and candidates is None:
        request = _next_token(builder, body, asked) if asked.next_token else None
        return PreparedBody(body, request, total, asked)
    most = MAX_ECHO_LOGPROBS // (1 + asked.num_top)
    if asked.every_position and total > most:
        raise TooManyTokens(
            f"{total} tokens, the limit for log-probabilities of prompts is {most} with this "
            "logprobs",
            param="prompt",
        )

    def request_of_group(group: Sequence[int]) -> ScoreRequest:
        return request_of(
            [prompts[place] for place in group],
            candidates or NO_CANDIDATES,
            builder.backend,
            terms=body.terms,
            num_top=asked.num_top,
            every=asked.every_position,
        )

    whole = request_of_group(range(len(prompts)))
    groups = alike(prompts, MAX_GROUPS)
    if len(groups) == 1:
        return PreparedBody(body, whole, total, asked)
    parts = tuple(map(request_of_group, groups))
    return PreparedBody(body, whole, total, asked, parts=parts, places=groups)


def _next_token(builder: PromptBuilder, body: CompletionBody, asked: AskedPrompts) -> ScoreRequest:
    """Return a request for each prompt's next token only, so that cached prefixes can be used."""
    prompts = asked.ids
    shared = len(prompts[0]) if len(prompts) == 1 else 0
    return builder.from_prompts(
        Prompts(lambda start: iter(prompts[start:]), len(prompts), shared, "prompt"),
        [0],
        body.terms,
        need_lse=True,
        num_top=asked.num_top,
    )


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

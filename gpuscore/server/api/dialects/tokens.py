"""The wire of /tokenize and /detokenize, which are vLLM's."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import msgspec

from gpuscore.errors import InvalidRequest, TooManyTokens
from gpuscore.server.api.dialects.dialect import Dialect
from gpuscore.server.api.fields import ModelName, about
from gpuscore.server.api.paths import DETOKENIZE_PATH, TOKENIZE_PATH
from gpuscore.server.api.schema import decoding_errors
from gpuscore.server.observe.record import TOKENIZE, RequestRecord
from gpuscore.server.service import LoadedModel, RequestContext, ScoringService
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.pieces import OverLimit
from gpuscore.text.turns import Turns


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /tokenize."""

    prompt: Annotated[str, about("A text.")]
    model: ModelName = None
    add_special_tokens: Annotated[
        bool | None, about("Whether the text gets the tokenizer's special tokens.", True)
    ] = None


class TokenizeAnswer(msgspec.Struct):
    """Answer of POST /tokenize."""

    count: Annotated[int, about("How many tokens there are.")]
    max_model_len: Annotated[int, about("The longest prompt that the model takes, in tokens.")]
    tokens: Annotated[list[int], about("Token ids.")]


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[int], about("Token ids.")]
    model: ModelName = None


class DetokenizeAnswer(msgspec.Struct):
    """Answer of POST /detokenize."""

    prompt: Annotated[str, about("Their text, special tokens included.")]


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


def decode_tokenize(body: bytes, record: RequestRecord) -> TokenizeBody:
    with decoding_errors():
        return _tokenize_decoder.decode(body)


def decode_detokenize(body: bytes, record: RequestRecord) -> DetokenizeBody:
    with decoding_errors():
        return _detokenize_decoder.decode(body)


async def answer_tokenize(
    service: ScoringService, body: TokenizeBody, call: RequestContext
) -> bytes:
    """Raises InvalidRequest without a tokenizer, and TooManyTokens."""
    special = body.add_special_tokens is not False
    return await _in_turns(service, body.model, call, partial(_tokenize, body.prompt, special))


async def answer_detokenize(
    service: ScoringService, body: DetokenizeBody, call: RequestContext
) -> bytes:
    """Raises InvalidRequest without a tokenizer, TokenIdOutOfRange and TooManyTokens."""
    return await _in_turns(service, body.model, call, partial(_detokenize, body.tokens))


async def _in_turns(
    service: ScoringService,
    name: str | None,
    call: RequestContext,
    work: Callable[[LoadedModel, Turns], msgspec.Struct],
) -> bytes:
    service.model_name(name)
    model = service.loaded()
    with call.record.stage(TOKENIZE):
        return await service.in_turns(call, lambda turns: msgspec.json.encode(work(model, turns)))


def _tokenize(prompt: str, special: bool, model: LoadedModel, turns: Turns) -> TokenizeAnswer:
    encoder = model.builder.need_encoder("prompt")
    limit = model.builder.limits.max_request_tokens
    try:
        (ids,) = encoder.prompts([prompt], special, turns, limit)
    except OverLimit as over:
        raise TooManyTokens(
            f"at least {over.least} tokens, the limit is {limit}", param="prompt"
        ) from None
    _check_count(len(ids), "prompt", model.builder)
    return TokenizeAnswer(len(ids), model.engine.limits.max_model_len, ids.tolist())


def _detokenize(tokens: list[int], model: LoadedModel, turns: Turns) -> DetokenizeAnswer:
    _check_count(len(tokens), "tokens", model.builder)
    if model.builder.encoder is None:
        raise InvalidRequest("this model has no tokenizer", param="tokens")
    ids = model.builder.ids(tokens, "tokens")
    return DetokenizeAnswer(model.builder.encoder.text(ids.tolist()))


def _check_count(count: int, param: str, builder: PromptBuilder) -> None:
    if count > builder.limits.max_request_tokens:
        limit = builder.limits.max_request_tokens
        raise TooManyTokens(f"{count} tokens, the limit is {limit}", param=param)


TOKENIZE_TEXT = Dialect(
    paths=(TOKENIZE_PATH,),
    summary="Text to tokens",
    description="The token ids of a text, by default with the tokenizer's special tokens.",
    bodies=(TokenizeBody,),
    answers=(TokenizeAnswer,),
    decode=decode_tokenize,
    answer=answer_tokenize,
    example={"prompt": "A red steel lamp."},
)
DETOKENIZE = Dialect(
    paths=(DETOKENIZE_PATH,),
    summary="Tokens to text",
    description="What token ids say together, special tokens included.",
    bodies=(DetokenizeBody,),
    answers=(DetokenizeAnswer,),
    decode=decode_detokenize,
    answer=answer_detokenize,
    example={"tokens": [32, 33]},
)

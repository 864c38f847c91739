"""The dialects of /tokenize and /detokenize, with vLLM's bodies and answers."""

from collections.abc import Iterator
from typing import Annotated

import msgspec

from gpuscore.dialects.answers import DetokenizeAnswer, TokenizeAnswer
from gpuscore.dialects.decoding import accepting, strict_decoder
from gpuscore.dialects.dialect import (
    COUNT_BYTES,
    HOLE,
    NUMBERS,
    ROWS,
    Dialect,
    PreparedBody,
    in_pieces,
    list_json,
    text_bytes,
    text_json,
)
from gpuscore.dialects.paths import DETOKENIZE_PATH, TOKENIZE_PATH
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import ModelName, about
from gpuscore.errors import InvalidRequest, TooManyTokens
from gpuscore.text.boundaries import OverLimit
from gpuscore.text.score_input import need_encoder


@accepting("chat", "tokenize")
class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize."""

    prompt: Annotated[str, about("A text.")]
    model: ModelName = None
    add_special_tokens: Annotated[
        bool | None, about("true: the text gets the tokenizer's special tokens.", True)
    ] = None
    return_token_strs: Annotated[bool | None, about("true: adds `token_strs`.", False)] = None

    @property
    def num_items(self) -> None:
        return None


@accepting("detokenize")
class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[int], about("Token ids.")]
    model: ModelName = None

    @property
    def num_items(self) -> None:
        return None


def prepare_tokenize(model: LoadedModel, body: TokenizeBody) -> PreparedBody[TokenizeBody]:
    """Make the answer.

    Raises:
        InvalidRequest: the model has no tokenizer.
        TooManyTokens: the text has more tokens than `--max-request-tokens`.
    """
    encoder = need_encoder(model.prompts.builder.encoder, "prompt")
    limit = model.prompts.builder.limits.max_request_tokens
    special = body.add_special_tokens is not False
    try:
        (ids,) = encoder.prompts([body.prompt], special, limit)
    except OverLimit as over:
        raise TooManyTokens(
            f"at least {over.least} tokens, the limit is {limit}", param="prompt"
        ) from None
    model.prompts.builder.check_tokens("prompt", len(ids))
    names = HOLE if body.return_token_strs else None
    answer = TokenizeAnswer(len(ids), model.engine.limits.max_model_len, HOLE, names)
    return PreparedBody(body, None, notes=(answer, ids, encoder))


def prepare_detokenize(model: LoadedModel, body: DetokenizeBody) -> PreparedBody[DetokenizeBody]:
    """Make the answer.

    Raises:
        InvalidRequest: the model has no tokenizer.
        TokenIdOutOfRange: the model has no token with this id.
        TooManyTokens: there are more tokens than `--max-request-tokens`.
    """
    model.prompts.builder.check_tokens("tokens", len(body.tokens))
    if model.prompts.builder.encoder is None:
        raise InvalidRequest("this model has no tokenizer", param="tokens")
    ids = model.prompts.builder.checks.ids(body.tokens, "tokens")
    return PreparedBody(body, None, notes=model.prompts.builder.encoder.text(ids.tolist()))


def tokenize_bytes(prepared: PreparedBody[TokenizeBody]) -> int:
    _, ids, encoder = prepared.notes
    names = map(encoder.token_name, ids.tolist()) if prepared.body.return_token_strs else ()
    return COUNT_BYTES * len(ids) + text_bytes(*names)


def encode_tokenize(prepared: PreparedBody[TokenizeBody]) -> Iterator[bytes]:
    """Return the ids that `prepare` has made; the engine is not asked."""
    answer, ids, encoder = prepared.notes
    starts = range(0, len(ids), NUMBERS)
    tokens = (id for start in starts for id in ids[start : start + NUMBERS].tolist())
    names = [list_json(map(encoder.token_name, ids.tolist()), ROWS)] if answer.token_strs else []
    return in_pieces(answer, list_json(tokens), *names)


TOKENIZE_TEXT = Dialect(
    paths=(TOKENIZE_PATH,),
    summary="Text to tokens",
    description="The token ids of a text, by default with the tokenizer's special tokens.",
    bodies=(TokenizeBody,),
    answers=(TokenizeAnswer,),
    decode=strict_decoder(TokenizeBody),
    prepare=prepare_tokenize,
    encode=encode_tokenize,
    answer_bytes=tokenize_bytes,
    example={"prompt": "A red steel lamp."},
)
DETOKENIZE = Dialect(
    paths=(DETOKENIZE_PATH,),
    summary="Tokens to text",
    description="The text of token ids, special tokens included.",
    bodies=(DetokenizeBody,),
    answers=(DetokenizeAnswer,),
    decode=strict_decoder(DetokenizeBody),
    prepare=prepare_detokenize,
    encode=lambda prepared: in_pieces(DetokenizeAnswer(HOLE), text_json(prepared.notes)),
    answer_bytes=lambda prepared: text_bytes(prepared.notes),
    example={"tokens": [32, 33]},
)

"""Tensors of the Open Inference Protocol (v2), which KServe and Triton's clients speak.

Inputs of type BYTES are the fields of a body of /v1/score or /v1/rerank, parameters are its other
fields; the answer is one tensor of scores, in the request's order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from gpuscore.dialects.dialect import (
    HOLE,
    NUMBERS,
    Dialect,
    PreparedBody,
    Scored,
    in_pieces,
    list_json,
)
from gpuscore.dialects.envelope import PLAIN, Envelope, decode_one, inner_scored, prepare_envelope
from gpuscore.dialects.ranking import ranking_of
from gpuscore.dialects.rerank import RERANK
from gpuscore.dialects.score import scores_json
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import TEXT_ERRORS, about, strict_decoder
from gpuscore.errors import InvalidRequest
from gpuscore.text.boundaries import Turns
from gpuscore.types.record import Headers, RequestRecord

JSON_LENGTH = b"inference-header-content-length"  # of a body that goes on with binary tensors
OUTPUT, NUMBER_TYPE = "scores", "FP64"
MOST_AXES = 8
TEXT, TEXTS = ("query", "instruction"), ("documents", "items", "labels")
# Other fields of the bodies would change nothing in a tensor of scores.
PARAMETERS = (
    *("apply_softmax", "temperature", "item_first", "label_length_normalization", "raw_scores"),
    *("instruction", "max_tokens_per_doc", "truncate", "priority", "cache_salt"),
)
_SENT_BY_HABIT = "binary_data_output"  # by Triton's client, which reads JSON all the same


class InputTensor(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, about("A field of the body.")]
    shape: list[int]
    datatype: Annotated[str, about("BYTES only.")]
    data: Annotated[list[str] | None, about("The texts, row by row.")] = None
    parameters: dict[str, Any] | None = None


class OutputName(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    parameters: dict[str, Any] | None = None


class InferBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v2/models/NAME/infer."""

    inputs: list[InputTensor]
    outputs: list[OutputName] | None = None
    parameters: dict[str, Any] | None = None
    id: Annotated[str | None, about("Not read: the answer has the id of the header.")] = None


class OutputTensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: Any


class InferAnswer(msgspec.Struct):
    """Answer of POST /v2/models/NAME/infer."""

    id: str
    model_name: str
    outputs: list[OutputTensor]


_body = strict_decoder(InferBody)


def infer_path(model: str) -> str:
    return f"/v2/models/{quote(model)}"


def metadata(model: str) -> Mapping[str, Any]:
    """Return the answer of GET /v2/models/NAME; a request has `documents` or `items`."""
    named = [(name, [1]) for name in TEXT] + [(name, [-1]) for name in TEXTS]
    return {
        "name": model,
        "platform": "gpuscore",
        "inputs": [{"name": name, "datatype": "BYTES", "shape": shape} for name, shape in named],
        "outputs": [{"name": OUTPUT, "datatype": NUMBER_TYPE, "shape": [-1, -1]}],
    }


def infer(model: str) -> Dialect[Envelope]:
    """Return the dialect of the route of one model, which its path names."""
    plain = replace(
        PLAIN,
        summary="Inference",
        description="Scores of items or documents, as a tensor of the Open Inference Protocol.",
        decode=partial(_decode, model, None),
        prepare=_prepare,
        encode=_encode,
        untyped=True,
        example={"inputs": [{"name": "items", "shape": [1], "datatype": "BYTES", "data": ["a"]}]},
    )

    def choose(headers: Headers) -> Dialect[Envelope]:
        lengths = [value for name, value in headers if name == JSON_LENGTH]
        if not lengths:
            return plain
        if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 9:
            raise InvalidRequest("Inference-Header-Content-Length must be given once, as a number")
        return replace(plain, decode=partial(_decode, model, int(lengths[0])))

    return replace(plain, choose=choose)


def _decode(model: str, length: int | None, data: bytes, record: RequestRecord) -> Envelope:
    record.variant = TEXT_ERRORS
    end = len(data) if length is None else length
    if end > len(data):
        raise InvalidRequest(f"the JSON has {end} bytes by its header, the body {len(data)}")
    body, rest = _body(data[:end], record), memoryview(data)[end:]
    fields = _parameters(body) | {"model": model}
    for number, tensor in enumerate(body.inputs):
        if tensor.name in fields:
            raise InvalidRequest(f"inputs[{number}] is given twice", param=f"inputs[{number}].name")
        texts, rest = _texts(tensor, rest, f"inputs[{number}]")
        fields[tensor.name] = texts[0] if tensor.name in TEXT else texts
    if len(rest):
        raise InvalidRequest(f"{len(rest)} bytes follow the last tensor")
    inner = decode_one(msgspec.json.encode(fields), record)
    record.variant = TEXT_ERRORS
    return Envelope((inner,))


def _parameters(body: InferBody) -> dict[str, Any]:
    parameters = {k: v for k, v in (body.parameters or {}).items() if k != _SENT_BY_HABIT}
    if not parameters.keys() <= set(PARAMETERS):
        raise InvalidRequest(f"supported: {', '.join(PARAMETERS)}", param="parameters")
    if {output.name for output in body.outputs or ()} - {OUTPUT}:
        raise InvalidRequest(f"the only output is {OUTPUT}", param="outputs")
    return parameters


def _texts(tensor: InputTensor, rest: memoryview, place: str) -> tuple[list[str], memoryview]:
    """Return the tensor's texts, and the binary data after it."""
    if tensor.name not in (*TEXT, *TEXTS):
        raise InvalidRequest(f"supported: {', '.join((*TEXT, *TEXTS))}", param=f"{place}.name")
    if tensor.datatype != "BYTES":
        raise InvalidRequest("must be BYTES", param=f"{place}.datatype")
    size = (tensor.parameters or {}).get("binary_data_size")
    texts = tensor.data
    if size is not None:
        if type(size) is not int or not 0 <= size <= len(rest) or texts is not None:
            raise InvalidRequest(
                f"must be a number of bytes that follow, of which {len(rest)} are left, and stand "
                "in the place of data",
                param=f"{place}.parameters.binary_data_size",
            )
        texts, rest = _unpacked(rest[:size], place), rest[size:]
    if len(tensor.shape) > MOST_AXES:  # their product would be a number of millions of digits
        raise InvalidRequest(
            f"{len(tensor.shape)} axes, the limit is {MOST_AXES}", param=f"{place}.shape"
        )
    wanted = prod(tensor.shape)
    if texts is None or len(texts) != wanted or min(tensor.shape, default=0) < 0:
        raise InvalidRequest(
            f"the shape asks for {wanted} texts, there are {len(texts or ())}", param=place
        )
    if tensor.name in TEXT and wanted != 1:
        raise InvalidRequest(f"{tensor.name} is one text, not {wanted}", param=place)
    return texts, rest


def _unpacked(data: memoryview, place: str) -> list[str]:
    """Return texts that are each preceded by a length in four bytes, the lowest first."""
    texts, start = list[str](), 0
    try:
        while start < len(data):
            end = start + 4 + int.from_bytes(data[start : start + 4], "little")
            if end > len(data):
                raise InvalidRequest("a text is longer than the tensor", param=place)
            texts.append(str(data[start + 4 : end], "utf-8"))
            start = end
    except UnicodeDecodeError:
        raise InvalidRequest("a text is not valid UTF-8", param=place) from None
    return texts


def _prepare(model: LoadedModel, body: Envelope, turns: Turns) -> PreparedBody:
    """Build the engine's request; raise InvalidRequest also if rows would differ in length."""
    prepared = prepare_envelope(model, body, turns)
    for request in prepared.parts:
        if request.trie is None and len({len(ids) for ids in request.label_ids}) > 1:
            raise InvalidRequest("all items must have as many labels", param="labels")
    return prepared


def _encode(scored: Scored[Envelope]) -> Iterator[bytes]:
    ((inner, own),) = inner_scored(scored)
    count = inner.body.num_items
    if inner.dialect is RERANK:
        shape, data = [count], list_json(ranking_of(own).scores.tolist(), NUMBERS)
    else:
        labels = 0 if own.result is None else len(own.result.label_logits[0])
        shape, data = [count, labels], scores_json(own)
    tensor = OutputTensor(OUTPUT, shape, NUMBER_TYPE, HOLE)
    return in_pieces(InferAnswer(scored.request_id, scored.model, [tensor]), data)

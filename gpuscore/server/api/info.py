"""GET /info: the fields that TEI's clients read before they use a server, and our own."""

from collections.abc import Sequence
from typing import Any

from gpuscore import __version__
from gpuscore.dialects.served import LoadedModel


def server_info(name: str, model: LoadedModel) -> dict[str, Any]:
    """Return the fields of text-embeddings-inference, and those that it lacks under `gpuscore`."""
    limits = model.engine.limits
    asked = None if isinstance(model.prompts.decisions, str) else model.prompts.decisions
    backlog, requests = model.engine.backlog.config, model.prompts.builder.limits
    return {
        "model_id": name,
        "model_sha": None,
        "model_dtype": model.about,
        "model_type": _model_type(model),
        "max_concurrent_requests": backlog.max_queued_requests,
        "max_input_length": limits.max_model_len,
        "max_batch_tokens": limits.max_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": requests.max_items,
        "auto_truncate": False,
        "tokenization_workers": None,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "gpuscore": {
            "family": _family(model),
            "classes": limits.classes,
            "max_request_tokens": requests.max_request_tokens,
            "valid_token_ids": limits.vocab_rows,
            "decisions": not isinstance(model.prompts.decisions, str),
            "decision_order": None if asked is None else asked.settings.order,
            "calibration": None if asked is None else asked.settings.calibration.as_json(),
        },
    }


def _model_type(model: LoadedModel) -> dict[str, Any]:
    """Return TEI's kind of model, or `language_model`, which is ours, for any other model."""
    if model.prompts.family is not None and model.prompts.family.family.ranks:
        return {"reranker": _labels(["relevance"])}
    if model.prompts.family is not None:
        return {"classifier": _labels(model.prompts.family.family.classes)}
    if model.engine.limits.classes is not None:
        return {"classifier": _labels(model.engine.limits.classes)}
    return {"language_model": {}}


def _labels(names: Sequence[str]) -> dict[str, Any]:
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def _family(model: LoadedModel) -> dict[str, Any] | None:
    if model.prompts.family is None:
        return None
    family = model.prompts.family.family
    return {
        "name": family.name,
        "source": family.source,
        "prompt": list(family.parts),
        "labels": list(family.labels),
        "label_token_ids": model.prompts.family.label_ids,
        "classes": list(family.classes),
        "instruction": family.instruction,
        "activation": family.activation if family.ranks else "softmax",
        "scale": family.scale,
    }

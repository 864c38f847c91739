"""`gpuscore info`: a model's needs and every setting's final value, without reading weights."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from gpuscore.backends import Plan, plan_backend
from gpuscore.backends.common.estimate import ABOUT, MemoryPlan, plan_memory
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.plan import PagePlan, mebibytes
from gpuscore.backends.common.quantization import described
from gpuscore.backends.common.shapes import count_parameters
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.options import plain
from gpuscore.config.served import ServedConfig, served_models
from gpuscore.config.sources import DEFAULT, Settings
from gpuscore.errors import ConfigError
from gpuscore.models.files import printable
from gpuscore.models.hub import model_name
from gpuscore.processes.replicas.placement import places_of_all, size_of_weights
from gpuscore.processes.worker.wire import Placement
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.family import formula_of
from gpuscore.prompts.model import ModelFiles
from gpuscore.prompts.registry import PRM, STEP_TOKEN
from gpuscore.text.joining import PromptBuilder
from gpuscore.types.batch import BackendLimits

SHOWN_CLASSES = 8
HEAD = ("model", "device", "cores", "weights", "keys and values")


def print_info(settings: Settings, device_memory: int | None) -> None:
    """Print the model's facts, then all settings.

    Args:
        settings: those of `serve`.
        device_memory: bytes of a CUDA device to plan for; None: the devices of this machine.

    Raises:
        ConfigError: the model cannot be served, or does not fit; the settings are printed all the
            same, because a setting may be the reason.
    """
    resolved: dict[str, object] = {}
    try:
        chosen = served_models(settings.make(ModelConfig), settings.make(ServerConfig))
        if len(chosen) == 1:
            _print_model(chosen[0], settings, device_memory, resolved)
        elif device_memory is not None:
            raise ConfigError(f"--device-memory plans for one model, not for {len(chosen)}")
        else:
            print(_models_table(chosen, settings.make(EngineConfig)))
    finally:
        _print_settings(settings, resolved)


def _print_model(
    chosen: ServedConfig,
    settings: Settings,
    device_memory: int | None,
    resolved: dict[str, object],
) -> None:
    chosen = chosen.located()
    model = chosen.config
    directory = chosen.directory
    rows = {"model": f"{model_name(model.model)} ({directory})"}
    if device_memory is None:
        (places,) = places_of_all([chosen], settings.make(EngineConfig).devices)
        os.environ.update(places[0].environment)
        plan = plan_backend(directory, places[0].model)
        config = plan.architecture.config
        rows |= _model_rows(config) | _rank_rows(model) | _device_rows(plan, places)
        resolved |= _resolved(plan)
    else:
        memory_plan = plan_memory(directory, model, device_memory)
        config = memory_plan.architecture.config
        rows |= _model_rows(config) | _rank_rows(model) | _memory_rows(memory_plan)
        resolved |= memory_plan.resolved
    family = settings.chosen["family"].value
    files = ModelFiles.read(directory, family, chosen.sources)
    named = PRM if files.step_token is not None else "none"
    resolved["family"] = named if files.family is None else files.family.name
    rows |= _family_rows(files, config)
    rows["tokenizer"] = "tokenizer.json" if files.encoder else "none: token ids only"
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
    if device_memory is not None:
        memory_plan.check()


def _family_rows(files: ModelFiles, config: DecoderConfig) -> dict[str, str]:
    """Return where the model's prompt comes from, what is read after it, and what is shared."""
    family = files.family
    if files.step_token is not None:
        return {"prompt family": PRM, "step token": f"{STEP_TOKEN}, {files.step_token}"}
    if family is None:
        return {"prompt family": "none"}
    longest = config.max_position_embeddings
    limits = BackendLimits(
        max_tokens=longest,
        page_size=1,
        num_pages=longest,
        max_model_len=longest,
        vocab_rows=config.vocab_size,
        classes=config.classes,
    )
    prompts = FamilyPrompts(family, PromptBuilder(files.encoder, limits, RequestLimits()))
    names = [str(label) if family.one_class else f"logit({label})" for label in family.labels]
    raw = "the class's logit" if family.one_class else " - ".join(names)
    guards = f"softmax of {', '.join(names)}"
    shared = f"{prompts.fixed_tokens} tokens" + " and the query" * family.shares_query
    return {
        "prompt family": family.name,
        "prompt from": family.source,
        "formula": formula_of(family.activation, family.scale, raw) if family.ranks else guards,
        "label ids": ", ".join(map(str, prompts.label_ids)),
        "shared by a query's prompts": shared,
    }


def _models_table(chosen: Sequence[ServedConfig], engine: EngineConfig) -> str:
    """Return a table of several models, a row for each engine: its device and cores, and the bytes
    of its weights and of its KV cache.

    Raises:
        ConfigError: see `places_of_all`.
    """
    models = [model.located() for model in chosen]
    rows: list[tuple[str, ...]] = [HEAD]
    for model, places in zip(models, places_of_all(models, engine.devices), strict=True):
        sizes = size_of_weights(model.directory), model.config.kv_cache_size or 0
        for place in places:
            cores = ", ".join(map(str, place.cores)) or "all"
            rows.append((model.name, place.device, cores, *map(mebibytes, sizes)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _model_rows(config: DecoderConfig) -> dict[str, str]:
    linear = config.delta_net
    return {
        "architecture": config.architecture,
        "head": _head(config.classes),
        "parameters": f"{count_parameters(config):,}",
        "layers, heads, KV heads, head size": f"{config.num_layers}, {config.num_heads}, "
        f"{config.num_kv_heads}, {config.head_dim}",
        **({} if linear is None else {"layers of linear attention": f"{sum(linear.layers)}"}),
        "valid token ids": f"0 to {config.vocab_size - 1}",
    }


def _rank_rows(model: ModelConfig) -> dict[str, str]:
    ranks = model.tensor_parallel
    return {} if ranks == 1 else {"tensor parallel": f"{ranks} ranks; memory is of each"}


def _device_rows(plan: Plan, places: Sequence[Placement]) -> dict[str, str]:
    pages = plan.pages
    num_pages = pages.count(max(0, plan.free_memory() - plan.weight_bytes), 0)
    on = f" on {_places(places)}" if len(places) > 1 or places[0].cores else ""
    return {
        "replicas": f"{len(places)}{on}",
        "device, dtype": f"{plan.device_name}, {plan.dtype_name}",
        "linear layers": described(plan.precision, plan.architecture.storage),
        "longest prompt": f"{plan.max_model_len:,} tokens",
        "one forward pass": f"{plan.max_tokens:,} tokens",
        "memory for weights": mebibytes(plan.weight_bytes),
        "memory for the largest batch": "measured at start",
        "memory for the KV cache": f"{mebibytes(num_pages * pages.page_bytes)} "
        f"({num_pages:,} pages of {pages.size} tokens), less if the largest batch leaves less",
        **_state_rows(pages),
    }


def _state_rows(pages: PagePlan) -> dict[str, str]:
    if not pages.num_states:
        return {}
    return {"memory for states": f"{mebibytes(pages.state_bytes)} ({pages.num_states} slots)"}


def _memory_rows(plan: MemoryPlan) -> dict[str, str]:
    count = plan.num_pages
    pages = plan.pages
    return {
        "device, dtype": f"a CUDA device with {mebibytes(plan.free_bytes)}, {plan.dtype}",
        "linear layers": described(plan.precision, plan.architecture.storage),
        "longest prompt": f"{pages.max_model_len:,} tokens",
        "one forward pass": f"{plan.max_tokens:,} tokens",
        "memory for CUDA itself": f"{mebibytes(plan.context)} (assumed)",
        "memory for weights": mebibytes(plan.weight_bytes),
        "memory for the largest batch": f"{mebibytes(plan.batch_bytes)} (predicted from the "
        f"model's shapes, ±{ABOUT:.0%}; measured at start)",
        "memory for the KV cache": f"{mebibytes(count * pages.page_bytes)} ({count:,} pages of "
        f"{pages.size} tokens: {count * pages.size:,} tokens)",
        **_state_rows(pages),
    }


def _resolved(plan: Plan) -> dict[str, object]:
    """Return the final values of settings that are not set, or set to auto."""
    resolved: dict[str, object] = {
        "device": plan.device_name,
        "dtype": plan.dtype_name,
        "quantization": plan.precision,
        "attention": plan.attention,
        "max_batch_tokens": plan.max_tokens,
        "max_model_len": plan.max_model_len,
        "memory_fraction": plan.pages.fraction,
    }
    if plan.framework == "torch":
        resolved["kernels"] = "triton" if plan.kernels else "torch"
        resolved["compile"] = "on" if plan.compile else "off"
        resolved["cuda_graph_tokens"] = plan.graph_tokens or 0
    return resolved


def _places(places: Sequence[Placement]) -> str:
    """Name the replicas' devices; the values printed below belong to the first replica."""
    cores = [
        f" (cores {', '.join(map(str, place.cores))})" if place.cores else "" for place in places
    ]
    return ", ".join(place.device + text for place, text in zip(places, cores, strict=True))


def _head(classes: Sequence[str] | None) -> str:
    if classes is None:
        return "the vocabulary: labels are tokens"
    shown = ", ".join(map(printable, classes[:SHOWN_CLASSES])) + (
        ", ..." if len(classes) > SHOWN_CLASSES else ""
    )
    return f"classification, {len(classes)} class{'es' if len(classes) > 1 else ''}: {shown}"


def _print_settings(settings: Settings, resolved: Mapping[str, object]) -> None:
    """Print one line per setting; a star marks values that are not defaults."""
    rows = [
        (name, _value(name, setting.value, resolved), setting.source)
        for name, setting in settings.chosen.items()
    ]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    print(f"\n  {'setting':<{names}}  {'value':<{values}}  source")
    for name, value, source in rows:
        star = " " if source == DEFAULT else "*"
        print(f"{star} {name:<{names}}  {value:<{values}}  {source}")


def _value(name: str, value: Any, resolved: Mapping[str, object]) -> str:
    """Return a value, and the final value if it differs."""
    shown = plain(value)
    if value not in (None, "auto") or name not in resolved:
        return shown
    return f"{shown} -> {plain(resolved[name])}"

"""The commands `gpuscore parity run` and `record`."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpuscore.backends import Plan, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.config.sources import DEFAULT, Settings
from gpuscore.errors import ConfigError
from gpuscore.exits import EXIT_OK
from gpuscore.measure.bundle import Bundle, write_bundle
from gpuscore.measure.compare import judged
from gpuscore.measure.fingerprint import fingerprint
from gpuscore.measure.report import conclude, now
from gpuscore.measure.runs import run_workload
from gpuscore.measure.workload import TEXT, Workload, make_workload, query_numbers, read_tokenizer
from gpuscore.models.hub import model_directory, model_name
from gpuscore.system.machine import local_machine, versions

_OF_BACKENDS = ("backend", "attention", "quantization")


def run(values: argparse.Namespace, settings: Settings) -> int:
    """Compare a backend with transformers, in float32 and in its own format."""
    config, directory, plan, workload = _prepared(values, settings)

    from gpuscore.measure.oracle import run_oracle

    facts = _print_facts(config.model, workload)
    dtypes = dict.fromkeys(("float32", plan.dtype_name))
    references = [run_oracle(directory, config, dtype, workload) for dtype in dtypes]
    found = judged([run_workload(config, plan, workload)], references)
    facts["oracle"] = f"transformers on {references[0].facts['device']}"
    facts |= {"date": now(), "hardware": local_machine(), "versions": versions()}
    title = f"Parity of {facts['model']} with transformers in float32"
    return conclude(values.report, title, (), found, facts={"Run": facts})


def record(values: argparse.Namespace, settings: Settings) -> int:
    """Score the workload with one backend, or with the oracle, and write a bundle."""
    if values.oracle:
        for name in _OF_BACKENDS:
            if settings.chosen[name].source != DEFAULT:
                raise ConfigError(f"--{name} is set beside --oracle, which runs transformers")
    config, directory, plan, workload = _prepared(values, settings)
    _print_facts(config.model, workload)
    if values.oracle:
        from gpuscore.measure.oracle import run_oracle

        measured = run_oracle(directory, config, plan.dtype_name, workload)
    else:
        measured = run_workload(config, plan, workload)
    flags = asdict(config)
    del flags["model"]  # perhaps a path of this machine
    facts = measured.facts | {
        "created": now(),
        "hardware": local_machine(),
        "versions": versions(),
        "flags": flags,
    }
    measured = replace(measured, facts=facts, digests=fingerprint(directory))
    write_bundle(Path(values.output), Bundle({}, (measured,)))
    print(f"wrote {values.output}")
    return EXIT_OK


def _prepared(
    values: argparse.Namespace, settings: Settings
) -> tuple[ModelConfig, Path, Plan, Workload]:
    """Return the configuration, the model's directory, the plan, which decides what "auto" means
    on this machine, and the workload."""
    config = settings.make(ModelConfig)
    directory = model_directory(config.model, config.revision, config.adapter)
    plan = plan_backend(directory, config)
    tokenizer = read_tokenizer(directory)
    model = plan.architecture.config
    if model.classes is not None:
        raise ConfigError(
            f"config.json: architectures is {model.architecture!r}; supported by this comparison: "
            "language models, whose labels are tokens"
        )
    size = values.workload or ("standard" if tokenizer is None else TEXT)
    limits = model.vocab_size, plan.max_model_len
    workload = make_workload(size, values.seed, *limits, tokenizer=tokenizer)
    return config, directory, plan, workload


def _print_facts(model: str, workload: Workload) -> dict[str, Any]:
    """Print and return what is scored."""
    queries = len(set(query_numbers(workload.cases).values()))
    longest = max(len(ids) for case in workload.cases for ids in case.prompt_ids())
    said = (
        f"{workload.named}: {len(workload.cases)} requests of {queries} queries, "
        f"{workload.num_items} items, prompts of up to {longest} tokens, "
        f"SHA-256 {workload.digest[:16]}"
    )
    facts = {"model": model_name(model), "workload": said}
    print("\n".join(f"{name}: {what}" for name, what in facts.items()) + "\n", flush=True)
    return facts

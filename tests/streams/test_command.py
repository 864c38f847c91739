"""Promise: `make check-streams` runs the product's own code, and the same way every time."""

import json
import multiprocessing
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.engine.runner import Runner
from gpuscore.engine.ticket import Ticket
from support.streams import __main__ as command
from support.streams.plants import PLANTS
from support.streams.runner import INT8, setup_of
from support.streams.worlds import Life, check_group


@pytest.mark.slow
def test_scores_are_those_of_the_cpu(model):
    """The product's code computes on the tensors that play CUDA's what it computes on a CPU."""
    plain = create_backend(plan_backend(model, ModelConfig(str(model), max_model_len=128)))
    checked = 0
    for group, seed in ((0, 3), (1, 12), (2, 21), (3, 39)):
        life = Life(model, group)
        with life.started() as real:
            world = life.run(seed, real)
        for ticket in world.tickets:
            if ticket.future.cancelled() or ticket.future.exception() is not None:
                continue
            runner = Runner(plain)
            again = Ticket(
                replace(ticket.request, deadline=None), type(ticket.future)(), None, arrived=0.0
            )
            runner.add(again)
            while not runner.idle:
                runner.step()
            for got, want in zip(
                ticket.future.result().label_logits,
                again.future.result().label_logits,
                strict=True,
            ):
                np.testing.assert_allclose(got, want, atol=2e-3)
                checked += 1
    plain.close()
    assert checked > 20


@pytest.mark.slow
def test_a_group_runs_the_same_way_again(model):
    first, second = (check_group(model, range(20, 24), 2) for _ in range(2))
    assert first.counts == second.counts
    assert first.changes == second.changes


@pytest.mark.slow
def test_the_trace_holds_every_operation(model, tmp_path):
    path = tmp_path / "trace.jsonl"
    with path.open("w") as trace:
        report = check_group(model, (0,), 0, trace)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = Counter(line["operation"] for line in lines)
    for name in ("record", "wait", "synchronise", "allocate", "free", "hand over"):
        assert names[name] > 0, name
    accesses = [line for line in lines if line["reads"] or line["writes"]]
    assert len(accesses) == report.at_start + report.counts.operations
    assert {line["thread"] for line in lines} == {"engine", "backend"}


@pytest.mark.slow
def test_worlds_in_int8_run_its_kernels(model, tmp_path):
    assert setup_of(8) in INT8
    path = tmp_path / "trace.jsonl"
    with path.open("w") as trace:
        report = check_group(model, (80,), 8, trace)
    assert not report.findings
    names = {json.loads(line)["operation"] for line in path.read_text().splitlines()}
    assert names >= {
        "quantize_rows_kernel",
        "quantized_norm_kernel",
        "quantized_gated_kernel",
        "int8_product_kernel",
    }


@pytest.mark.slow
def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(command, "PLANTS", PLANTS[:2])
    # The command forks before it has threads; the worker that runs this test may have JAX's.
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(command.multiprocessing, "get_context", lambda _: spawn)
    assert command.main(["--group", "1", "--processes", "1"]) == 0
    said = capsys.readouterr().out
    assert "10 worlds" in said
    assert "0 findings" in said
    assert said.count("  found: ") == 2

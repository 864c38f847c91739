"""Promise: `make check-streams` runs the product's own code, and the same way every time."""

import multiprocessing

import pytest

from support.streams import __main__ as command
from support.streams.plants import PLANTS
from support.streams.recorder import Recorder
from support.streams.runner import INT8, setup_of
from support.streams.worlds import check_group


@pytest.mark.slow
def test_a_group_runs_the_same_way_again(model):
    first, second = (check_group(model, range(20, 24), 2) for _ in range(2))
    assert first.counts == second.counts
    assert first.changes == second.changes


@pytest.mark.slow
def test_worlds_in_int8_run_its_kernels(model, monkeypatch):
    assert setup_of(8) in INT8
    names, run = set(), Recorder.run
    monkeypatch.setattr(
        Recorder, "run", lambda recorder, name, *more: names.add(name) or run(recorder, name, *more)
    )
    assert not check_group(model, (80,), 8).findings
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

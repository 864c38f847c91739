"""Promise: `--dtype auto` on a CPU is float32 only where that fits and is clearly faster."""

import json
import re
from itertools import accumulate, chain, repeat

import pytest
import torch

from gpuscore.backends import plan_backend
from gpuscore.backends.torch import plan
from gpuscore.backends.torch.timed_formats import LEAST_PAIRS, faster_format, time_products
from gpuscore.config import ModelConfig

# 158 million parameters in config.json; no test here reads weights.
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 100_000, "head_dim": 64}
QUICK, SLOW = (0.009, 0.008), (0.009, 0.0082)  # seconds in bfloat16 and float32


@pytest.fixture
def directory(tiny_model, tmp_path):
    source, _ = tiny_model("qwen3")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | LARGE | {"dtype": "bfloat16"}))
    return tmp_path


@pytest.fixture
def timed(monkeypatch):
    """timed(seconds) plants what products take on a CPU with bfloat16; lists measurements."""
    made = []

    def plant(seconds):
        monkeypatch.setattr(plan, "computes_natively", lambda dtype: True)
        monkeypatch.setattr(plan, "time_products", lambda *sizes: made.append(sizes) or seconds)
        return made

    return plant


@pytest.mark.parametrize(
    ("full", "expected"),
    [(8.9, "float32"), (9.1, "bfloat16"), (10.0, "bfloat16"), (12.0, "bfloat16")],
)
def test_float32_has_to_save_a_tenth(full, expected):
    chosen, reason = faster_format("bfloat16", (0.010, full / 1000))
    assert chosen == expected
    assert reason == f"a product took 10.00 ms in bfloat16, {full:.2f} ms in float32"


def test_formats_take_turns_and_an_interruption_does_not_count():
    durations = [3.0, 1.0, 3.0, 900.0, 3.0, 1.0]  # of bfloat16 and float32 in turn
    between = chain.from_iterable((0.0, duration) for duration in durations)
    clock = accumulate(chain([0.0], between, repeat(0.0)))
    threads = torch.get_num_threads()
    seconds = time_products(torch.bfloat16, 8, 16, 1, lambda: next(clock))
    assert len(durations) == 2 * LEAST_PAIRS
    assert seconds == (3.0, 1.0)
    assert torch.get_num_threads() == threads


def test_the_faster_format_is_planned_and_all_ranks_get_it(directory, timed):
    sizes = timed(QUICK)
    chosen = plan_backend(directory, ModelConfig(threads=2))
    assert chosen.dtype == torch.float32
    assert chosen.settings == ModelConfig(threads=2, dtype="float32")  # of which ranks plan
    assert chosen.weight_bytes == plan_backend(directory, chosen.settings).weight_bytes
    assert "float32" in chosen.identity
    assert chosen.limits(1).dtype_reason.startswith("a product took 9.00 ms in bfloat16, 8.00 ms")
    assert sizes == [(torch.bfloat16, 1024, 2 * 4096, 2)]


def test_the_checkpoints_format_stays_if_it_is_no_slower(directory, timed):
    timed(SLOW)
    chosen = plan_backend(directory, ModelConfig())
    assert (chosen.dtype, chosen.settings.dtype) == (torch.bfloat16, "bfloat16")
    assert chosen.dtype_reason


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "checkpoint"},
    ],
)
def test_nothing_is_measured_if_it_decides_nothing(directory, timed, options):
    sizes = timed(QUICK)
    chosen = plan_backend(directory, ModelConfig(**options))
    assert (chosen.dtype, chosen.dtype_reason, sizes) == (torch.bfloat16, "", [])


def test_a_small_model_keeps_its_format(directory, timed):
    sizes = timed(QUICK)
    small = json.loads((directory / "config.json").read_text()) | {"vocab_size": 10_000}
    (directory / "config.json").write_text(json.dumps(small))
    assert plan_backend(directory, ModelConfig()).dtype == torch.bfloat16
    assert sizes == []


def test_float32_has_to_fit_with_a_batch_and_a_prompt(directory, timed, monkeypatch):
    sizes = timed(QUICK)
    full = plan_backend(directory, ModelConfig(dtype="float32"))
    prompt = full.pages.needed * full.pages.page_bytes
    # A share of 0.7 is for the model; half of what weights leave of it is kept for a batch, and a
    # share of 0.7 of the rest is for pages.
    for halves, dtype in ((2, torch.float32), (1, torch.bfloat16)):
        rest = int(halves * prompt / 0.7) + full.pages.page_bytes
        free = int((full.weight_bytes + rest) / 0.7) + 1
        monkeypatch.setattr(plan.TorchPlan, "free_memory", lambda _, free=free: free)
        kept = plan_backend(directory, ModelConfig())
        assert kept.dtype == dtype
    assert re.search("in float32 it may not fit: a prompt of --max-model-len", kept.dtype_reason)
    assert len(sizes) == 1


def test_replicas_that_share_memory_have_to_fit_together(directory, timed, monkeypatch):
    """Each of four replicas gets a fraction of 0.175, and may take no more of the free memory."""
    timed(QUICK)
    full = plan_backend(directory, ModelConfig(dtype="float32"))
    free = 5 * full.weight_bytes
    monkeypatch.setattr(plan.TorchPlan, "free_memory", lambda plan: free)
    assert plan_backend(directory, ModelConfig()).dtype == torch.float32
    assert plan_backend(directory, ModelConfig(memory_fraction=0.175)).dtype == torch.bfloat16


@pytest.mark.skipif(not plan.computes_natively("bfloat16"), reason="a CPU without bfloat16")
def test_this_machine_chooses_one_of_both(directory):
    chosen = plan_backend(directory, ModelConfig())
    assert chosen.dtype in (torch.bfloat16, torch.float32)
    pattern = r"a product took (\d+\.\d\d) ms in bfloat16, (\d+\.\d\d) ms in float32"
    own, full = map(float, re.fullmatch(pattern, chosen.dtype_reason).groups())
    assert min(own, full) > 0

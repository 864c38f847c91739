"""Promise: `parity run` passes right scores and fails, with exit code 1, for planted defects."""

import dataclasses
import re
import sys

import numpy as np
import pytest

from gpuscore.commands.cli import main
from gpuscore.engine import jobs
from gpuscore.measure import arguments
from gpuscore.measure import workload as workloads
from gpuscore.measure.gates import judge, packing
from gpuscore.measure.results import CaseResult, Measured
from gpuscore.measure.workload import Case, Workload


@pytest.fixture
def few_items(monkeypatch):
    monkeypatch.setattr(workloads, "MANY", 24)
    monkeypatch.setattr(workloads, "QUERIES", 2)


def run(directory, *flags, dtype="float32"):
    words = ["--dtype", dtype, "--workload", "quick", "--max-batch-tokens", "512"]
    return main(["parity", "run", str(directory), *words, *flags])


def test_float32_of_a_model_passes(tiny_model, few_items, capsys):
    assert run(tiny_model("llama")[0], "--threads", "1") == 0
    shown = capsys.readouterr().out
    for gate in ("float32", "rank", "label mass"):
        assert f"ok    torch:float32 against transformers:float32, {gate}: " in shown
    assert "ok    torch:float32, packing: " in shown
    assert "FAIL" not in shown


def test_bfloat16_of_a_model_passes(tiny_model, few_items, capsys, tmp_path):
    report = tmp_path / "report.html"
    directory, _ = tiny_model("llama")
    flags = ["--report", str(report), "--threads", "1"]
    assert run(directory, *flags, dtype="bfloat16") == 0
    shown = capsys.readouterr().out
    assert "11 requests of 7 queries" in shown
    for name in ("transformers:bfloat16 ", "torch:bfloat16 "):
        assert f"\n{name}" in shown
    assert "ok    torch:bfloat16, relative: " in shown
    assert re.search(r"\n(ok  |skip)  torch:bfloat16, rank: ", shown), "no gate vanishes"
    assert re.search(r"e-0\d \(\S+ to \S+\) ", shown), "the mean has an interval"
    assert max(len(line) for line in shown.split("\nok ")[0].splitlines()[3:]) <= 120
    assert "FAIL" not in shown
    assert shown.count(" transformers:float32 ") >= 2, "each row says what it is compared with"
    page = report.read_text()
    for fact in (
        'name="viewport"',
        "<td>transformers on cpu</td>",
        "<td>date</td><td>20",
        "torch 2.",
        "<td>hardware</td>",
    ):
        assert fact in page
    assert "with transformers in float32" in page
    assert page.count('<div class="wide"><table') == page.count("<table"), "tables scroll"
    assert page.count("<td") == page.count("</td>"), "every cell is closed"


def item_positions_are_shifted(monkeypatch):
    pack = jobs.pack_columns

    def shifted(segments, prefixes, **options):
        scored = [len(ids) > 0 for ids in segments.label_ids]
        segments.start = [sum(pair) for pair in zip(segments.start, scored, strict=True)]
        return pack(segments, prefixes, **options)

    monkeypatch.setattr(jobs, "pack_columns", shifted)


def items_differ_with_their_company(monkeypatch):
    pack = jobs.pack_columns

    def dependent(segments, prefixes, **options):
        scored = [index for index, ids in enumerate(segments.label_ids) if len(ids)]
        if len(scored) > 5:
            segments.token_ids[scored[0]] = segments.token_ids[scored[0]][::-1].copy()
        return pack(segments, prefixes, **options)

    monkeypatch.setattr(jobs, "pack_columns", dependent)


@pytest.mark.parametrize(
    ("plant", "gates"),
    [
        (item_positions_are_shifted, ("float32", "rank")),
        (items_differ_with_their_company, ("float32", "packing")),
    ],
)
def test_a_planted_defect_fails(tiny_model, few_items, monkeypatch, capsys, plant, gates):
    directory, _ = tiny_model("llama")
    plant(monkeypatch)
    assert run(directory, "--threads", "1") == 1
    shown = capsys.readouterr().out
    for gate in gates:
        against = "" if gate == "packing" else " against transformers:float32"
        assert f"FAIL  torch:float32{against}, {gate}: " in shown


class TestGates:
    """Each gate alone, on made-up results: its verdict must not depend on a model."""

    ITEMS = 60
    EXACT = -10 + np.random.default_rng(0).normal(size=(ITEMS, 2))
    NOISE = 0.01 * np.random.default_rng(1).uniform(-1, 1, (ITEMS, 2))

    def made(self, values, dtype, items=None, **more):
        """Return scores of items, by default of as many different ones."""
        items = items or [[n] for n in range(len(values))]
        case = Case("ranked", [5], items, [[0, 1]] * len(items))
        results = {"ranked": CaseResult(values, np.minimum(np.exp(values).sum(axis=1), 1.0))}
        workload = Workload("made up", 0, 60, 9, (case,))
        return Measured(f"made:{dtype}", "demo", dtype, workload=workload, results=results, **more)

    def failed(self, *scored):
        return {verdict.gate for verdict in judge(*scored)[1] if verdict.failed}

    def judged(self, values, dtype="bfloat16", exact=EXACT, **more):
        """Return the gates that values fail; transformers' are off by NOISE in half precision."""
        rounded = None if dtype == "float32" else self.made(exact + self.NOISE, dtype)
        exact = self.made(exact, "float32", **more)
        return self.failed(exact, self.made(values, dtype, **more), rounded)

    def test_relative(self):
        assert not self.judged(self.EXACT + 1.49 * self.NOISE)
        outlier = self.NOISE.copy()
        outlier[3, 0] = 1.6 * np.abs(self.NOISE).max()
        assert self.judged(self.EXACT + outlier) == {"relative"}, "the maximum"
        often = np.sign(self.NOISE) * 1.6 * np.median(np.abs(self.NOISE))
        assert self.judged(self.EXACT + often) == {"relative"}, "the median"

    def test_float32(self):
        assert not self.judged(self.EXACT + 0.009 * self.NOISE, "float32")
        shifted = self.EXACT.copy()
        shifted[7, 1] += 1.1e-4
        assert self.judged(shifted, "float32") == {"float32"}
        shifted[7, 1] = np.nan
        assert "float32" in self.judged(shifted, "float32")

    @pytest.mark.parametrize("planted", [0.1, -1e-5, np.nan])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
    def test_a_label_mass_that_is_not_the_labels_sum(self, dtype, planted):
        right, rounded = self.made(self.EXACT, "float32"), self.made(self.EXACT, "bfloat16")
        more = {"precision": "int8"} if dtype == "int8" else {}
        wrong = self.made(self.EXACT, "float32" if more else dtype, **more)
        assert not self.failed(right, wrong, rounded)
        wrong.results["ranked"].mass[3] += planted
        assert self.failed(right, wrong, rounded) == {"label mass"}
        assert "label mass" in self.failed(right, wrong)
        assert "label mass" in self.failed(wrong, right)

    @pytest.mark.parametrize(("noise", "failed"), [(0.05, set()), (0.5, {"eight bits"})])
    def test_eight_bits_may_err_more(self, noise, failed):
        moved = self.EXACT + noise * np.random.default_rng(0).uniform(-1, 1, self.EXACT.shape)
        scored = self.made(moved, "float32", precision="int8")
        verdicts = self.failed(self.made(self.EXACT, "float32"), scored)
        assert verdicts & {"eight bits", "float32", "absolute"} == failed

    def test_rank_is_about_clear_pairs(self):
        """An error of 0.015 is allowed: items 0.025 apart may swap, items 0.3 apart may not."""
        order = np.argsort(self.EXACT[:, 0])
        for gap, expected in ((0.025, set()), (0.3, {"rank"})):
            spread = self.EXACT.copy()
            spread[order, 0] = np.linspace(-20, -10, self.ITEMS)
            spread[order[-1], 0] = spread[order[-2], 0] + gap
            swapped = spread.copy()
            swapped[order[-2:], 0] = spread[order[-2:][::-1], 0]
            assert self.judged(swapped, exact=spread) - {"relative"} == expected
        assert self.judged(self.EXACT[::-1]) == {"relative", "rank"}, "the order as a whole"

    def test_items_of_one_prompt_are_ranked_once(self):
        """Libraries round them differently in different places, so no order is the right one."""
        twins = np.repeat(np.linspace(-20, -10, 30), 2)[:, None] + np.zeros(2)
        twins[1::2] += 3e-4
        swapped = twins.copy()
        swapped[::2], swapped[1::2] = twins[1::2], twins[::2]
        assert "rank" in self.judged(swapped, "float32", twins)
        of_one_prompt = [[n // 2] for n in range(60)]
        assert "rank" not in self.judged(swapped, "float32", twins, items=of_one_prompt)

    def test_a_gate_that_cannot_judge_says_why(self):
        near = self.made(-10 + 1e-6 * self.EXACT, "float32")
        said = [packing(near), *judge(near, near)[1]]
        reasons = {verdict.gate: verdict.detail for verdict in said if verdict.passed is None}
        assert reasons.keys() == {"rank", "packing"}
        assert all(detail.startswith("skipped, because ") for detail in reasons.values())
        assert "no two items of a ranking are over 2.0e-04 apart" in reasons["rank"]
        bare = dataclasses.replace(near, results={"ranked": CaseResult(self.EXACT)})
        said = {verdict.gate: verdict.detail for verdict in judge(bare, bare)[1]}
        assert said["label mass"] == "skipped, because the scores have none"

    @pytest.mark.parametrize(
        ("dtype", "alone", "same_bits", "passed"),
        [
            ("bfloat16", 0.1, False, True),
            ("bfloat16", 0.2, False, False),
            ("float32", 2e-4, False, False),
            ("float32", 1e-9, True, False),
        ],
    )
    def test_packing(self, dtype, alone, same_bits, passed):
        scored = self.made(self.EXACT, dtype, alone=alone, deterministic=same_bits)
        assert packing(scored).passed is passed

    @pytest.mark.parametrize(
        ("dtypes", "change", "expected"),
        [
            (("bfloat16", "bfloat16"), 0.0, set()),
            (("bfloat16", "bfloat16"), 0.4, set()),  # as honest rounding of SmolLM2
            (("bfloat16", "bfloat16"), 0.6, {"absolute"}),  # above the p99 limit for all
            (("float32", "float32"), 2e-4, {"float32"}),
            (("bfloat16", "float32"), 0.4, set()),
        ],
    )
    def test_pairs(self, dtypes, change, expected):
        first, second = self.made(self.EXACT, dtypes[0]), self.made(self.EXACT + change, dtypes[1])
        assert self.failed(first, second) == expected
        if "float32" in dtypes:
            right = judge(first, second)[0].reference
            assert right.dtype == "float32", "the more exact one counts as right"

    def test_probabilities_have_a_limit_of_their_own(self):
        likely = np.minimum(self.EXACT + 9.9, -0.01)  # 0.04 is a large error near a p of 1
        pair = self.made(likely, "bfloat16"), self.made(likely - 0.04, "bfloat16")
        assert self.failed(*pair) == {"absolute"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seed", "-1"), "--seed -1 must be from 0"),
        (("--seed", str(2**32)), f"--seed {2**32} must be from 0"),
        (("--workload", "text", "--seed", "1"), "--seed 1 draws token ids"),
        (("--attention", "flashinfer"), "flashinfer"),  # it cannot run on a CPU
    ],
)
def test_wrong_flags(flags, message, capsys):
    assert run("demo", *flags) == 78
    assert message in capsys.readouterr().err


def test_every_size_can_be_asked_for():
    assert set(arguments.SIZES) == {*workloads.SIZES, workloads.TEXT, workloads.SAMPLE}


def test_a_framework_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax", None)
    assert run("demo", "--backend", "jax") == 78
    assert "pip install 'jax<" in capsys.readouterr().err

"""Promise: `parity run` passes right scores and fails, with exit code 1, for planted defects."""

import dataclasses
import re
import sys
from html.parser import HTMLParser

import jax
import numpy as np
import pytest

from gpuscore.backends.jax import decoder as jax_model
from gpuscore.backends.torch import decoder
from gpuscore.commands.cli import main
from gpuscore.config import ModelConfig
from gpuscore.engine import jobs
from gpuscore.measure import arguments
from gpuscore.measure import workload as workloads
from gpuscore.measure.gates import judge, judge_pair
from gpuscore.measure.results import CaseResult, Errors, Run
from gpuscore.measure.runs import configured
from gpuscore.measure.workload import Case, Workload


@pytest.fixture
def few_items(monkeypatch):
    monkeypatch.setattr(workloads, "MANY", 24)
    monkeypatch.setattr(workloads, "QUERIES", 2)


def run(directory, *arguments, backends="torch:float32"):
    words = ["--backends", backends, "--workload", "quick", "--max-batch-tokens", "512"]
    return main(["parity", "run", str(directory), *words, *arguments])


class Page(HTMLParser):
    """A parser that checks the page's tags and collects its plots."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag not in ("meta", "rect", "circle", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_float32_and_bfloat16_of_a_model_pass(tiny_model, few_items, capsys, tmp_path):
    report = tmp_path / "report.html"
    directory, _ = tiny_model("llama")
    flags = ["--report", str(report), "--threads", "1"]
    assert run(directory, *flags, backends="torch:float32,torch:bfloat16") == 0
    shown = capsys.readouterr().out
    assert "14 requests of 9 queries" in shown
    assert "\noracle: transformers on cpu\n" in shown
    for name in ("transformers:bfloat16 ", "torch:float32 ", "torch:bfloat16 "):
        assert f"\n{name}" in shown
    for gate in ("float32", "rank", "tau-b"):
        assert f"ok    torch:float32 against transformers:float32, {gate}: " in shown
    assert "ok    torch:bfloat16, relative: " in shown
    for gate in ("rank", "tau-b"):
        assert re.search(f"\n(ok  |skip)  torch:bfloat16, {gate}: ", shown), "no gate vanishes"
    assert re.search(r"e-0\d \(\S+ to \S+\) ", shown), "the mean has an interval"
    assert max(len(line) for line in shown.split("\nok ")[0].splitlines()[3:]) <= 120
    assert "FAIL" not in shown
    assert shown.count(" transformers:float32 ") >= 3, "each row says what it is compared with"
    page = report.read_text()
    for fact in ('name="viewport"', "<td>date</td><td>20", "torch 2.", "<td>hardware</td>"):
        assert fact in page
    assert "with transformers in float32" in page
    assert page.count('<div class="wide"><table') == page.count("<table"), "tables scroll"
    assert not Page(page).open, "every tag is closed"


def item_positions_are_shifted(monkeypatch):
    pack = jobs.pack_columns

    def shifted(segments, prefixes, **options):
        scored = [ids is not None for ids in segments.label_ids]
        segments.start = [sum(pair) for pair in zip(segments.start, scored, strict=True)]
        return pack(segments, prefixes, **options)

    monkeypatch.setattr(jobs, "pack_columns", shifted)


def positions_of_the_decoder_are_stretched(monkeypatch):
    """Stretch all positions: shifting all of them equally changes nothing, since the rotary
    embedding is relative."""
    tables = decoder.rotary_tables
    monkeypatch.setattr(decoder, "rotary_tables", lambda p, **f: tables(p + p // 20, **f))


def items_differ_with_their_company(monkeypatch):
    pack = jobs.pack_columns

    def dependent(segments, prefixes, **options):
        scored = [index for index, ids in enumerate(segments.label_ids) if ids is not None]
        if len(scored) > 5:
            segments.token_ids[scored[0]] = segments.token_ids[scored[0]][::-1].copy()
        return pack(segments, prefixes, **options)

    monkeypatch.setattr(jobs, "pack_columns", dependent)


@pytest.mark.parametrize(
    ("plant", "gates"),
    [
        (item_positions_are_shifted, ("float32", "rank", "tau-b")),
        (positions_of_the_decoder_are_stretched, ("float32", "rank", "tau-b")),
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


class TestJax:
    FLAGS = ("--max-batch-tokens", "64")  # two programs to compile

    @pytest.fixture(autouse=True)
    def _traced_anew(self):
        """Clear JAX's traces, kept by function: a defect must neither miss them nor outlive its
        test."""
        jax.clear_caches()
        yield
        jax.clear_caches()

    @pytest.mark.slow
    def test_beside_torch(self, tiny_model, few_items, capsys):
        backends = "torch:float32,jax:float32"
        assert run(tiny_model("llama")[0], *self.FLAGS, backends=backends) == 0
        shown = capsys.readouterr().out
        assert "ok    jax:float32 against transformers:float32, float32: max |d log p|" in shown
        assert "ok    jax:float32 against torch:float32, float32: max |d log p|" in shown

    @pytest.mark.slow
    def test_a_position_of_its_model_that_is_shifted_fails(
        self, tiny_model, few_items, capsys, monkeypatch
    ):
        tables = jax_model.rotary_tables
        monkeypatch.setattr(jax_model, "rotary_tables", lambda p, cfg: tables(p + (p > 20), cfg))
        assert run(tiny_model("llama")[0], *self.FLAGS, backends="jax:float32") == 1
        assert (
            "FAIL  jax:float32 against transformers:float32, float32: max"
            in capsys.readouterr().out
        )

    def test_another_family_is_refused_before_any_work(self, tiny_model, capsys):
        assert run(tiny_model("gemma2")[0], backends="torch:float32,jax:float32") == 78
        shown = capsys.readouterr()
        assert "jax" in shown.err
        assert not shown.out


class TestGates:
    """Each gate alone, on made-up results: its verdict must not depend on a model."""

    ITEMS = 60

    @pytest.fixture
    def workload(self):
        case = Case("ranked", [5], [[n] for n in range(self.ITEMS)], [[0, 1]] * self.ITEMS)
        return Workload("made up", 0, 1, 60, 9, (case,))

    def made(self, values, dtype, alone=0.0, deterministic=False):
        results = {"ranked": CaseResult(values, np.minimum(np.exp(values).sum(axis=1), 1.0))}
        return Run(f"made:{dtype}", dtype, results, Errors(*[alone] * 4), deterministic)

    @pytest.fixture
    def exact(self):
        return -10 + np.random.default_rng(0).normal(size=(self.ITEMS, 2))

    @pytest.fixture
    def noise(self):
        return 0.01 * np.random.default_rng(1).uniform(-1, 1, (self.ITEMS, 2))

    def failed(self, verdicts):
        return {verdict.gate for verdict in verdicts if verdict.failed}

    def judged(self, workload, exact, noise, values, dtype="bfloat16", alone=0.0):
        rounded = None if dtype == "float32" else self.made(exact + noise, dtype)
        got = self.made(values, dtype, alone)
        return self.failed(judge(workload, self.made(exact, "float32"), rounded, got)[1])

    def test_relative(self, workload, exact, noise):
        assert not self.judged(workload, exact, noise, exact + 1.49 * noise)
        outlier = noise.copy()
        outlier[3, 0] = 1.6 * np.abs(noise).max()
        assert self.judged(workload, exact, noise, exact + outlier) == {"relative"}, "the maximum"
        often = np.sign(noise) * 1.6 * np.median(np.abs(noise))
        assert self.judged(workload, exact, noise, exact + often) == {"relative"}, "the median"

    def test_float32(self, workload, exact, noise):
        assert not self.judged(workload, exact, noise, exact + 0.009 * noise, "float32")
        shifted = exact.copy()
        shifted[7, 1] += 1.1e-4
        assert self.judged(workload, exact, noise, shifted, "float32") == {"float32"}
        shifted[7, 1] = np.nan
        assert "float32" in self.judged(workload, exact, noise, shifted, "float32")

    @pytest.mark.parametrize("planted", [0.1, -1e-5, np.nan])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
    def test_a_label_mass_that_is_not_the_labels_sum(self, workload, exact, noise, dtype, planted):
        right, rounded = self.made(exact, "float32"), self.made(exact + noise, "bfloat16")
        run = self.made(exact, "float32" if dtype == "int8" else dtype)
        if dtype == "int8":
            run = dataclasses.replace(run, precision="int8")
        assert not self.failed(judge(workload, right, rounded, run)[1])
        run.results["ranked"].mass[3] += planted
        assert self.failed(judge(workload, right, rounded, run)[1]) == {"label mass"}
        assert "label mass" in self.failed(judge_pair(workload, right, run)[1])
        assert "label mass" in self.failed(judge_pair(workload, run, right)[1])

    @pytest.mark.parametrize(("noise", "failed"), [(0.05, set()), (0.5, {"eight bits"})])
    def test_eight_bits_may_err_more(self, workload, exact, noise, failed):
        moved = exact + noise * np.random.default_rng(0).uniform(-1, 1, exact.shape)
        run = dataclasses.replace(self.made(moved, "float32"), precision="int8")
        verdicts = judge(workload, self.made(exact, "float32"), None, run)[1]
        assert self.failed(verdicts) & {"eight bits", "float32", "absolute"} == failed

    def test_rank_is_about_clear_pairs(self, workload, exact, noise):
        """An error of 0.015 is allowed: items 0.025 apart may swap, items 0.3 apart may not."""
        order = np.argsort(exact[:, 0])
        for gap, expected in ((0.025, set()), (0.3, {"rank"})):
            spread = exact.copy()
            spread[order, 0] = np.linspace(-20, -10, self.ITEMS)
            spread[order[-1], 0] = spread[order[-2], 0] + gap
            swapped = spread.copy()
            swapped[order[-2:], 0] = spread[order[-2:][::-1], 0]
            judgement = self.judged(workload, spread, noise, swapped)
            assert judgement - {"relative"} == expected

    def test_items_of_one_prompt_are_ranked_once(self, exact, noise):
        """Libraries round them differently in different places, so no order is the right one."""
        case = Case("ranked", [5], [[n // 2] for n in range(60)], [[0, 1]] * 60)
        workload = Workload("made up", 0, 1, 60, 9, (case,))
        twins = np.repeat(np.linspace(-20, -10, 30), 2)[:, None] + np.zeros(2)
        got = twins.copy()
        got[::2] += 5e-5
        assert not self.judged(workload, twins, noise, got, "float32")

    def test_near_ties_are_nobodys_fault(self, workload, exact, noise):
        """A few pairs nearer than the allowed noise may swap, but not nearly all of them."""
        spread = np.repeat(np.linspace(-20, -10, 60)[:, None], 2, axis=1)
        spread[1::2] = spread[::2] + 5e-5
        for count, expected in ((6, set()), (29, {"tau-b"})):
            swapped = spread.copy()
            for row in range(0, 2 * count, 2):
                swapped[[row, row + 1]] = spread[[row + 1, row]]
            assert self.judged(workload, spread, noise, swapped, "float32") == expected

    def test_order_as_a_whole(self, workload, exact, noise):
        judgement = self.judged(workload, exact, noise, exact[::-1])
        assert judgement == {"relative", "rank", "tau-b"}

    def test_a_gate_that_cannot_judge_says_why(self, workload, exact):
        near = -10 + 1e-6 * (exact + 10)
        run = dataclasses.replace(self.made(near, "float32"), alone=None)
        verdicts = judge(workload, self.made(near, "float32"), None, run)[1]
        said = {verdict.gate: verdict.detail for verdict in verdicts if verdict.passed is None}
        assert said.keys() == {"rank", "tau-b", "packing"}
        assert all(detail.startswith("skipped, because ") for detail in said.values())
        assert "no two items of a ranking are over 2.0e-04 apart" in said["rank"]
        assert "the allowed noise hides the order of all 2 rankings" in said["tau-b"]
        few = Workload("made up", 0, 1, 60, 9, (Case("few", [5], [[1]], [[0, 1]]),))
        few_run = dataclasses.replace(run, results={"few": CaseResult(near[:1], None)})
        said = {verdict.gate: verdict.detail for verdict in judge_pair(few, few_run, few_run)[1]}
        assert "no request ranks 10 different items" in said["tau-b"]

    def test_packing(self, workload, exact, noise):
        assert not self.judged(workload, exact, noise, exact, alone=0.1)
        assert self.judged(workload, exact, noise, exact, alone=0.2) == {"packing"}
        assert self.judged(workload, exact, noise, exact, "float32", 2e-4) == {"packing"}
        same_bits = self.made(exact, "float32", 1e-9, deterministic=True)
        verdicts = judge(workload, self.made(exact, "float32"), None, same_bits)[1]
        assert self.failed(verdicts) == {"packing"}

    @pytest.mark.parametrize(
        ("dtypes", "change", "expected"),
        [
            (("bfloat16", "bfloat16"), 0.0, set()),
            (("bfloat16", "bfloat16"), 0.4, set()),
            (("bfloat16", "bfloat16"), 0.6, {"absolute"}),  # above the p99 limit for all
            (("float32", "float32"), 2e-4, {"float32"}),
            (("bfloat16", "float32"), 0.4, set()),
        ],
    )
    def test_pairs(self, workload, exact, dtypes, change, expected):
        runs = self.made(exact, dtypes[0]), self.made(exact + change, dtypes[1])
        found, verdicts = judge_pair(workload, *runs)
        assert self.failed(verdicts) == expected
        if "float32" in dtypes:
            assert found.reference.dtype == "float32", "the more exact one counts as right"

    def test_probabilities_have_a_limit_of_their_own(self, workload, exact):
        likely = np.minimum(exact + 9.9, -0.01)  # 0.04 is a large error for a probability near 1
        runs = self.made(likely, "bfloat16"), self.made(likely - 0.04, "bfloat16")
        assert self.failed(judge_pair(workload, *runs)[1]) == {"absolute"}


class TestCommandLine:
    @pytest.mark.parametrize(
        ("backends", "message"),
        [
            ("torch", "is not framework:dtype[:attention]"),
            ("torch:int4", "dtype 'int4'; there are float32, bfloat16, float16, w8a16"),
            ("mlx:float32", "backend 'mlx'; there are torch, jax"),
            ("torch:float32,", "is not framework:dtype"),
            ("torch:float32:fast", "asks for attention 'fast'"),
            ("jax:float32@cloud", "asks for device 'cloud'"),
            ("torch:float32@", "asks for device ''"),
            ("torch:float32:a:b", "is not framework:dtype"),
            ("torch:float32,torch:float32", "names a backend twice"),
            ("torch:float32:flashinfer", "flashinfer"),  # it cannot run on a CPU
            # One of them needs a TPU; the other one is planned on the CPU first.
            ("torch:float32@cpu,jax:float32@tpu", "--device tpu"),
        ],
    )
    def test_wrong_backends(self, backends, message, capsys):
        assert run("demo", backends=backends) == 78
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--seed", "-1"), "--seed -1 must be from 0"),
            (("--seed", str(2**32)), f"--seed {2**32} must be from 0"),
            (("--workload", "text", "--seed", "1"), "--seed 1 draws token ids"),
            (("--dtype", "bfloat16"), "--dtype is set beside --backends"),
        ],
    )
    def test_wrong_flags(self, flags, message, capsys):
        assert run("demo", *flags) == 78
        assert message in capsys.readouterr().err

    def test_every_size_can_be_asked_for(self):
        assert set(arguments.SIZES) == {*workloads.SIZES, workloads.TEXT, workloads.SAMPLE}

    def test_backends(self):
        config = configured("torch:bfloat16:triton", ModelConfig(model="demo", threads=3))
        assert (config.dtype, config.attention, config.threads) == ("bfloat16", "triton", 3)
        assert configured("jax:bfloat16:pallas@tpu", ModelConfig(device="cpu")).device == "tpu"
        config = configured("jax:w8a16", ModelConfig(device="cpu", dtype="float32"))
        assert (config.backend, config.device) == ("jax", "cpu")
        assert (config.dtype, config.quantization) == ("auto", "w8a16")

    def test_a_framework_that_is_not_there(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "jax", None)
        assert run("demo", backends="torch:float32,jax:float32") == 78
        assert "pip install 'jax<" in capsys.readouterr().err

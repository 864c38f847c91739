"""Promise: bundles of several machines are held to the oracle's bundles as `parity run` holds
backends, every pair can be seen, and no gate passes or vanishes in silence."""

import re
from pathlib import Path

import numpy as np
import pytest

from gpuscore.commands.cli import main
from gpuscore.measure.bundle import Bundle, read_bundle, write_bundle
from gpuscore.measure.results import CaseResult, Fingerprint, Measured
from gpuscore.measure.workload import Case, Workload
from gpuscore.system.machine import versions

ITEMS = 40
WORKLOAD = Workload(
    "made up",
    0,
    60,
    9,
    tuple(
        Case(f"query {query}", [query], [[5, n] for n in range(ITEMS)], [[0, 1]] * ITEMS)
        for query in range(6)
    ),
)
MODEL = Fingerprint("w" * 64, "c" * 64, None)


def made(name, dtype, noise, seed, precision="full"):
    """Return scores whose log p are one model's plus noise."""
    exact, rounding = np.random.default_rng(0), np.random.default_rng(seed)
    results = {}
    for case in WORKLOAD.cases:
        values = -10 + exact.normal(size=(ITEMS, 2))
        values = values + noise * rounding.normal(size=(ITEMS, 2))
        results[case.name] = CaseResult(values, np.exp(values).sum(axis=1))
    return Measured(
        *(name, "demo", dtype),
        workload=WORKLOAD,
        results=results,
        alone=0.0,
        precision=precision,
        digests=MODEL,
    )


def write(name, scored):
    write_bundle(Path(name), Bundle({}, (scored,)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, scored in {
        "exact": made("transformers:float32", "float32", 0.0, 1),
        "rounded": made("transformers:bfloat16", "bfloat16", 0.02, 2),
        "gpu": made("torch:bfloat16", "bfloat16", 0.02, 3),
        "tpu": made("jax:bfloat16", "bfloat16", 0.025, 4),
        "bad": made("jax:bfloat16", "bfloat16", 0.06, 5),
        "float32": made("torch:float32", "float32", 1e-6, 6),
        "int8": made("torch:int8", "float32", 0.01, 7, precision="int8"),
    }.items():
        write(name, scored)


def compare(*words):
    return main(["parity", "compare", *words])


REFERENCE = ("--reference", "exact", "rounded")


def states(shown, subject):
    """Return the words that stand before the gates of a run."""
    return {
        line.split(", ", 1)[1].split(":")[0]: line[:4].strip()
        for line in shown.splitlines()
        if line[6:].startswith(f"{subject}, ")
    }


@pytest.mark.usefixtures("folder")
class TestReference:
    def test_a_gpu_and_a_tpu_are_held_to_the_relative_gate(self, capsys):
        assert compare("gpu", "tpu", "float32", *REFERENCE, "--report", "page.html") == 0
        shown = capsys.readouterr().out
        gates = {"relative", "rank", "label mass", "packing"}
        assert states(shown, "gpu") == dict.fromkeys(gates, "ok")
        assert states(shown, "tpu") == dict.fromkeys(gates, "ok")
        assert states(shown, "float32 against exact")["float32"] == "ok"
        assert "absolute" not in shown, "a pair in bfloat16 has no gate of its own then"
        text = Path("page.html").read_text(encoding="utf-8")
        for part in ("rounded", "tau-b", "inversions", "1.5 times transformers"):
            assert part in text

    def test_twice_the_noise_of_the_oracle_fails(self, capsys):
        assert compare("gpu", "bad", *REFERENCE) == 1
        shown = capsys.readouterr().out
        assert states(shown, "bad")["relative"] == "FAIL"
        assert states(shown, "gpu")["relative"] == "ok"

    def test_one_bundle_is_enough(self):
        assert compare("gpu", *REFERENCE) == 0

    def test_one_reference_counts_as_right(self, capsys):
        """Without transformers' own error in the format, the limits of a pair hold."""
        assert compare("gpu", "--reference", "exact") == 0
        assert states(capsys.readouterr().out, "gpu against exact")["absolute"] == "ok"

    def test_eight_bits_and_float32_need_no_rounded_one(self, capsys):
        assert compare("float32", "int8", "--reference", "exact") == 0
        outcomes = states(capsys.readouterr().out, "int8 against exact")
        assert outcomes["eight bits"] == "ok"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("gpu", "--reference", "exact", "float32"), "at most one for each other dtype"),
            (("gpu", "--reference", "int8", "rounded"), "without quantization"),
            (("gpu",), "nothing to compare with"),
        ],
    )
    def test_a_reference_that_is_none(self, words, message, capsys):
        assert compare(*words) == 78
        shown = capsys.readouterr()
        assert message in shown.err
        assert "ok  " not in shown.out


@pytest.mark.usefixtures("folder")
class TestMatrix:
    def test_every_pair_is_shown_and_judged(self, capsys):
        assert compare("gpu", "tpu", "float32") == 0
        shown = capsys.readouterr().out
        for pair in ("tpu against gpu", "gpu against float32", "tpu against float32"):
            assert states(shown, pair)["absolute"] == "ok"
            assert re.search(rf"\n{pair.replace(' against ', ' +')} +[4-9]\.\de-02", shown)


class TestRecord:
    WORDS = ("--workload", "quick", "--threads", "1", "--device", "cpu")

    def test_the_oracle_writes_a_bundle(self, tiny_model, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("gpuscore.measure.workload.MANY", 24)
        monkeypatch.setattr("gpuscore.measure.workload.QUERIES", 2)
        model = str(tiny_model("llama")[0])
        for name, *flags in (
            ("exact", "--oracle", "--dtype", "float32"),
            ("rounded", "--oracle", "--dtype", "bfloat16"),
            ("own", "--dtype", "bfloat16", "--max-batch-tokens", "512"),
        ):
            words = ["parity", "record", model, *self.WORDS, "-o", str(tmp_path / name), *flags]
            assert main(words) == 0
        (scored,) = read_bundle(tmp_path / "rounded").servers
        assert (scored.name, scored.alone) == ("transformers:bfloat16", None)
        assert scored.facts["device"] == "cpu"
        monkeypatch.chdir(tmp_path)
        assert compare("own", *REFERENCE) == 0
        assert "own, relative: 1.5 times transformers'" in capsys.readouterr().out

    @pytest.mark.parametrize("flag", [("--backend", "jax"), ("--attention", "torch")])
    def test_flags_of_backends_are_refused_beside_it(self, flag, capsys, tmp_path):
        output = str(tmp_path / "a")
        assert main(["parity", "record", "demo", "-o", output, "--oracle", *flag]) == 78
        assert f"{flag[0]} is set beside --oracle" in capsys.readouterr().err


def test_the_version_of_libtpu_is_recorded(monkeypatch, tmp_path):
    """Its metadata is enough: the package itself needs a TPU to be of use."""
    assert versions().get("libtpu") != "9.9.9"
    metadata = tmp_path / "libtpu-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 9.9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions()["libtpu"] == "9.9.9"

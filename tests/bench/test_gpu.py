"""Promise: the sections of `make gpu-day` reject wrong results. Here they run on a CPU, where their
figures mean nothing."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import gpu_sections
from gpu_work import TRIAL, sustained
from oracle import judge


def run(folder, *names):
    """Run sections; return the exit code and the findings of each."""
    codes = [gpu_sections.main(str(folder), name, str(folder), "cpu") for name in names]
    return codes, [json.loads((folder / f"{name}.json").read_text()) for name in names]


def test_nothing_is_timed_without_a_reference_or_with_wrong_scores(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_sections, "TRIAL", {name: TRIAL[name] for name in ("a", "d")})
    codes, (ceilings,) = run(tmp_path, "ceilings")
    assert codes == [0]
    assert list(ceilings["floors"]) == ["a", "d"]
    with np.load(tmp_path / "tiny.npz") as kept:
        arrays = dict(kept)
    (tmp_path / "tiny.npz").unlink()
    codes, (found,) = run(tmp_path, "triton")
    assert codes == [1]
    rows = [row for row in found["rows"] if "load" not in row["scorer"]]
    assert {row["scorer"] for row in rows} == {"triton", "triton, engine"}
    assert all("there is no reference" in row["failed"] for row in rows)
    shifted = {name: arrays[name] + 0.5 * name.startswith("d/") for name in arrays}
    np.savez(tmp_path / "tiny.npz", **shifted)
    codes, (found,) = run(tmp_path, "triton")
    assert codes == [1]
    for row in (row for row in found["rows"] if "load" not in row["scorer"]):
        timed = {"ms", "items/s"} & row.keys()
        assert bool(timed) != (row["workload"] == "d"), row
        assert row.get("wrong", False) == (row["workload"] == "d")


@pytest.mark.slow
def test_linear_layers_have_a_reference_of_their_own(tmp_path):
    codes, (_, hybrid) = run(tmp_path, "ceilings", "hybrid")
    assert codes == [0] * 2
    assert [row["workload"] for row in hybrid["rows"]] == ["a", "300", "a", "a", "300"]


@pytest.mark.parametrize("defect", ["an item off", "all a little off", "not a number"])
def test_wrong_results_are_seen(defect):
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(80, 2))
    theirs = exact + rng.normal(scale=0.01, size=exact.shape)
    got = exact + rng.normal(scale=0.01, size=exact.shape)
    assert judge(got, exact, theirs)[0]
    if defect == "an item off":
        got[7, 0] += 0.1
    elif defect == "all a little off":
        got += 0.03
    else:
        got[0, 0] = np.nan
    assert not judge(got, exact, theirs)[0]


def test_load_is_timed_after_its_first_third():
    waited = []
    row = sustained(lambda: lambda: waited.append(1), seconds=0.3, on_cuda=False)
    assert row["launches"] < len(waited)
    assert row["ms"] * row["launches"] == pytest.approx(200, rel=0.2)


def test_the_card_is_asked_while_it_works(tmp_path, monkeypatch):
    card, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    card.write_text(f"#!/bin/sh\necho $* > {asked}\nsleep 1\necho '1455 MHz, 692.1 W, 58'\n")
    card.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    start = time.monotonic()
    row = sustained(lambda: lambda: time.sleep(0.01), seconds=0.3, on_cuda=True)
    assert row["sensors"] == "1455 MHz, 692.1 W, 58"
    assert "clocks.sm,power.draw" in asked.read_text()
    assert row["launches"] * row["ms"] > 900, "the load goes on until the card has answered"
    assert time.monotonic() - start > 1

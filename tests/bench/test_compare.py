"""Promise: `gpuscore bench compare` sets machines side by side with speed, cost and agreement, and
refuses bundles that were changed."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpuscore.commands.cli import main
from gpuscore.measure.bundle import Bundle, read_bundle, write_bundle
from gpuscore.measure.figures import Row, Shot, measured
from gpuscore.measure.intervals import Interval
from gpuscore.measure.rates import against, change_text
from gpuscore.measure.results import CaseResult, Measured
from gpuscore.measure.workload import sample

SHAPE = "100 static + 1,900 + 500 x 20"


def shot(seconds, late=0.0, busy=0.1):
    return Shot(seconds, 500, 10, np.linspace(1.0, 2.0, 10), 0, late, busy)


def bundle(seconds, *, shift=0.0, vocab=2000, dtype="float32", model="demo"):
    """Return a bundle of a server that takes `seconds` and whose log p are shifted by `shift`."""
    workload = sample(vocab)
    rng = np.random.default_rng(3)
    results = {
        case.name: CaseResult(-rng.uniform(1, 9, (len(case.items), 3)) + shift)
        for case in workload.cases
    }
    facts = {"machine": {"cpu": "some CPU"}}
    server = Measured("demo", model, dtype, "score", vocab, facts, workload, results)
    packed = [shot(seconds * f) for f in (1, 1.01, 0.99, 1.02, 0.98, 1)]
    base = [shot(3 * seconds * f) for f in (1, 1.01, 0.99, 1.02, 0.98, 1)]
    rows = (
        measured(Row("rerank", "packed", SHAPE, "demo"), packed),
        measured(Row("rerank", "sequential", SHAPE, "demo"), base),
        Row("rerank", "single", SHAPE, "demo", error="status 400: too many"),
    )
    return Bundle({"created": "today"}, (server,), rows)


def cells(out):
    """Return the cells of printed tables by mode, server and column, all within 120 columns."""
    found, head = {}, []
    for line in out.split("(medians")[0].splitlines():
        parts = re.split(" {2,}", line)
        if parts[0] == "mode":
            head = parts
        elif len(parts) == len(head) > 0:
            assert len(line) <= 120
            row = found.setdefault((parts[0], parts[1]), {})
            row |= dict(zip(head[2:], parts[2:], strict=True))
    return found


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that writes a bundle, and returns its name in the current directory."""
    monkeypatch.chdir(tmp_path)

    def write(name, *args, **words):
        write_bundle(Path(f"{name}.json"), bundle(*args, **words))
        return f"{name}.json"

    return write


def test_times_are_read_as_they_were_written(written):
    assert repr(read_bundle(Path(written("a", 0.5))).rows) == repr(bundle(0.5).rows)


def test_speed_cost_and_agreement(written, capsys):
    fast, slow = written("fast", 0.5), written("slow", 1.0, shift=1e-5)
    prices = ("--price", "fast=3.60/h", "--price", "slow=0.36/h")
    assert main(["bench", "compare", fast, slow, *prices]) == 0
    out = capsys.readouterr().out
    rows = cells(out)
    row = rows["packed", "fast"]
    assert row["items/s"].startswith("1,000")
    assert row["over sequential"].startswith("3.00x")
    cost = ("$ per million items", "items per $")
    assert [row[column] for column in cost] == ["1", "1,000,000"]  # 0.001 $/s / 1,000
    row = rows["packed", "slow"]
    assert row["against fast"].startswith("0.50x")
    assert [row[column] for column in cost] == ["0.2", "5,000,000"]
    assert rows["packed", "TPU v6e, sgl-jax"]["items/s"] == "9.75"
    assert "single, fast: status 400: too many" in out
    assert "ok    slow against fast, float32: max |d log p| 1.0e-05" in out


def test_scores_that_differ_fail(written, capsys):
    assert main(["bench", "compare", written("a", 1.0), written("b", 1.0, shift=0.3)]) == 1
    assert "FAIL  b against a, float32: max |d log p| 3.0e-01" in capsys.readouterr().out


def test_of_other_models_the_times_alone_are_compared(written, capsys):
    small = written("a", 1.0, model="/models/Org/Small")
    assert main(["bench", "compare", small, written("b", 1.0, shift=1.0, model="small")]) == 1
    capsys.readouterr()
    assert main(["bench", "compare", small, written("c", 1.0, shift=1.0, model="other")]) == 0
    out = capsys.readouterr().out
    said = "scores: skipped, because the models are called /models/Org/Small and other"
    assert f"skip  c against a, {said}" in out
    assert cells(out)["packed", "c"]["against a"].startswith("none (")


def test_a_bundle_is_named_by_its_path(written, tmp_path, capsys):
    """The first is twice as fast, at the tenth of the price."""
    for folder, seconds in (("one", 0.5), ("two", 1.0)):
        (tmp_path / folder).mkdir()
        written(f"{folder}/bench", seconds)
    places = ["one/bench.json", "two/bench.json"]
    prices = ("--price", "one/bench=0.36/h", "--price", "two/bench=3.60/h")
    assert main(["bench", "compare", *places, *prices]) == 0
    rows = cells(capsys.readouterr().out)
    assert rows["packed", "one/bench"]["items per $"] == "10,000,000"
    assert rows["packed", "two/bench"]["items per $"] == "500,000"
    assert rows["packed", "two/bench"]["against one/bench"].startswith("0.50x")
    assert main(["bench", "compare", places[0], "two/../one/bench.json"]) == 2
    assert "is given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("price", "said"),
    [
        ("a", "write NAME"),
        ("a=x/h", "write NAME"),
        ("b=1/h", "servers are a"),
        ("a=0", "write NAME"),
    ],
)
def test_prices_that_are_none(price, said, written, capsys):
    assert main(["bench", "compare", written("a", 1.0), "--price", price]) == 2
    assert said in capsys.readouterr().err


def test_pages(written, tmp_path):
    files = [written("a", 1.0), written("b", 2.0)]
    page = tmp_path / "page.html"
    assert main(["bench", "compare", *files, "--report", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<td>cpu some CPU</td>" in text
    assert "<td>packed</td><td>a</td><td>500 (" in text


def test_arrivals_stand_beside_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    row = Row("poisson", "Poisson 70/s", "120 + 10 x 180", "demo")
    row = measured(row, [shot(1.0, late=27.4, busy=0.9)], arrive=True)
    assert row.notes == ("the client took 90% of a core and may be the limit",)
    write_bundle(Path("a.json"), replace(bundle(1.0), rows=(row,)))
    assert main(["bench", "compare", "a.json"]) == 0
    out = capsys.readouterr().out
    rows = cells(out)
    assert rows["Poisson 70/s", "a"]["late ms"] == "27.4"
    # The report on decode gives average, P50, P90 and P99.
    report = rows["Poisson 70/s", "H100, SGLang, prefill plus decode"]
    columns = ("average ms", "P50 ms", "P90 ms", "P99 ms")
    assert [report[column] for column in columns] == ["83.92", "51.77", "114.1", "621.7"]


def test_texts_of_ones_own_have_all_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    row = measured(Row("text", "packed", "3 texts", "demo"), [shot(1.0)])
    write_bundle(Path("a.json"), replace(bundle(1.0), rows=(row,)))
    assert main(["bench", "compare", "a.json"]) == 0
    head = cells(capsys.readouterr().out)["packed", "a"]
    for column in ("items/s", "ms per item", "s for 500", "requests/s", "average ms", "P99 ms"):
        assert column in head


def test_a_difference_within_the_noise_is_none():
    rates = (100.0, 104.0, 97.0, 101.0, 99.0, 103.0)
    row = Row("rerank", "packed", SHAPE, "a", rates=rates)
    same = replace(row, rates=rates[::-1])
    faster = replace(row, rates=tuple(2 * rate for rate in rates))
    assert change_text(against(same, row)).startswith("none (")
    change = against(faster, row)
    assert change.value == pytest.approx(2)
    assert 1 < change.low < 2 < change.high
    assert change_text(change).startswith("2.00x (")
    few = replace(row, rates=rates[:2])
    assert "under 5 repeats" in change_text(against(few, row))
    assert change_text(Interval(float("nan"))) == change_text(None) == "-"


def test_a_part_is_extrapolated_by_the_later_requests():
    """The query takes 9 s, each request 1 s: 500 items are 9 + 16 s, not 4 times a quarter."""
    latencies = np.array([10.0, 1.0, 1.0, 1.0]) * 1e3
    part = Shot(13.0, 4 * 32, 4, latencies, 0, 0.0, 0.1)
    assert part.extrapolated(32, 512).seconds == pytest.approx(9 + 16)
    assert part.extrapolated(32, 512).items == 512
    assert part.extrapolated(32, 512).requests == 16
    assert part.extrapolated(32, 500).requests == 16, "the last one has 20 items"
    row = measured(Row("rerank", "sequential", SHAPE, "demo"), [part.extrapolated(32, 512)])
    assert row.requests_per_second == pytest.approx(16 / 25)

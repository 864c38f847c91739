"""Promise: `make bench-gpu` runs every section and rejects wrong results. Here it runs on a CPU,
where its figures mean nothing."""

import ast
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import gpu_sections
from ceiling import operations
from gpu_day import tables
from gpu_day_stages import found_of
from gpu_reference import Reference, verdict
from gpu_rows import Effort, Rows
from gpu_work import Draws, Goal
from scenarios import Workload

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.measure.bench.random_models import SHAPES

ROOT = Path(__file__).parents[2]
SERVERS = ("fastapi", "httptools", "msgspec", "prometheus_client", "starlette", "uvicorn")


def run(folder, *names):
    """Run sections; return the exit code of each, and their findings."""
    own = ["--device=cpu", "--trial", "--shape=tiny", f"--scratch={folder}", "--", str(folder)]
    codes = [gpu_sections.main([*own, name]) for name in names]
    content = [json.loads(found_of(folder, name).read_text()) for name in names]
    stages = {
        f"bench: {name}": {"found": section} for name, section in zip(names, content, strict=True)
    }
    return codes, {"stages": stages}


def test_some_sections_say_what_they_found_or_why_not(tmp_path):
    codes, day = run(tmp_path, "ceilings", "gpuscore")  # without a reference, nothing is timed
    assert codes == [0, 1]
    floors, shown, _ = tables(day)
    assert [row["floor of"] for row in floors] == ["a", "a cached", "b cached", "d", "300"]
    assert {row["scorer"] for row in shown} == {"gpuscore", "engine"}
    assert all("there is no reference" in row["failed"] for row in shown)


@pytest.mark.slow
def test_every_section_says_what_it_found_or_why_not(tmp_path):
    attention = ("--attention flashinfer",)
    codes, day = run(tmp_path, "ceilings", "reference", "gpuscore", "profile", *attention)
    assert codes == [0] * 6
    stages = {
        name.removeprefix("bench: "): outcome["found"] for name, outcome in day["stages"].items()
    }
    timed = [(row["scorer"], row["workload"]) for row in stages["gpuscore"]["rows"]]
    workloads = ("a", "a cached", "b cached", "d", "300")
    assert timed == [(scorer, w) for scorer in ("gpuscore", "engine") for w in workloads]
    assert all(row["wall ms"] > 0 for row in stages["gpuscore"]["rows"])
    engine = [row for row in stages["gpuscore"]["rows"] if row["scorer"] == "engine"]
    cached = {row["workload"]: row["cached"] for row in engine}
    assert cached["a"] == 0
    assert cached["a cached"] > 150
    for name in attention:
        assert "not installed" in stages[name]["rows"][0]["unavailable"]
    assert stages["profile"]["profile"]["300"][0]["ms"] > 0
    assert len(list(tables(day))[1]) == 12


def test_only_http_needs_the_servers_dependencies():
    seen, outside, waiting = set(), set(), ["gpu_sections"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        places = [
            base / name.replace(".", "/") for base in (ROOT, ROOT / "bench", ROOT / "kernels")
        ]
        files = [p for place in places for p in (place.with_suffix(".py"), place / "__init__.py")]
        source = next((path for path in files if path.is_file()), None)
        if source is None:
            outside.add(name.split(".")[0])
            continue
        waiting += [name.rpartition(".")[0]] if "." in name else []
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                local = (ROOT / node.module.replace(".", "/")).is_dir()
                waiting += [node.module, *(inside if local else [])]
    assert {"torch", "transformers", "tokenizers"} <= outside
    assert not outside & set(SERVERS)


@pytest.mark.parametrize("defect", ["an item off", "all a little off", "not a number"])
def test_wrong_results_are_seen(defect):
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(2, 40, 2))
    theirs = exact + rng.normal(scale=0.01, size=exact.shape)
    got = exact + rng.normal(scale=0.01, size=exact.shape)
    assert verdict([*got], exact, theirs).right
    if defect == "an item off":
        got[1, 7, 0] += 0.1
    elif defect == "all a little off":
        got += 0.03
    else:
        got[0, 0, 0] = np.nan
    assert not verdict([*got], exact, theirs).right


def test_a_wrong_row_is_not_timed_and_fails_the_run(tmp_path, tiny_model):
    directory, _ = tiny_model("qwen3")
    backend = create_backend(plan_backend(directory, ModelConfig(str(directory), max_model_len=64)))
    goal = Goal("d", Workload(12, 3, 5))

    class Shifted(Reference):
        def inputs(self, goal):
            return [Draws(goal.workload, self.vocab, 1).next()]

        def verdict(self, goal, got, slack=1.0):
            exact = np.stack(got) + self.shift
            return verdict(got, exact, exact, slack)

    reference = Shifted(tmp_path / "none", backend.limits.vocab_rows, quick=True)
    kept = []
    rows = Rows((goal,), reference, {"d": {"ms": 1.0}}, Effort(1, 1, 0.1), kept.append)
    for reference.shift in (0.0, 0.5):
        rows.backend("ours", backend, judged=True)
    backend.close()
    right, wrong = kept
    assert right["wall ms"] > 0
    assert not {"wall ms", "device ms", "items/s"} & wrong.keys()
    stages = {"bench: gpuscore": {"status": "failed", "found": {"rows": kept}}}
    _, shown, _ = tables({"stages": stages})
    assert ["WRONG" in row["failed"] for row in shown] == [False, True]


def test_operations_with_a_cache_are_those_without_less_the_queries_own():
    shape, sizes = SHAPES["small"], (300, 7, 11)
    whole, rest = operations(shape, *sizes), operations(shape, *sizes, cached=300)
    alone = operations(shape, 300, 0, 0)
    assert whole["head"] == rest["head"]
    for kind in ("linear", "attention"):
        assert whole[kind] == pytest.approx(rest[kind] + alone[kind])

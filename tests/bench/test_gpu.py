"""Promise: the sections of `make gpu-day` reject wrong results. Here they run on a CPU, where their
figures mean nothing."""

import ast
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import gpu_sections
from ceiling import operations
from gpu_reference import Reference, verdict
from gpu_rows import Effort, Rows, sustained
from gpu_stages import ENGINE
from gpu_work import WORKLOADS, Draws
from random_models import SHAPES
from scenarios import Workload

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig

ROOT = Path(__file__).parents[2]
SERVERS = ("fastapi", "httptools", "prometheus_client", "starlette", "uvicorn")


def run(folder, *names):
    """Run sections; return the exit code and the findings of each."""
    own = ["--device=cpu", "--trial", f"--scratch={folder}"]
    codes = [gpu_sections.main([str(folder), name, *own]) for name in names]
    return codes, [json.loads((folder / f"{name}.json").read_text()) for name in names]


def test_nothing_is_timed_without_a_reference(tmp_path):
    codes, (ceilings,) = run(tmp_path, "ceilings")
    assert codes == [0]
    assert list(ceilings["floors"]) == list(WORKLOADS)
    (tmp_path / "reference.npz").unlink()
    codes, (found,) = run(tmp_path, "triton")
    assert codes == [1]
    rows = {row["scorer"]: row for row in found["rows"] if "load" not in row["scorer"]}
    assert rows.keys() == {"triton", "triton, engine"}
    assert all("there is no reference" in row["failed"] for row in rows.values())


@pytest.mark.slow
def test_linear_layers_have_a_reference_of_their_own(tmp_path):
    codes, (_, hybrid) = run(tmp_path, "ceilings", "hybrid")
    assert codes == [0] * 2
    assert [row["workload"] for row in hybrid["rows"]] == ["a", "300"] * 2
    assert all(row["wall ms"] > 0 for row in hybrid["rows"])


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
    assert {"torch", *ENGINE} <= outside
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


def test_a_wrong_row_is_not_timed(tmp_path, tiny_model):
    directory, _ = tiny_model("qwen3")
    backend = create_backend(plan_backend(directory, ModelConfig(str(directory), max_model_len=64)))

    class Shifted(Reference):
        def inputs(self, workload):
            return [Draws(workload, self.vocab, 1).next()]

        def verdict(self, name, got):
            exact = np.stack(got) + self.shift
            return verdict(got, exact, exact)

    reference = Shifted(tmp_path / "none", backend.limits.vocab_rows, rows=1)
    kept = []
    work = {"d": Workload(12, 3, 5)}
    rows = Rows(work, reference, {"d": {"ms": 1.0}}, Effort(1, 1, 0.1), kept.append)
    for reference.shift in (0.0, 0.5):
        rows.backend("ours", backend)
    backend.close()
    right, wrong = kept
    assert right["wall ms"] > 0
    assert wrong["wrong"]
    assert not {"wall ms", "device ms", "items/s"} & wrong.keys()


def test_load_is_timed_after_its_first_third():
    waited = []
    row = sustained(lambda: lambda: waited.append(1), seconds=0.3, on_cuda=False)
    assert row["launches"] < len(waited)
    assert row["ms"] * row["launches"] == pytest.approx(200, rel=0.2)


def test_operations_with_a_cache_are_those_without_less_the_queries_own():
    shape, sizes = SHAPES["small"], (300, 7, 11)
    whole, rest = operations(shape, *sizes), operations(shape, *sizes, cached=300)
    alone = operations(shape, 300, 0, 0)
    assert whole["head"] == rest["head"]
    for kind in ("linear", "attention"):
        assert whole[kind] == pytest.approx(rest[kind] + alone[kind])

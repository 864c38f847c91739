"""Promise: bench/gpu.py runs every section and rejects wrong results. Here it runs on a CPU, where
its figures mean nothing."""

import ast
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import gpu
import gpu_worker
from ceiling import operations
from gpu_reference import Reference, verdict
from gpu_rows import Effort, Rows
from gpu_state import State
from gpu_work import Draws, Goal
from scenarios import SHAPES, Workload

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT, ROOT / "bench", ROOT / "kernels")
SERVERS = ("fastapi", "httptools", "msgspec", "prometheus_client", "starlette", "uvicorn")
FIELDS = {"machine", "clocks", "ceilings", "floors", "rows", "sections", "commit", "date"}


@pytest.fixture
def without_a_server(monkeypatch):
    for name in SERVERS:
        monkeypatch.setitem(sys.modules, name, None)


def test_some_sections_say_what_they_found_or_why_not(tmp_path, without_a_server):
    asked = ["--device=cpu", "--shape=tiny", "--quick", "--serve", "--sections=ceil;HTTP"]
    state = gpu.start(tmp_path, tmp_path, gpu.arguments([*asked, f"--scratch={tmp_path}"]))
    assert gpu_worker.main(state.path) == gpu.DONE
    sections = State.read(state.path).found["sections"]
    assert sections["HTTP"]["why"].startswith("RuntimeError: SERVE=1 needs the server's")
    assert [about["status"] for about in sections.values()].count("done") == len(sections) - 1


@pytest.mark.slow
def test_every_section_says_what_it_found_or_why_not(tmp_path, without_a_server):
    wanted = "ceil;ref;gpuscore;stages;HTTP;engine;profile;--attention flashinfer"
    asked = ["--device=cpu", "--shape=tiny", "--quick", "--serve", f"--sections={wanted}"]
    state = gpu.start(tmp_path, tmp_path, gpu.arguments([*asked, f"--scratch={tmp_path}"]))
    assert gpu_worker.main(state.path) == gpu.DONE
    state = State.read(state.path)
    found = state.found
    assert found.keys() >= FIELDS
    assert [line.split(": ")[1] for line in state.complaints] == ["RuntimeError"]
    why = found["sections"].pop("HTTP")["why"]
    assert why.startswith("RuntimeError: SERVE=1 needs the server's dependencies")
    assert {about["status"] for about in found["sections"].values()} == {"done"}
    timed = [(row["scorer"], row["workload"]) for row in state.rows if row.get("wall ms", 0) > 0]
    workloads = ("a", "a cached", "b cached", "d", "300")
    assert timed == [(scorer, w) for scorer in ("gpuscore", "engine") for w in workloads]
    cached = {row["workload"]: row["cached"] for row in state.rows if row["scorer"] == "engine"}
    assert cached["a"] == 0
    assert cached["a cached"] > 150
    others = [row for row in state.rows if "unavailable" in row]
    assert ["not installed" in row["unavailable"] for row in others] == [True, True]
    assert found["profile"]["300"][0]["ms"] > 0
    assert state.summary().count("\n") > 20


def test_only_http_needs_the_servers_dependencies():
    seen, outside, waiting = set(), set(), ["gpu_worker"]
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


def test_sections_that_end_their_process_or_hang_lose_only_themselves(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys, time, faulthandler\n"
        f"sys.path[:0] = [{str(ROOT / 'bench')!r}, {str(ROOT)!r}]\n"
        "from pathlib import Path\n"
        "from gpu_state import State\n"
        "state = State.read(Path(sys.argv[1]))\n"
        "for name in ('first', 'killed', 'hangs', 'broken', 'last'):\n"
        "    if name in state.sections: continue\n"
        "    limit = 0.3 if name == 'hangs' else 60\n"
        "    state.begin(name, limit)\n"
        "    if name == 'killed': os.kill(os.getpid(), 9)\n"
        "    if name == 'hangs':\n"
        "        faulthandler.dump_traceback_later(limit, exit=True)\n"
        "        time.sleep(60)\n"
        "    state.end(name, 'failed' if name == 'broken' else 'done')\n"
        "    if name == 'broken': sys.exit(75)\n"
    )
    monkeypatch.setattr(gpu, "WORKER", worker)
    state = gpu.start(tmp_path, tmp_path, gpu.arguments(["--device=cpu"]))
    assert gpu.run_all(state.path) == gpu.DONE
    sections = State.read(state.path).sections
    statuses = {name: about["status"] for name, about in sections.items()}
    died = {"killed": "died", "hangs": "died", "broken": "failed"}
    assert statuses == {"first": "done", **died, "last": "done"}
    assert "-9" in sections["killed"]["why"]
    assert "more than 0 s" in sections["hangs"]["why"]


def test_what_is_cut_by_the_end_of_the_time_is_no_failure(tmp_path):
    late = {"deadline": time.time(), "planned": ["one", "two"], "sections": {}, "rows": []}
    state = State(tmp_path / "state.json", late)
    state.begin("one", 0.0)
    assert state.died(1)
    state.skip_the_rest()
    assert [about["status"] for about in state.sections.values()] == ["skipped", "skipped"]
    assert state.complaints == []


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
    state = State(tmp_path / "state.json", {"sections": {}, "rows": []})
    rows = Rows((goal,), reference, {"d": {"ms": 1.0}}, Effort(1, 1, 0.1), state.add)
    for reference.shift in (0.0, 0.5):
        rows.backend("ours", backend, judged=True)
    backend.close()
    right, wrong = state.rows
    assert right["wall ms"] > 0
    assert not {"wall ms", "device ms", "items/s"} & wrong.keys()
    assert [line for line in state.complaints if "WRONG" in line] == state.complaints
    assert len(state.complaints) == 1


def test_operations_with_a_cache_are_those_without_less_the_queries_own():
    shape, sizes = SHAPES["small"], (300, 7, 11)
    whole, rest = operations(shape, *sizes), operations(shape, *sizes, cached=300)
    alone = operations(shape, 300, 0, 0)
    assert whole["head"] == rest["head"]
    for kind in ("linear", "attention"):
        assert whole[kind] == pytest.approx(rest[kind] + alone[kind])

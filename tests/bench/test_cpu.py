"""Promise: `make bench-cpu` gives vLLM all CPUs and the libraries that its guide asks for, says so,
times both of its ways to score, and counts the CPU-seconds of all its processes.

vLLM itself is not installed here: a module of its name answers in its place.
"""

import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import peer
from peer import KINDS, Peer
from scenarios import WORKLOADS
from spent import spent
from vllm_setup import BINDING, PRELOAD, cpus, vllm_setup

BURN = "import time\nwhile time.process_time() < {}: pass\n"
STUB = '''
import os, subprocess, sys
from importlib.util import find_spec
from types import SimpleNamespace

assert find_spec("kernels") is None, "a file of bench/ stands for a package"
BINDING = "VLLM_CPU_OMP_THREADS_BIND"

class SamplingParams:
    def __init__(self, **options):
        self.labels = options["logprob_token_ids"]

class LLM:
    """Computes in another process, as vLLM does; answers with its environment."""

    def __init__(self, model, **options):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.engine = subprocess.Popen([sys.executable, "-c", ENGINE], text=True, **pipes)
        self.calls = 0

    def reset_prefix_cache(self):
        self.calls = 0
        return True

    def generate(self, prompts, params, use_tqdm):
        self.calls += 1
        self.engine.stdin.write("go\\n")
        self.engine.stdin.flush()
        self.engine.stdout.readline()
        assert int(os.environ["OMP_NUM_THREADS"]) == len(os.environ[BINDING].split(","))
        return [self.output(prompt["prompt_token_ids"], params.labels) for prompt in prompts]

    def output(self, prompt, labels):
        """Answer with the number of calls since the cache was emptied, and the prompt's sum."""
        values = dict(zip(labels, (self.calls, sum(prompt))))
        row = {label: SimpleNamespace(logprob=value) for label, value in values.items()}
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[row])])

ENGINE = """
import sys, time
for _ in sys.stdin:
    end = time.process_time() + 0.1
    while time.process_time() < end: pass
    print("done", flush=True)
"""
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a virtual environment with libiomp5, which is an empty file."""
    folder = tmp_path_factory.mktemp("vllm")
    venv.create(folder)
    (folder / "lib" / "libiomp5.so").touch()
    return folder / "bin" / "python"


@pytest.fixture
def system(tmp_path):
    folder = tmp_path / "lib" / "somewhere"
    folder.mkdir(parents=True)
    (folder / "libtcmalloc_minimal.so.4").touch()
    return tmp_path / "lib"


def test_vllm_gets_all_cpus_and_libraries(python, system):
    every = sorted(os.sched_getaffinity(0))
    setup = vllm_setup(python, len(every), {"A": "b"}, [system])
    tcmalloc = system / "somewhere" / "libtcmalloc_minimal.so.4"
    libiomp = python.parents[1] / "lib" / "libiomp5.so"
    names = ",".join(map(str, every))
    assert setup.environment == {
        "A": "b",
        BINDING: names,
        "OMP_NUM_THREADS": str(len(every)),
        PRELOAD: f"{tcmalloc}:{libiomp}",
    }
    assert setup.about == f"vLLM: threads on CPUs {names}; preloaded: {tcmalloc}; {libiomp}"


def test_what_the_environment_says_is_left_alone(python, system):
    given = {BINDING: "0-1", PRELOAD: "/x/libtcmalloc.so.4 /x/libother.so"}
    setup = vllm_setup(python, 1, given, [system])
    libiomp = python.parents[1] / "lib" / "libiomp5.so"
    assert setup.environment[BINDING] == "0-1"
    assert setup.environment[PRELOAD] == f"{libiomp}:/x/libtcmalloc.so.4:/x/libother.so"
    assert setup.about.endswith(f"CPUs 0-1; preloaded: /x/libtcmalloc.so.4; {libiomp}")


def test_a_library_that_is_missing_is_named(python, tmp_path):
    setup = vllm_setup(python, 1, {}, [tmp_path / "nothing"])
    assert "no libtcmalloc, which would make it faster: install libtcmalloc-minimal4" in setup.about


def test_threads_go_to_different_cores_first(tmp_path, monkeypatch):
    """A second CPU of one core is used only where there are more threads than cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu in range(4):
        file = tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text("0-1\n" if cpu < 2 else "2-3\n")
    assert cpus(1, tmp_path) == [0]
    assert cpus(2, tmp_path) == [0, 2]
    assert cpus(3, tmp_path) == [0, 1, 2]
    with pytest.raises(ValueError, match="5 threads on 4 CPUs"):
        cpus(5, tmp_path)


def test_cpu_seconds_of_a_child_that_goes_on():
    code = "input()\n" + BURN.format(0.3) + "time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)

    def wait():
        child.stdin.write(b"\n")  # it must not begin before it is measured
        child.stdin.flush()
        deadline = time.monotonic() + 30
        while spent_by(child.pid) < 0.2 and time.monotonic() < deadline:
            time.sleep(0.02)

    taken = spent(wait)
    child.kill()
    child.communicate()
    assert 0.15 < taken.cpu < 5


def spent_by(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_the_run_of_vllm(python, tmp_path, monkeypatch, capsys):
    """Answers come back in order, with wall time and the CPU-seconds of its engine's process."""
    (site,) = (python.parents[1] / "lib").glob("python*/site-packages")
    (site / "vllm.py").write_text(STUB)
    monkeypatch.setattr(peer, "vllm_setup", lambda *of: vllm_setup(*of, {}, [tmp_path]))
    monkeypatch.setattr("vllm_setup.LIBRARIES", {"libtcmalloc": ("none",)})
    settings = {"model": str(tmp_path), "dtype": "float32", "threads": 1, "longest": 3}
    requests = [([1, 2], [[3], [4], [5]]), ([1], [[2]])]
    (kind,) = KINDS["vllm"]
    with kind.start(python, settings) as vllm:
        first, at_once = vllm.rows.values()
        for way, calls in ((first, (2, 4)), (at_once, (1, 2)), (at_once, (1, 2))):
            results, taken = vllm.score(requests, way)
            want = [[[calls[0], 6], [calls[0], 7], [calls[0], 8]], [[calls[1], 3]]]
            assert [rows.tolist() for rows in results] == want
            assert 0.08 * calls[1] < taken.cpu < 5, taken
            assert taken.wall > 0.08 * calls[1], taken
    assert "preloaded: no libtcmalloc" in capsys.readouterr().out


def test_an_engine_that_ends_is_named(python, tmp_path):
    """The error names the script and the exit code, and nothing waits for an answer."""
    raised = pytest.raises(RuntimeError, match=r"vllm_cpu.py ended with exit code 1")
    with Peer("vllm_cpu.py", Path(sys.executable), {}, {"": ""}) as broken, raised:
        broken.score([([1], [[2]])])


def test_queries_of_workloads_with_one_seed_begin_differently():
    """Or the first workload's query would be the cached prefix of the next one's."""
    begins = [str(workload.draw(1000)[0][:4]) for workload in WORKLOADS.values()]
    assert len(set(begins)) == len(begins)


def test_requests_of_a_workload_differ():
    requests = WORKLOADS["separate"].draw_all(1000)
    assert [(len(query), *map(len, items)) for query, items in requests] == [
        (120, *[180] * 10)
    ] * 10
    texts = [str(part) for query, items in requests for part in (query, *items)]
    assert len(set(texts)) == len(texts)
    assert WORKLOADS["separate"].draw(1000) == requests[0]
    assert str(WORKLOADS["separate"]) == "10 requests of 120 + 10 x 180"

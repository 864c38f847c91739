"""Promise: running out of memory or disk fails the request that needed it, not the server.

A real model runs in a real process: the kernel refuses, nothing is simulated.
"""

import json
import os
import resource
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.connections import canary, check_error, connected, large_request, metric, retry_after
from support.serving import children, serving, wait_until
from support.watched_server import samples_of

MIB = 2**20
JSON = {"content-type": "application/json"}
FLAGS = ("--threads", "1", "--kv-cache-size", "16MiB")
# glibc takes each tensor's memory from the kernel, which can refuse it, not from what was freed.
FROM_KERNEL = {"MALLOC_MMAP_THRESHOLD_": "65536"}
CGROUPS = (  # version 2, then 1: the folder to create groups in, and the file that limits memory
    ("/sys/fs/cgroup", "memory.max"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
)
pytestmark = pytest.mark.hostile


def ask(client, body):
    return client.post("/v1/score", content=body, headers=JSON)


def address_space(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def limit(pid, spare):
    """Let a process take at most `spare` more bytes of memory than now; None removes the limit."""
    most = resource.RLIM_INFINITY if spare is None else address_space(pid) + spare
    resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def scores(reply):
    assert reply.status_code == 200, reply.text
    return json.loads(reply.content)["scores"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    log = tmp_path_factory.mktemp("limits") / "log"
    with (
        serving(
            "demo",
            *FLAGS,
            "--max-batch-tokens",
            "16384",
            environment=FROM_KERNEL,
            log=log,
            fork=False,
        ) as server,
        connected(server) as client,
    ):
        yield server, client


def test_a_batch_that_the_engine_has_no_memory_for_is_halved(served):
    server, client = served
    (pid,) = children(server.process.pid)
    said, body = canary(client), large_request(20_000, return_label_logprobs=True)
    right = json.loads(ask(client, body).content)["label_logprobs"]
    limit(pid, 32 * MIB)
    try:
        logprobs = json.loads(ask(client, body).content)["label_logprobs"]
    finally:
        limit(pid, None)
    wait_until(lambda: metric_of(client, "retried") >= 1)  # a heartbeat brings it
    for (before,), (other,) in zip(right, logprobs, strict=True):
        assert before == pytest.approx(other, abs=2e-4)
    assert canary(client) == said
    assert children(server.process.pid) == [pid]


def test_a_request_that_does_not_fit_at_all_fails_alone(served):
    """One item of 4,000 tokens cannot be split below a page; small requests beside it are
    answered."""
    server, client = served
    (pid,) = children(server.process.pid)
    said = canary(client)
    item = [[(7 * n) % 500 for n in range(4000)]]
    body = json.dumps({"items": item, "label_token_ids": [3]}).encode()
    limit(pid, -256 * MIB)  # below what it already uses: every new block is refused
    try:
        check_error(ask(client, body), 503, "insufficient_memory", None)
    finally:
        limit(pid, None)
    wait_until(lambda: metric_of(client, "failed") >= 1)  # a heartbeat brings it
    assert canary(client) == said
    assert scores(ask(client, body))
    assert children(server.process.pid) == [pid]


def metric_of(client, outcome):
    return samples_of(client)["gpuscore_oom_total", (("outcome", outcome),)]


@contextmanager
def memory_group(pid, spare):
    """Put the process in a control group in which it is killed when it takes `spare` more bytes."""
    for folder, name in CGROUPS:
        group = Path(folder, f"gpuscore-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if not (group / name).exists():  # no control groups here, or none that limit memory
            group.rmdir()
            continue
        try:
            (group / name).write_text(str(spare))
            (group / "cgroup.procs").write_text(str(pid))
            yield
            return
        except OSError:
            continue
        finally:
            wait_until(lambda g=group: removed(g), seconds=10)
    pytest.skip("control groups of memory cannot be made here: needs root and a writable hierarchy")


def removed(group):
    try:
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()
    except OSError:
        return False
    return True


def test_an_engine_that_the_kernel_kills_for_memory_is_started_again(served):
    server, client = served
    (pid,) = children(server.process.pid)
    said, restarts = canary(client), metric(client, "engine_restarts_total")
    with memory_group(pid, MIB):
        # Memory that the engine keeps from earlier requests may do for the first of these.
        replies = (ask(client, large_request(30_000 * n)) for n in range(2, 8))
        lost = next(reply for reply in replies if reply.status_code != 200)
    check_error(lost, 503, "unavailable", None)
    assert 1 <= retry_after(lost) <= 30
    wait_until(lambda: client.get("/ready").status_code == 200, seconds=60)
    assert metric(client, "engine_restarts_total") == restarts + 1
    assert children(server.process.pid) != [pid]
    assert canary(client) == said


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(command, capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("a small file system cannot be mounted: needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=20, check=True)


def test_a_log_on_a_full_disk(small_disk):
    """Lines are dropped and counted; when there is room again, each line is whole."""
    filler, log = small_disk / "filler", small_disk / "log"
    filler.write_bytes(bytes(40_000))
    with serving("demo", *FLAGS, log=log, fork=False) as server, connected(server) as client:
        said = canary(client)
        wait_until(lambda: canary(client) == said and dropped(client) > 0, seconds=60)
        filler.unlink()
        before = dropped(client)
        for _ in range(20):
            assert canary(client) == said
        wait_until(lambda: log.read_bytes().endswith(b"\n"))
        assert dropped(client) == before
        torn = [line for line in log.read_text().splitlines() if not whole(line)]
    assert len(torn) <= 2, torn


def dropped(client):
    return metric(client, "log_lines_dropped_total")


def whole(line):
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def test_a_compile_cache_on_a_full_disk(small_disk, tmp_path):
    """Programs are compiled all the same, and a half-written file misleads no later start."""
    (small_disk / "filler").write_bytes(bytes(60_000))
    flags = ("--backend", "jax", *FLAGS[2:])
    flags += ("--max-batch-tokens", "64", "--max-model-len", "64")
    answers = []
    for start in ("full", "room again"):
        log = tmp_path / start
        kept = {"JAX_COMPILATION_CACHE_DIR": str(small_disk)}
        with (
            serving("demo", *flags, environment=kept, log=log, fork=False) as server,
            connected(server) as client,
        ):
            answers.append(canary(client))
        assert ("No space left on device" in log.read_text()) is (start == "full")
        (small_disk / "filler").unlink(missing_ok=True)
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True, timeout=20)
    assert answers[0] == answers[1]

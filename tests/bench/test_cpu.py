"""Promise: `make bench-cpu` counts the CPU-seconds of all its processes, and draws requests that
differ."""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from scenarios import WORKLOADS
from spent import spent

BURN = "import time\nwhile time.process_time() < {}: pass\n"


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


def test_queries_of_workloads_with_one_seed_begin_differently():
    """Otherwise the first workload's query would be the cached prefix of the next one's."""
    begins = [str(workload.draw(1000)[0][:4]) for workload in WORKLOADS.values()]
    assert len(set(begins)) == len(begins)


def test_requests_of_a_workload_differ():
    requests = WORKLOADS["separate"].draw_all(1000)
    assert [(len(query), *map(len, items)) for query, items in requests] == [(120, *[180] * 10)] * 4
    texts = [str(part) for query, items in requests for part in (query, *items)]
    assert len(set(texts)) == len(texts)
    assert WORKLOADS["separate"].draw(1000) == requests[0]
    assert str(WORKLOADS["separate"]) == "4 requests of 120 + 10 x 180"

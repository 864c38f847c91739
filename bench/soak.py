"""An hour of `gpuscore bench` against one server that loses engines, with a watch on its memory.

    python -P bench/soak.py --minutes 60

Each round is a bench of concurrent requests, which compares a sample of scores before it times
anything. In every second round of the first half the engine is killed under load. The exit code is
1 if a bench without a kill fails, or if the memory of the server with its engine grows in the
second half. A run of a few minutes fails by memory, because caches and heaps are still filling.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from spent import family

GROWTH = 5.0  # MiB per hour
GPUSCORE = Path(sys.executable).with_name("gpuscore")
SERVE = ("serve", "demo", "--port", "0", "--device", "cpu", "--kv-cache-size", "16MiB")
BENCH = ("bench", "--scenario", "concurrency", "--scale", "0.02", "--minutes", "0.5", "--url")
KILLED = 10.0  # seconds after the start of a round


def memory_mib(server: int) -> float:
    pages = (Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in family(server))
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE") / 2**20


def kill_engine(server: int) -> None:
    for pid in family(server):
        if b"gpuscore.processes.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    hours = parser.parse_args().minutes / 60
    began, failed, memory = time.monotonic(), 0, []
    command = [GPUSCORE, *SERVE, "--no-log-requests"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = next(line for line in server.stdout if "ready on http://" in line)
        url = ready.split("ready on ")[1].split()[0]
        while (passed := (time.monotonic() - began) / 3600) < hours:
            kill = passed < hours / 2 and len(memory) % 2 == 1
            bench = subprocess.Popen([GPUSCORE, *BENCH, url])
            if kill:
                time.sleep(KILLED)
                kill_engine(server.pid)
            failed += bench.wait() != 0 and not kill
            memory.append((passed, memory_mib(server.pid)))
            how = "engine killed" if kill else f"{failed} rounds failed so far"
            print(f"{60 * passed:.0f} min: {memory[-1][1]:.0f} MiB, {how}", flush=True)
        server.terminate()
    late = np.array([row for row in memory if row[0] >= hours / 2])
    slope = float(np.polyfit(*late.T, 1)[0]) if len(late) > 1 else float("inf")
    print(f"memory in the second half: {slope:+.1f} MiB per hour, at most {GROWTH:g}")
    return int(failed > 0 or slope > GROWTH)


if __name__ == "__main__":
    sys.exit(main())

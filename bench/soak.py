"""An hour of mixed traffic, misbehaving callers and faults against one server.

    make soak MINUTES=60                     # the embedded demo model on one thread
    make soak MINUTES=2 ARGS='--rate 10'

Every answer is compared with the answer that the same request got alone at the start. The faults
are kill -9 and SIGSTOP of the engine, every 90 s in the first 40 % of the time, so that the last
engine's memory can be watched; and all the time short pauses of the engine and reloads of the key
file. Writes a page and, without --output, a line to results/. The exit code is 1 if an
answer was wrong, lost or outside of the contract, or if memory, descriptors or threads grew.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from launch import Target, real_server, serving
from report import RESULTS, commit, keep, now
from soak_client import Client, Hostile, drive
from soak_page import Verdict, write_page
from soak_requests import Known, table
from soak_vitals import Process, Sample, counters, engine_of, growth, look

SCRATCH = Path(__file__).parents[1] / "scratch"
VOCAB = 500  # ids below it are the demo model's tokens
KEY = "key-of-the-soak"
FLAGS = ("--threads", "1", "--kv-cache-size", "16MiB")
WARMUP = 10.0  # seconds of the same load, in which threads and connections are made
SETTLE = 11.0  # seconds after which the server has closed idle connections and threads
LOSSES = 90.0  # seconds between lost engines; after five in a minute the server would end
LOSING = 0.4  # share of the time in which engines are lost
PAUSES, HANGUPS = 47.0, 20.0  # seconds between short pauses, and between reloads of the keys
SHORT, LONG = 1.0, 8.0  # seconds of a pause: the server waits, or replaces the engine


class Soak:
    """A server under load, and the measurements of it."""

    def __init__(self, target: Target, keys: Path, options: argparse.Namespace) -> None:
        self.target, self.keys, self.options = target, keys, options
        self.seconds = 60.0 * options.minutes
        self.client = Client(target.address, KEY)
        self.rng = np.random.default_rng(options.seed)
        self.samples: list[Sample] = []
        self.losses: list[tuple[float, str]] = []  # engines that were killed or stopped
        self.faults = 0
        self.began = 0.0
        self._seen = (0, (0.0, 0.0))  # answers and tokens, at the last sample

    async def run(self) -> tuple[list[Process | None], list[Process | None]]:
        """Run the soak; return server and engine at rest, before and after."""
        known = [await self.client.first_answer(request) for request in table(self.rng, VOCAB)]
        large = next(request for request in known if request.kind == "large")
        hostile = Hostile(self.client, large, known[0], np.random.default_rng(self.options.seed))
        await drive(self.client, hostile, known, self.options.rate, WARMUP, self.options.seed + 1)
        before = await self._at_rest()
        self.began = time.monotonic()
        watching = [
            asyncio.create_task(work) for work in (self._sample(), self._lose(), self._annoy())
        ]
        await drive(self.client, hostile, known, self.options.rate, self.seconds, self.options.seed)
        for task in watching:
            task.cancel()
        for done in await asyncio.gather(*watching, return_exceptions=True):
            if isinstance(done, Exception):
                raise done
        await self._ready()
        after = await self._at_rest()
        for request in known:
            await self.client.ask(request)
        self.client.close()
        return before, after

    async def _at_rest(self) -> list[Process | None]:
        self.client.close()
        await asyncio.sleep(SETTLE)
        await self._metrics()  # the server ends idle threads after a request
        self.client.close()
        await asyncio.sleep(0.5)
        engine = engine_of(self.target.pid)
        return [look(self.target.pid), None if engine is None else look(engine)]

    async def _ready(self) -> None:
        """Wait until the server is ready again after the last lost engine."""
        probe = Known("ready", "/ready", b"", 0.0)
        for _ in range(600):
            with suppress(RuntimeError):
                await self.client.first_answer(probe)
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the server was not ready a minute after the load")

    async def _metrics(self) -> str:
        probe = Known("metrics", "/metrics", b"", 0.0)
        return (await self.client.exchange(self.client.wire(probe)))[1].decode()

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(self.options.every)
            text = await self._metrics()
            server, engine = look(self.target.pid), engine_of(self.target.pid)
            if server is None:
                raise RuntimeError("the server is gone")
            self.samples.append(self._of_the_period(server, engine and look(engine), text))

    def _of_the_period(self, server: Process, engine: Process | None, metrics: str) -> Sample:
        tally, tokens = self.client.tally, counters(metrics)
        latencies, tally.latencies = tally.latencies, []
        answers = sum(tally.statuses.values())
        (before, (cached, prompted)), self._seen = self._seen, (answers, tokens)
        p50, p99 = np.percentile(latencies, (50, 99)) if latencies else (np.nan, np.nan)
        rate = (tokens[0] - cached) / max(1.0, tokens[1] - prompted)
        elapsed = time.monotonic() - self.began
        return Sample(elapsed, server, engine, answers - before, float(p50), float(p99), rate)

    async def _lose(self) -> None:
        """Kill engines, or stop them for longer than the server waits for a heartbeat."""
        await asyncio.sleep(min(30.0, self.seconds / 4))
        while time.monotonic() - self.began < LOSING * self.seconds:
            await self._fault(
                *((signal.SIGKILL, 0.0), (signal.SIGSTOP, LONG))[len(self.losses) % 2]
            )
            await asyncio.sleep(LOSSES)

    async def _fault(self, number: signal.Signals, seconds: float) -> None:
        if (pid := engine_of(self.target.pid)) is None:
            return
        self.losses.append((time.monotonic() - self.began, number.name))
        self.faults += 1
        os.kill(pid, number)
        await asyncio.sleep(seconds)
        if number == signal.SIGSTOP:
            with suppress(ProcessLookupError):  # the server has killed it
                os.kill(pid, signal.SIGCONT)

    async def _annoy(self) -> None:
        """Pause the engine for a short time, and change the keys, again and again."""
        asked, paused = 0, 0.0
        while True:
            await asyncio.sleep(HANGUPS)
            asked += 1
            await self._swap_keys(f"key-number-{asked}")
            if time.monotonic() - self.began - paused > PAUSES:
                paused = time.monotonic() - self.began
                await self._pause()

    async def _pause(self) -> None:
        if (pid := engine_of(self.target.pid)) is not None:
            self.faults += 1
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(SHORT)
                os.kill(pid, signal.SIGCONT)

    async def _swap_keys(self, key: str) -> None:
        """Add a key and send SIGHUP; within 5 s it must be valid beside the load's key."""
        self.keys.write_text(f"{KEY}\n{key}\n")
        os.kill(self.target.pid, signal.SIGHUP)
        self.faults += 1
        guest = Client(self.target.address, key)
        probe = Known("models", "/v1/models", b"", 0.0)
        for _ in range(50):
            await asyncio.sleep(0.1)
            with suppress(RuntimeError):
                await guest.first_answer(probe)
                break
        else:
            self.client.tally.unexpected += 1
            self.client.tally.note("a key was not valid 5 s after the hangup")
        guest.close()


def verdicts(
    soak: Soak, before: list[Process | None], after: list[Process | None]
) -> list[Verdict]:
    tally = soak.client.tally
    judged = [
        Verdict("wrong", tally.wrong == 0, f"{tally.wrong} of {tally.checked} answers"),
        Verdict("lost", tally.lost == 0, f"{tally.lost} requests without an answer"),
        Verdict("contract", tally.unexpected == 0, f"{tally.unexpected} answers not in it"),
    ]
    for which in ("server", "engine"):
        grown = growth(soak.samples, which)
        right = grown is not None and grown.within_noise
        detail = "too few samples" if grown is None else str(grown)
        judged.append(Verdict(f"memory of the {which}", right, f"{detail}, second half"))
    for which, earlier, other in zip(("server", "engine"), before, after, strict=True):
        right = earlier is not None and other is not None
        if earlier is not None and other is not None:
            right = (earlier.descriptors, earlier.threads) == (other.descriptors, other.threads)
        detail = f"{_seen(earlier)} before, {_seen(other)} after"
        judged.append(Verdict(f"descriptors and threads of the {which}", right, detail))
    return judged


def _seen(process: Process | None) -> str:
    if process is None:
        return "gone"
    return f"{process.descriptors} and {process.threads} ({process.rss / 2**20:.0f} MiB)"


@contextmanager
def served(keys: Path) -> Iterator[Target]:
    keys.parent.mkdir(exist_ok=True)
    keys.write_text(KEY)
    with (SCRATCH / "soak.log").open("wb") as log:
        command = real_server(Path("demo"), *FLAGS, "--api-key-file", str(keys))
        with serving(command, log) as target:
            yield target


def main() -> int:
    options = arguments()
    keys = SCRATCH / "soak-keys"
    with served(keys) as target:
        soak = Soak(target, keys, options)
        cpu = time.process_time()
        before, after = asyncio.run(soak.run())
        shares = [time.process_time() - cpu, target.cpu_seconds()]
    tally, judged = soak.client.tally, verdicts(soak, before, after)
    facts = {
        "minutes": f"{options.minutes:g}",
        "seed": str(options.seed),
        "rate": f"{options.rate:g} requests/s",
        "CPU of the client": f"{shares[0] / soak.seconds:.3f} cores",
        "CPU of the server and its last engine": f"{shares[1] / soak.seconds:.3f} cores",
        "faults": f"{soak.faults}; {len(soak.losses)} cost the engine its life",
        "commit": commit(),
    }
    path = RESULTS / f"soak-{now()[:10]}.html"
    path = options.output or path
    counts = {**tally.statuses, **{f"attack: {k}": n for k, n in tally.attacks.items()}}
    write_page(path, "Soak", facts, judged, counts, soak.samples, soak.losses, tally.errors)
    for verdict in judged:
        print(f"{'passed' if verdict.passed else 'FAILED'}  {verdict.gate}: {verdict.detail}")
    for error in tally.errors:
        print(error)
    line = {
        "bench": "soak",
        **facts,
        "verdicts": [asdict(each) for each in judged],
        "counts": counts,
    }
    if options.output is None:  # a page elsewhere is a trial
        keep("soak", line)
    print(f"page: {path}")
    return int(not all(verdict.passed for verdict in judged))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--output", type=Path, default=None, metavar="FILE", help="of the page")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

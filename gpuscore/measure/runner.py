"""Runs of scenarios: repeats in turn, over all servers and modes, as long as there is time."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpuscore.measure.apis import APIS, Api
from gpuscore.measure.figures import Row, Shot, failed, measured
from gpuscore.measure.sample import check_sample, disagreement, failure, not_comparable
from gpuscore.measure.scenarios import Draws, Mode, Scenario, poisson_at
from gpuscore.measure.targets import HttpTarget
from gpuscore.measure.workload import SAMPLE_IDS, sample

MOST_ROUNDS = 30
PROBED = 64  # requests in flight while a server's capacity is measured
STEPS = 10  # most rates that the search for the highest one tries
SEARCH_SECONDS = 20.0
FEWEST_ARRIVALS = 50  # of each rate that is tried


@dataclass(slots=True)
class Timed:
    """A mode on one server, with its measurements; if `done`, no more are taken."""

    scenario: Scenario
    mode: Mode
    target: HttpTarget
    error: str | None = None
    shots: list[Shot] = field(default_factory=list)
    done: bool = False

    @property
    def api(self) -> Api:
        return APIS["completions" if self.mode.decodes else self.target.server.api]

    def row(self) -> Row:
        """Return the row, with figures if there are any."""
        mode = self.mode
        notes = []
        shape = str(mode.shape)
        total = mode.requests
        if asks := self.scenario.asks:
            shape = f"{len(asks)} texts"
            total = sum(len(list(ask.chunks(mode.chunk))) for ask in asks)
        if mode.sent < total and self.error is None:
            rest = "; the time of the others is extrapolated" if mode.chunk is not None else ""
            notes.append(f"{mode.sent:,} of {total:,} requests were sent{rest}")
        if mode.in_flight > mode.sent:
            notes.append(f"only {mode.sent:,} in flight, because no more are sent")
        names = self.scenario.name, mode.name, shape, self.target.server.name
        row = Row(*names, notes=tuple(notes), error=self.error)
        return row if self.error or not self.shots else measured(row, self.shots, bool(mode.rate))


class BenchRun:
    """Samples and times targets; `rows` has what was measured so far.

    Args:
        targets: the servers, in the order of the tables.
        say: prints a line.
    """

    def __init__(
        self,
        targets: Sequence[HttpTarget],
        scenarios: Sequence[Scenario],
        options: argparse.Namespace,
        say: Callable[[str], None],
    ) -> None:
        self.targets = targets
        self.options = options
        self._say = say
        self.scenarios = [scenario.scaled(options.scale) for scenario in scenarios]
        self._timed: list[Timed] = []
        self._vocab = min(target.server.vocab or SAMPLE_IDS for target in targets)
        self._draws = Draws(options.bench_seed, self._vocab)

    def run(self) -> None:
        """Sample all targets, compare them, and time every scenario."""
        for target in self.targets:
            self._sample(target)
        each = self.options.minutes * 60 / max(1, len(self.scenarios))
        for scenario in self.scenarios:
            self._time(scenario, each)

    def rows(self) -> list[Row]:
        return [timed.row() for timed in self._timed]

    def _sample(self, target: HttpTarget) -> None:
        """Score the sample; a target that disagrees with an earlier one is marked as wrong."""
        check_sample(target, sample(self._vocab))
        name = target.server.name
        for other in self.targets[: self.targets.index(target)]:
            if None in (other.server.workload, target.server.workload) or "packed" in other.wrong:
                continue
            first = other.server.name
            if (why := not_comparable(other.server, target.server)) is not None:
                self._say(f"{name} is not compared with {first}: {why}")
            elif (why := disagreement(other.server, target.server)) is None:
                self._say(f"{name} agrees with {first}")
            else:
                self._say(f"{name} DIFFERS from {first}: {why}")
                target.wrong["packed"] = f"not the scores of {first}: {why}"
        for mode, why in target.wrong.items():
            self._say(f"{name}, {mode}: {why}")

    def _time(self, scenario: Scenario, seconds: float) -> None:
        """Measure all modes of all targets in turn, until the time is used."""
        began = time.monotonic()
        every = [timed for target in self.targets for timed in self._begun(scenario, target)]
        self._timed += every
        for number in range(MOST_ROUNDS):
            turn = time.monotonic()
            for timed in every:
                if timed.error is None and not timed.done:
                    self._measure(timed, number)
            now = time.monotonic()
            if not number:
                self._say(f"{scenario.name}: a round takes {now - turn:.1f} s")
            if now + (now - turn) - began > seconds or scenario.loads and number >= 4:
                break

    def _begun(self, scenario: Scenario, target: HttpTarget) -> list[Timed]:
        """Return the modes to measure; rates of the scenario poisson depend on the server."""
        wrong = target.wrong
        error = wrong.get("packed")  # if these scores are wrong, no other mode is timed either
        modes = [Timed(scenario, m, target, error or wrong.get(m.name)) for m in scenario.modes]
        if scenario.name != "poisson" or modes[0].error is not None:
            return modes
        try:
            return [self._arrivals(modes[0])]
        except ValueError as error:
            return [replace(modes[0], error=str(error))]

    def _measure(self, timed: Timed, number: int) -> None:
        """Add a measurement. Before the first one, a request is sent untimed, so that programs are
        compiled and static tokens cached; its failure is ignored: the measurement will show it."""
        try:
            if not number:
                (first, *_) = self._draws.requests(timed.scenario, timed.mode, MOST_ROUNDS)
                timed.target.send(timed.api, [first])
            timed.shots.append(self._shot(timed, number))
        except ValueError as error:
            timed.error = str(error)

    def _shot(self, timed: Timed, number: int) -> Shot:
        """Measure a mode once; raise ValueError with the reason if an answer has no scores."""
        mode = timed.mode
        asks = self._draws.requests(timed.scenario, mode, number)
        due = None if mode.rate is None else self._draws.arrivals(mode, number)[: len(asks)]
        record = timed.target.send(timed.api, asks, mode.in_flight if due is None else due)
        if (bad := failed(record)) is not None:
            count = int((~np.isin(record.status, (200, 429))).sum())
            raise ValueError(f"{count} of {len(asks)} requests failed: {failure(record, bad)}")
        for place in np.flatnonzero(record.status == 200).tolist():
            timed.api.read(record.bodies[place], asks[place])
        shot = Shot.of(record, [len(ask.items) * ask.candidates for ask in asks])
        if not shot.requests:
            raise ValueError(f"all {len(asks)} requests were refused: {failure(record, 0)}")
        part = not timed.scenario.asks and mode.chunk is not None and 1 < len(asks) < mode.requests
        if part and shot.requests == len(asks):  # some requests of one query, all answered
            return shot.extrapolated(len(asks[0].items), mode.shape.items)
        return shot

    def _arrivals(self, timed: Timed) -> Timed:
        """Return the mode of the scenario poisson at the requested rate."""
        options = self.options
        if options.find_rate is not None:
            return self._search(timed, options.find_rate)
        rate = timed.mode.rate if options.rate is None else float(options.rate.removesuffix("%"))
        assert rate is not None  # noqa: S101  (a mode of poisson has one)
        if options.rate is not None and options.rate.endswith("%"):
            rate = round(self._capacity(timed) * rate / 100, 2)
        if options.seconds is None:
            return replace(timed, mode=replace(poisson_at(rate), fraction=options.scale))
        return replace(timed, mode=poisson_at(rate, options.seconds))

    def _capacity(self, timed: Timed) -> float:
        """Return the requests per second with PROBED requests in flight."""
        shape = timed.mode.shape
        count = max(PROBED, round(4 * PROBED * self.options.scale))
        shot = self._shot(replace(timed, mode=Mode("capacity", shape, count, in_flight=PROBED)), 0)
        rate = shot.requests / shot.seconds
        self._say(f"{timed.target.server.name}: capacity {rate:.1f} requests/s of {shape}")
        return rate

    def _search(self, timed: Timed, limit: float) -> Timed:
        """Find the highest rate whose 99th percentile is at most `limit` ms; return it measured.

        The rate doubles from a quarter of the capacity until it fails; then follows bisection.
        """
        rate = self._capacity(timed) / 4
        highest_held = lowest_lost = 0.0
        least = rate / 16
        best: tuple[Mode, Shot] | None = None
        for _ in range(STEPS):
            seconds = max(SEARCH_SECONDS * self.options.scale, FEWEST_ARRIVALS / rate)
            mode = poisson_at(round(rate, 2), seconds)
            shot = self._shot(replace(timed, mode=mode), 0)
            p99 = float(np.percentile(shot.latencies, 99))
            holds = p99 <= limit and not shot.refused
            verdict = "held" if holds else "not held"
            self._say(f"{timed.target.server.name}: {mode.name}: p99 {p99:.1f} ms, {verdict}")
            if holds:
                highest_held = rate
                best = (mode, shot)
            else:
                lowest_lost = rate
            if lowest_lost and (lowest_lost < 1.1 * highest_held or rate < least):
                break
            rate = 2 * rate if not lowest_lost else (highest_held + lowest_lost) / 2
        if best is None:
            raise ValueError(
                f"no rate down to {lowest_lost:.2f}/s has a p99 of at most {limit:g} ms"
            )
        name = f"highest with p99 <= {limit:g} ms: {best[0].rate:g}/s"
        return replace(timed, mode=replace(best[0], name=name), shots=[best[1]], done=True)

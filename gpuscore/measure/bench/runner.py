"""Runs of scenarios: repeats in turn, over all servers and ways, as long as there is time."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuscore.measure.bench.apis import APIS, OWN_PROMPTS, Api
from gpuscore.measure.bench.figures import Row, Shot, WayFigures, failed
from gpuscore.measure.bench.sample import (
    Sampled,
    common,
    disagreement,
    not_comparable,
    sample_of,
    take,
    trouble,
)
from gpuscore.measure.bench.scenarios import BenchRequest, Draws, Scenario, Way, poisson_at
from gpuscore.measure.bench.targets import SAFE_VOCAB, Answerer
from gpuscore.measure.sensors import Sampler, limits

MOST_ROUNDS = 30
PROBED = 64  # requests in flight while a server's capacity is measured
STEPS = 5  # of the search for the highest rate, after it was doubled
SEARCH_SECONDS = 20.0
FEWEST_ARRIVALS = 50  # of each rate that is tried


@dataclass(frozen=True, slots=True)
class Options:
    """The wishes of the command line.

    Attributes:
        minutes: for all scenarios together.
        scale: share of each scenario's requests.
        seed: of the random tokens.
        rate: of the scenario poisson: requests per second, or a share of the server's capacity.
        seconds: of its arrivals.
        find_rate: milliseconds that the 99th percentile of its latency may take.
    """

    minutes: float = 5.0
    scale: float = 1.0
    seed: int = 0
    rate: str | None = None
    seconds: float | None = None
    find_rate: float | None = None


class BenchRun:
    """Samples and times targets; `rows` has what was measured so far.

    Args:
        targets: in the order of the tables.
        scenarios: to run.
        options: as asked.
        say: called with a line for people.
        step: called after each measurement.
    """

    def __init__(
        self,
        targets: Sequence[Answerer],
        scenarios: Sequence[Scenario],
        options: Options,
        say: Callable[[str], None],
        step: Callable[[int], None],
    ) -> None:
        self.targets, self.options = targets, options
        self.scenarios = [scenario.scaled(options.scale) for scenario in scenarios]
        self.samples: dict[str, Sampled] = {}
        self._say, self._step = say, step
        self._figures: dict[tuple[str, str, str], WayFigures] = {}
        self._ways: dict[tuple[str, str], tuple[Way, ...]] = {}
        known = [target.about.vocab or SAFE_VOCAB for target in targets]
        self._vocab = min(known)

    def run(self, check: Callable[[], None]) -> None:
        """Sample all targets, compare them, and time every scenario.

        Args:
            check: called before each measurement; may raise, to end the run.
        """
        self._check = check
        for target in self.targets:
            self._sample(target)
        each = self.options.minutes * 60 / max(1, len(self.scenarios))
        for scenario in self.scenarios:
            self._time(scenario, each)

    def rows(self) -> list[Row]:
        rows = []
        for scenario in self.scenarios:
            for target in self.targets:
                ways = self._ways.get((scenario.name, target.about.name), ())
                base = self._figures.get((scenario.name, target.about.name, scenario.base or ""))
                for way in ways:
                    measured = self._figures[scenario.name, target.about.name, way.name]
                    row = self._empty(scenario, way, target)
                    rows.append(measured.row(row, base, scenario.base))
        return rows

    def _empty(self, scenario: Scenario, way: Way, target: Answerer) -> Row:
        notes = []
        if target.about.texts is not None:
            notes.append(target.about.texts)
        if APIS[target.about.api].kind == OWN_PROMPTS:
            notes.append("the server makes its own prompts: not comparable with other servers")
        if way.in_flight > way.sent:
            notes.append(f"only {way.sent:,} in flight, because no more are sent")
        shape = f"{len(scenario.asks)} texts" if scenario.asks else str(way.shape)
        total = way.requests
        if scenario.asks:
            total = sum(len(list(ask.chunks(way.chunk))) for ask in scenario.asks)
        name = target.about.name
        sent, rate = max(1, min(total, way.sent)), way.rate
        return Row(
            *(scenario.name, way.name, shape, name), sent, total, notes=tuple(notes), asked=rate
        )

    def _sample(self, target: Answerer) -> None:
        """Score the sample; a target that disagrees with an earlier one is marked as wrong."""
        api = APIS[target.about.api]
        sampled = take(target, sample_of(self._vocab, not api.takes_ids))
        for name, other in self.samples.items():
            about = next(t.about for t in self.targets if t.about.name == name)
            reference, got = other.first, sampled.first
            if reference is None or got is None or "packed" in other.wrong:
                continue
            if reason := not_comparable(about, target.about):
                self._say(f"{target.about.name} is not compared with {name}: {reason}")
                continue
            both = common(other.workload, reference, sampled.workload, got)
            if both is None:
                continue
            why = disagreement(*both)
            said = "agrees with" if why is None else "DIFFERS from"
            self._say(f"{target.about.name} {said} {name}{'' if why is None else f': {why}'}")
            if why is not None:
                wrong = dict.fromkeys(sampled.runs, f"not the scores of {name}: {why}")
                sampled = replace(sampled, wrong={**sampled.wrong, **wrong})
        for way, why in sampled.wrong.items():
            self._say(f"{target.about.name}, {way}: {why}")
        self.samples[target.about.name] = sampled

    def _time(self, scenario: Scenario, seconds: float) -> None:
        """Measure all ways of all targets in turn, until the time is used."""
        began = time.monotonic()
        for target in self.targets:
            key = scenario.name, target.about.name
            try:
                self._ways[key] = self._ways_of(scenario, target)
            except ValueError as error:
                self._ways[key] = scenario.ways
                for way in scenario.ways:
                    self._figures[(*key, way.name)] = WayFigures(error=str(error))
                continue
            for way in self._ways[key]:
                self._figures.setdefault(
                    (*key, way.name), WayFigures(error=self._wrong(target, way))
                )
        for number in range(MOST_ROUNDS):
            turn = time.monotonic()
            self._round(scenario, number)
            now = time.monotonic()
            if not number:
                self._say(f"{scenario.name}: a round takes {now - turn:.1f} s")
            if now + (now - turn) - began > seconds or scenario.loads and number >= 4:
                break

    def _round(self, scenario: Scenario, number: int) -> None:
        for target in self.targets:
            for way in self._ways[scenario.name, target.about.name]:
                measured = self._figures[scenario.name, target.about.name, way.name]
                if measured.error is not None or measured.done:
                    continue
                self._check()
                try:
                    if not number:
                        self._warm(scenario, way, target)
                    measured.shots.append(self._shot(scenario, way, target, number))
                except ValueError as error:
                    measured.error = str(error)
                self._step(1)

    def _wrong(self, target: Answerer, way: Way) -> str | None:
        """Return why a way has no right scores; None if it has."""
        wrong: Mapping[str, str] = self.samples[target.about.name].wrong
        return wrong.get(way.name) or wrong.get("packed")

    def _warm(self, scenario: Scenario, way: Way, target: Answerer) -> None:
        """Send one request of the way's length, untimed, so that programs are compiled and static
        tokens cached; its failure is ignored, because the measurement will show it."""
        (first, *_) = self._draws(target).requests(scenario, way, MOST_ROUNDS)
        target.send(_api(way, target), [first])

    def _shot(self, scenario: Scenario, way: Way, target: Answerer, number: int) -> Shot:
        """Measure a way once; raise ValueError with the reason if an answer has no scores."""
        api, draws = _api(way, target), self._draws(target)
        asks = draws.requests(scenario, way, number)
        offsets = None if way.rate is None else draws.arrivals(way, number)[: len(asks)]
        sampler = Sampler() if target.on_gpu and limits() else None
        try:
            record = target.send(api, asks, way.in_flight, offsets)
        finally:
            reading = sampler.stop() if sampler is not None else {}
        if (bad := failed(record)) is not None:
            count = int((~np.isin(record.status, (200, 429))).sum())
            raise ValueError(f"{count} of {len(asks)} requests failed: {trouble(record, bad)}")
        for place in np.flatnonzero(record.status == 200).tolist():
            try:
                api.read(record.bodies[place], len(asks[place].items))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(f"no scores in an answer: {error!r}") from error
        shot = Shot.of(record, [len(ask.items) for ask in asks], reading)
        if not shot.requests:
            raise ValueError(f"all {len(asks)} requests were refused: {trouble(record, 0)}")
        if _is_part(scenario, way, asks) and shot.requests == len(asks):
            return shot.extrapolated(len(asks[0].items), way.shape.items)
        return shot

    def _draws(self, target: Answerer) -> Draws:
        return Draws(self.options.seed, self._vocab, target.words)

    def _ways_of(self, scenario: Scenario, target: Answerer) -> tuple[Way, ...]:
        """Return the ways to measure; rates of the scenario poisson depend on the server."""
        if scenario.name != "poisson":
            return scenario.ways
        options = self.options
        if options.find_rate is not None:
            return self._search(scenario, target, options.find_rate)
        way = scenario.ways[0]
        rate = way.rate if options.rate is None else float(options.rate.removesuffix("%"))
        assert rate is not None  # noqa: S101  (the scenario's)
        if options.rate is not None and options.rate.endswith("%"):
            rate = round(self._capacity(scenario, target) * rate / 100, 2)
        if options.seconds is None:
            return (replace(poisson_at(rate), share=options.scale),)
        return (poisson_at(rate, options.seconds),)

    def _capacity(self, scenario: Scenario, target: Answerer) -> float:
        """Return the requests per second with PROBED requests in flight."""
        shape = scenario.ways[0].shape
        count = max(PROBED, round(4 * PROBED * self.options.scale))
        shot = self._shot(scenario, Way("capacity", shape, count, in_flight=PROBED), target, 0)
        rate = shot.requests / shot.seconds
        self._say(f"{target.about.name}: capacity {rate:.1f} requests/s of {shape}")
        return rate

    def _search(self, scenario: Scenario, target: Answerer, limit: float) -> tuple[Way, ...]:
        """Return the highest rate whose 99th percentile is at most `limit` ms, as a measured way.

        The rate is doubled from a quarter of the capacity, then the interval is halved.
        """
        rate, held, lost = self._capacity(scenario, target) / 4, 0.0, 0.0
        best: tuple[Way, Shot] | None = None
        for _ in range(2 * STEPS):
            seconds = max(SEARCH_SECONDS * self.options.scale, FEWEST_ARRIVALS / rate)
            way = poisson_at(round(rate, 2), seconds)
            shot = self._shot(scenario, way, target, 0)
            p99 = float(np.percentile(shot.latencies, 99))
            holds = p99 <= limit and not shot.refused
            self._say(f"{target.about.name}: {way.name}: p99 {p99:.1f} ms, {_said(holds)}")
            held, lost = (rate, lost) if holds else (held, rate)
            best = (way, shot) if holds else best
            if lost and lost < 1.1 * held:
                break
            rate = 2 * rate if not lost else (held + lost) / 2
        if best is None:
            raise ValueError(f"no rate down to {rate:.2f}/s has a p99 of at most {limit:g} ms")
        way = replace(best[0], name=f"highest with p99 <= {limit:g} ms: {best[0].rate:g}/s")
        self._figures[scenario.name, target.about.name, way.name] = WayFigures([best[1]], done=True)
        return (way,)


def _is_part(scenario: Scenario, way: Way, asks: Sequence[BenchRequest]) -> bool:
    """Return whether these requests are only a part of one query's requests."""
    return not scenario.asks and way.chunk is not None and 1 < len(asks) < way.requests


def _said(holds: bool) -> str:
    return "held" if holds else "not held"


def _api(way: Way, target: Answerer) -> Api:
    return APIS["completions" if way.decodes else target.about.api]

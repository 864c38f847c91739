"""`gpuscore bench compare`: bundles of several machines in one table, with cost and agreement."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import chain
from pathlib import Path

from gpuscore.errors import UsageError
from gpuscore.measure.bench.bundle import BenchBundle, read_bundle, report_bundles
from gpuscore.measure.bench.figures import Row
from gpuscore.measure.bench.sample import HALF, common, model_of, not_comparable
from gpuscore.measure.bench.tables import ABOUT, tables
from gpuscore.measure.parity.gates import Verdict, judge_pair, skipped
from gpuscore.measure.parity.report import STATES, listed, verdict_line
from gpuscore.measure.parity.workload import SAMPLE, Workload
from gpuscore.measure.plots import bars, lines
from gpuscore.measure.reports import aligned, page, table, text_table, write, write_html

EXIT_OK, EXIT_FAILED = 0, 1
QUANTILES = (0, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)
FEW = 20  # latencies; fewer make no curve


def compare(values: argparse.Namespace) -> int:
    """Run the command; return 1 if servers of one model disagree."""
    bundles = [read_bundle(Path(place)) for place in values.bundles]
    reference = None if values.reference is None else read_bundle(Path(values.reference))
    models = _models([*bundles, *([] if reference is None else [reference])])
    if models and not values.other_models:
        raise UsageError(
            f"the bundles are of different models, {models}; --other-models compares their times"
        )
    names = _names(values.bundles)
    bundles = [_named(bundle, name) for bundle, name in zip(bundles, names, strict=True)]
    prices = _prices(values.price, {s.about.name for bundle in bundles for s in bundle.servers})
    shown = bundles if not values.reports else [*bundles, *_with_same_ways(bundles)]
    verdicts = list(agreement(bundles, reference))
    text = {"text": _text, "markdown": _markdown, "html": _html}[values.format](
        shown, prices, verdicts
    )
    if models:
        print(f"different models, {models}: times alone can be compared")
    if values.output is None:
        print(text)
    else:
        write(Path(values.output), text + "\n", "--output")
        print(f"wrote {values.output}")
    return EXIT_FAILED if any(verdict.failed for verdict in verdicts) else EXIT_OK


def write_report(path: Path, bundle: BenchBundle, verdicts: Sequence[Verdict]) -> None:
    """Write the page of one run."""
    write_html(path, "gpuscore bench", _parts([bundle], {}, verdicts))


def as_text(bundle: BenchBundle) -> str:
    """Return the tables of one run."""
    return _text([bundle], {}, ())


def agreement(bundles: Sequence[BenchBundle], reference: BenchBundle | None) -> Iterator[Verdict]:
    """Yield parity's verdicts on all servers' scores of the sample, against the first ones'."""
    every = [server for bundle in bundles for server in bundle.servers]
    first = (reference.servers if reference is not None else every[:1])[0]
    for server in every:
        if server is first:
            continue
        subject = f"{server.about.name} against {first.about.name}"
        if server.workload is None or first.workload is None or not (server.run and first.run):
            yield skipped(subject, "scores", "one has no scores of the sample")
            continue
        if reason := not_comparable(first.about, server.about):
            yield skipped(subject, "scores", reason)
            continue
        both = common(first.workload, first.run, server.workload, server.run)
        if both is None:
            reason = _unequal(first.workload, server.workload)
            yield skipped(subject, "scores", reason)
            continue
        yield from judge_pair(*both, HALF)[1]


def _unequal(first: Workload, second: Workload) -> str:
    """Return why two workloads have nothing in common."""
    if first.size != second.size:
        return (
            f"the workloads are {first.size} and {second.size}; parity record --workload {SAMPLE}"
        )
    ids = f"{first.vocab_rows:,} and {second.vocab_rows:,} token ids"
    return f"the samples are of {ids}: of different models, or --vocab-size was given"


def _models(bundles: Sequence[BenchBundle]) -> str:
    """Return the names of the models if the bundles have different ones; else an empty text."""
    of_each = [{model_of(server.about) for server in bundle.servers} for bundle in bundles]
    if all(models == of_each[0] for models in of_each):
        return ""
    return " and ".join(sorted(set().union(*of_each)))


def _names(places: Sequence[str]) -> list[str]:
    """Return each bundle's name: its file's without the ending, after as many folders as it takes
    to tell it from the others.

    Raises:
        UsageError: a file is given twice.
    """
    paths = [Path(place).resolve() for place in places]
    for place, path in zip(places, paths, strict=True):
        if paths.count(path) > 1:
            raise UsageError(f"{place} is given twice")
    parts = [path.with_suffix("").parts for path in paths]
    if len(set(parts)) < len(parts):  # such as a file and a folder
        parts = [path.parts for path in paths]
    names = []
    for own in parts:
        others = [other for other in parts if other is not own]
        count = next(n for n in range(1, len(own) + 1) if all(o[-n:] != own[-n:] for o in others))
        names.append("/".join(own[-count:]))
    return names


def _named(bundle: BenchBundle, name: str) -> BenchBundle:
    """Put the bundle's name before the servers' names, which may be the same in several bundles."""

    def new(old: str) -> str:
        return name if len(bundle.servers) == 1 else f"{name}: {old}"

    servers = []
    for server in bundle.servers:
        about = replace(server.about, name=new(server.about.name))
        run = server.run and replace(server.run, name=about.name)
        servers.append(replace(server, about=about, run=run))
    rows = [replace(row, server=new(row.server)) for row in bundle.rows]
    return BenchBundle(bundle.facts, tuple(servers), tuple(rows))


def _with_same_ways(bundles: Sequence[BenchBundle]) -> list[BenchBundle]:
    """Return the reports' figures for the ways that the bundles have."""
    known = {(row.scenario, row.way) for bundle in bundles for row in bundle.rows}
    reports = []
    for report in report_bundles():
        rows = tuple(row for row in report.rows if (row.scenario, row.way) in known)
        if rows:
            reports.append(BenchBundle(report.facts, report.servers, rows))
    return reports


def _prices(texts: Sequence[str], names: set[str]) -> dict[str, float]:
    """Read NAME=1.20/h; raise UsageError for another form or name."""
    prices = {}
    for text in texts:
        name, equals, price = text.rpartition("=")
        try:
            value = float(price.removesuffix("/h"))
        except ValueError:
            value = -1.0
        if not equals or value <= 0:
            raise UsageError(f"--price {text}: write NAME=1.20/h")
        if name not in names:
            raise UsageError(f"--price {text}: servers are {', '.join(sorted(names))}")
        prices[name] = value
    return prices


def _rows(bundles: Sequence[BenchBundle]) -> list[Row]:
    return list(chain.from_iterable(bundle.rows for bundle in bundles))


def _first(bundles: Sequence[BenchBundle]) -> str | None:
    """Return the server that others are relative to, if there are others."""
    names = list(dict.fromkeys(row.server for row in _rows(bundles)))
    return names[0] if len(names) > 1 else None


def _text(
    bundles: Sequence[BenchBundle], prices: Mapping[str, float], verdicts: Sequence[Verdict]
) -> str:
    parts = []
    for part in tables(_rows(bundles), prices, _first(bundles)):
        parts.append("\n".join([part.title, aligned(part.head, part.lines), *part.notes]))
    parts.append(ABOUT)
    parts += ["\n".join(map(verdict_line, verdicts))] if verdicts else []
    return "\n\n".join(parts)


def _markdown(
    bundles: Sequence[BenchBundle], prices: Mapping[str, float], verdicts: Sequence[Verdict]
) -> str:
    parts = [part.markdown() for part in tables(_rows(bundles), prices, _first(bundles))]
    lines_of = [f"- {verdict_line(verdict)}" for verdict in verdicts]
    return "\n\n".join([*parts, ABOUT, *(["\n".join(lines_of)] if lines_of else [])])


def _html(
    bundles: Sequence[BenchBundle], prices: Mapping[str, float], verdicts: Sequence[Verdict]
) -> str:
    return page("gpuscore bench", _parts(bundles, prices, verdicts))


def _parts(
    bundles: Sequence[BenchBundle], prices: Mapping[str, float], verdicts: Sequence[Verdict]
) -> list[str]:
    machines = []
    for bundle in bundles:
        for server in bundle.servers:
            facts = {**server.about.facts, "model": server.about.model}
            facts |= {name: v for name, v in bundle.facts.items() if name != "client"}
            shown = [(name, v if isinstance(v, str) else _listed(v)) for name, v in facts.items()]
            machines += [f"<h3>{escape(server.about.name)}</h3>", text_table((), shown, "words")]
    parts = []
    for part in tables(_rows(bundles), prices, _first(bundles)):
        parts += [f"<h2>{escape(part.title)}</h2>", text_table(part.head, part.lines)]
        parts += [f"<p>{escape(note)}</p>" for note in part.notes]
    parts.append(f"<p>{escape(ABOUT)}</p>")
    if verdicts:
        cells = [(v.gate, escape(v.subject), STATES[v.passed], escape(v.detail)) for v in verdicts]
        parts += ["<h2>Scores</h2>", table(("gate", "of", "verdict", "found"), cells, "words")]
    parts += ["<h2>Plots</h2>", *_plots(_rows(bundles))]
    return [*parts, "<h2>Servers</h2>", *machines]


def _listed(value: object) -> str:
    if isinstance(value, dict):
        return listed(value) if value else "defaults"
    return str(value)


def _plots(rows: Sequence[Row]) -> Iterator[str]:
    for scenario in dict.fromkeys(row.scenario for row in rows):
        some = [row for row in rows if row.scenario == scenario and row.error is None]
        if rates := [(row.server, row.way, row.rate) for row in some if row.rates]:
            yield bars(f"{scenario}: items per second", rates)
        curves = {
            f"{row.server}, {row.way}": [(q, row.percentile(q)) for q in QUANTILES]
            for row in some
            if len(row.latencies) >= FEW
        }
        if curves:
            yield lines(f"{scenario}: latency by percentile", "percentile", "ms", curves)
        loads: dict[str, list[tuple[float, float]]] = {}
        for row in some:
            _, comma, number = row.way.partition(", ")
            if comma and number.endswith(" in flight"):
                load = float(number.removesuffix(" in flight").replace(",", ""))
                name = f"{row.server}, {row.shape}"
                loads.setdefault(name, []).append((load, row.requests_per_second))
        if loads:
            yield lines(f"{scenario}: throughput by load", "in flight", "requests/s", loads)

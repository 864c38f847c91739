"""`gpuscore bench compare` and `gpuscore parity compare`: bundles of either kind side by side, by
their times, and by their scores."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError, UsageError
from gpuscore.measure.agreement import Agreement
from gpuscore.measure.bundle import Bundle, Measured, read_bundle, report_bundles
from gpuscore.measure.gates import Verdict, judge, judge_pair, kind, packing, skipped
from gpuscore.measure.rates import plots, tables
from gpuscore.measure.report import Findings, facts_of
from gpuscore.measure.results import Run
from gpuscore.measure.sample import in_common, model_of
from gpuscore.measure.workload import Workload

Judged = tuple[list[Agreement], list[Verdict]]


def compare_times(values: argparse.Namespace, settings: Settings) -> int:
    """Run `bench compare`; return 1 if servers of one model disagree."""
    bundles = _named(values.bundles)
    reference = [] if values.reference is None else _named([values.reference])
    models = _models([*bundles, *reference])
    if models and not values.other_models:
        raise UsageError(
            f"the bundles are of different models, {models}; --other-models compares their times"
        )
    servers = _servers(bundles)
    prices = _prices(values.price, {server.about.name for server in servers})
    known = {(row.scenario, row.way) for bundle in bundles for row in bundle.rows}
    rows = [
        row
        for bundle in [*bundles, *report_bundles()]
        for row in bundle.rows
        if (row.scenario, row.way) in known
    ]
    if models:
        print(f"different models, {models}: times alone can be compared")
    found, verdicts = against_first(servers, next(iter(_servers(reference)), None))
    facts = {f"{s.about.name}": facts_of(s) for s in servers}
    times, drawn = tables(rows, prices), list(plots(rows))
    return Findings("gpuscore bench", times, drawn, found, verdicts, facts).conclude(values.report)


def compare_scores(values: argparse.Namespace, settings: Settings) -> int:
    """Run `parity compare`: judge every pair, or with --reference each by transformers."""
    bundles = _named([*values.bundles, *(values.reference or ())])
    count = len(values.bundles)
    servers, references = _servers(bundles[:count]), _servers(bundles[count:])
    if len(servers) < (1 if references else 2):
        raise ConfigError(
            "one bundle has nothing to be compared with: name a second one, or --reference"
        )
    every = [*servers, *references]
    for other in every[1:]:
        _common(every[0], other)
    for server in every:
        speed = server.run and server.run.items_per_second
        said = "" if speed is None else f", {speed:.0f} items/s"
        print(f"{server.about.name}: {server.about.facts.get('model_dtype', 'scores')}{said}")
    print()
    if references:
        found, verdicts = against_oracle(servers, references)
    else:
        found, verdicts = against_each_other(servers)
        verdicts += [packing(server.run) for server in servers if server.run is not None]
    title = f"Parity of {len(servers)} bundles"
    facts = {server.about.name: facts_of(server) for server in every}
    return Findings(title, (), (), found, verdicts, facts).conclude(values.report)


def against_first(servers: Sequence[Measured], reference: Measured | None = None) -> Judged:
    """Judge the scores of servers by the reference's, or by the first one's."""
    first, found, verdicts = reference or servers[0], [], []
    for server in servers:
        if server is first:
            continue
        both = in_common(first, server)
        if isinstance(both, str):
            subject = f"{server.about.name} against {first.about.name}"
            verdicts.append(skipped(subject, "scores", both))
            continue
        one, more = judge_pair(*both)
        found.append(one)
        verdicts += more
    return found, verdicts


def against_each_other(servers: Sequence[Measured]) -> Judged:
    """Judge every pair."""
    judged = [judge_pair(*_common(*pair)) for pair in combinations(servers, 2)]
    return [one for one, _ in judged], [verdict for _, some in judged for verdict in some]


def against_oracle(servers: Sequence[Measured], references: Sequence[Measured]) -> Judged:
    """Judge each server by transformers in float32, and by its own error in the server's format.

    Raises:
        ConfigError: the references are not one in float32 and at most one for each other dtype, or
            there is none for a server's dtype.
    """
    names = ", ".join(reference.about.name for reference in references)
    oracle = {ref.run.dtype: ref for ref in references if ref.run and ref.run.precision == "full"}
    if len(oracle) < len(references):
        raise ConfigError(
            "--reference takes one bundle in float32 and at most one for each other dtype, "
            f"without quantization; these are {names}"
        )
    if "float32" not in oracle:
        raise ConfigError(f"--reference has no bundle in float32, only {', '.join(oracle)}")
    exact = oracle.pop("float32")
    judged: list[tuple[Agreement, list[Verdict]]] = []
    for yardstick in oracle.values():  # for the table only, without verdicts
        workload, right, theirs = _common(exact, yardstick)
        judged.append((judge(workload, right, theirs, theirs)[0], []))
    for server in servers:
        workload, right, run = _common(exact, server)
        if kind(run) == "half" and run.dtype not in oracle:
            raise ConfigError(
                f"{run.name} is in {run.dtype}: --reference needs transformers in {run.dtype} "
                f"beside {exact.about.name} (gpuscore parity record --oracle --dtype {run.dtype})"
            )
        rounded = _common(oracle[run.dtype], server)[1] if kind(run) == "half" else None
        judged.append(judge(workload, right, rounded, run))
    return [one for one, _ in judged], [verdict for _, some in judged for verdict in some]


def _common(first: Measured, second: Measured) -> tuple[Workload, Run, Run]:
    """Return the scores that both have; raise ConfigError if models or workloads differ."""
    if first.model is not None and second.model is not None:
        for part in ("weights", "config", "tokenizer"):
            digests = [getattr(model, part) or "none" for model in (first.model, second.model)]
            if digests[0] != digests[1]:
                raise ConfigError(
                    f"the bundles are of different models: the SHA-256 of their {part} is "
                    f"{digests[0][:16]} and {digests[1][:16]}"
                )
        second = replace(second, about=replace(second.about, model=first.about.model))
    both = in_common(first, second)
    if isinstance(both, str):
        raise ConfigError(f"{second.about.name} and {first.about.name} cannot be compared: {both}")
    return both


def _servers(bundles: Iterable[Bundle]) -> list[Measured]:
    return list(chain.from_iterable(bundle.servers for bundle in bundles))


def _models(bundles: Sequence[Bundle]) -> str:
    """Return the names of the models if the bundles have different ones; else an empty text."""
    of_each = [{model_of(server.about) for server in bundle.servers} for bundle in bundles]
    if all(models == of_each[0] for models in of_each):
        return ""
    return " and ".join(sorted(set().union(*of_each)))


def _named(places: Sequence[str]) -> list[Bundle]:
    """Read bundles; name each by its file without the ending, and by the whole path where that is
    not enough.

    Raises:
        UsageError: one is given twice.
    """
    paths = [Path(place) for place in places]
    whole = [path.resolve() for path in paths]
    for path, found in zip(paths, whole, strict=True):
        if whole.count(found) > 1:
            raise UsageError(f"{path} is given twice")
    stems = [path.stem for path in whole]
    once = [stems.count(stem) == 1 for stem in stems]
    names = [p.stem if own else str(p.with_suffix("")) for p, own in zip(paths, once, strict=True)]
    return [_renamed(read_bundle(path), name) for path, name in zip(paths, names, strict=True)]


def _renamed(bundle: Bundle, name: str) -> Bundle:
    """Put the bundle's name before the servers' names, which may be the same in several bundles."""

    def new(old: str) -> str:
        return name if len(bundle.servers) == 1 else f"{name}: {old}"

    servers = []
    for server in bundle.servers:
        about = replace(server.about, name=new(server.about.name))
        run = server.run and replace(server.run, name=about.name)
        servers.append(replace(server, about=about, run=run))
    rows = [replace(row, server=new(row.server)) for row in bundle.rows]
    return Bundle(bundle.facts, tuple(servers), tuple(rows))


def _prices(texts: Sequence[str], names: set[str]) -> dict[str, float]:
    """Read NAME=1.20/h; raise UsageError for another form or name."""
    prices = {}
    for text in texts:
        name, _, price = text.rpartition("=")
        try:
            value = float(price.removesuffix("/h"))
        except ValueError:
            value = -1.0
        if not name or value <= 0:
            raise UsageError(f"--price {text}: write NAME=1.20/h")
        if name not in names:
            raise UsageError(f"--price {text}: servers are {', '.join(sorted(names))}")
        prices[name] = value
    return prices

"""`gpuscore bench compare` and `gpuscore parity compare`, two names of one command: it compares the
times and the scores of bundles."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError, UsageError
from gpuscore.measure.agreement import Agreement
from gpuscore.measure.bundle import Bundle, read_bundle
from gpuscore.measure.figures import report_rows
from gpuscore.measure.gates import Verdict, judge, packing, skipped
from gpuscore.measure.rates import tables
from gpuscore.measure.report import conclude, facts_of
from gpuscore.measure.results import Measured
from gpuscore.measure.sample import not_comparable


def compare(values: argparse.Namespace, settings: Settings) -> int:
    """Run the command; return 1 if scores differ by more than the gates allow."""
    bundles = _named([*values.bundles, *values.reference])
    count = len(values.bundles)
    servers = [server for bundle in bundles[:count] for server in bundle.servers]
    references = [server for bundle in bundles[count:] for server in bundle.servers]
    _check_digests([*servers, *references])
    rows = [row for bundle in bundles[:count] for row in bundle.rows]
    if not rows and len(servers) < (1 if references else 2):
        raise ConfigError("there is nothing to compare with: give a second bundle, or --reference")
    known = {(row.scenario, row.way) for row in rows}
    rows += [row for row in report_rows() if (row.scenario, row.way) in known]
    times = tables(rows, _prices(values.price, {server.name for server in servers}))
    found, verdicts = judged(servers, references)
    if not times and any(verdict.gate == "scores" for verdict in verdicts):
        raise ConfigError("; ".join(v.detail for v in verdicts if v.gate == "scores"))
    facts = {server.name: facts_of(server) for server in [*servers, *references]}
    title = f"{' and '.join(values.bundles)} compared"
    return conclude(values.report, title, times, (found, verdicts), facts=facts)


def judged(
    servers: Sequence[Measured], references: Sequence[Measured] = ()
) -> tuple[list[Agreement], list[Verdict]]:
    """Compare every pair of servers, or, with references, each server with its reference.

    The reference in float32, or else the only one, counts as right. A reference in a server's
    half-precision format shows transformers' own error there, which sets the server's limits.
    """
    found: list[Agreement] = []
    verdicts = [packing(server) for server in servers if references or server.alone is not None]
    if not references:
        for first, second in combinations(servers, 2):
            _add(found, verdicts, first, second)
        return found, verdicts
    formats = [reference.format for reference in references]
    if len(set(formats)) < len(formats) or (len(formats) > 1 and "float32" not in formats):
        raise ConfigError(
            "--reference takes one bundle in float32 and at most one for each other dtype, "
            f"without quantization; their formats are {', '.join(formats)}"
        )
    by_format = dict(zip(formats, references, strict=True))
    exact = by_format.pop("float32", references[0])
    for rounded in by_format.values():  # for the table only, without verdicts
        if rounded is not exact:
            _add(found, [], exact, rounded)
    for server in servers:
        _add(found, verdicts, exact, server, rounded=by_format.get(server.format))
    return found, verdicts


def _add(
    found: list[Agreement],
    verdicts: list[Verdict],
    first: Measured,
    second: Measured,
    rounded: Measured | None = None,
) -> None:
    """Add the agreement of two servers and the verdicts on it, or why there is none."""
    if (why := not_comparable(first, second)) is not None:
        verdicts.append(skipped(f"{second.name} against {first.name}", "scores", why))
        return
    if rounded is not None and not_comparable(rounded, second) is not None:
        rounded = None
    one, more = judge(first, second, rounded)
    found.append(one)
    verdicts += more


def _check_digests(servers: Sequence[Measured]) -> None:
    """Raise ConfigError if the models' weights, configs or tokenizers differ."""
    known = [server.digests for server in servers if server.digests is not None]
    for part in ("weights", "config", "tokenizer"):
        digests = sorted({str(getattr(digest, part))[:16] for digest in known})
        if len(digests) > 1:
            raise ConfigError(
                f"the bundles are of different models: the SHA-256 of their {part} is "
                f"{' and '.join(digests)}"
            )


def _named(places: Sequence[str]) -> list[Bundle]:
    """Read bundles; name each by its path without the ending.

    Raises:
        UsageError: one is given twice.
    """
    paths = [Path(place) for place in places]
    whole = [path.resolve() for path in paths]
    for path, found in zip(paths, whole, strict=True):
        if whole.count(found) > 1:
            raise UsageError(f"{path} is given twice")
    return [_renamed(read_bundle(path), str(path.with_suffix(""))) for path in paths]


def _renamed(bundle: Bundle, name: str) -> Bundle:
    """Put the bundle's name before the servers' names, which may be the same in several bundles."""
    single = len(bundle.servers) == 1
    names = {s.name: name if single else f"{name}: {s.name}" for s in bundle.servers}
    servers = tuple(replace(server, name=names[server.name]) for server in bundle.servers)
    rows = tuple(replace(row, server=names[row.server]) for row in bundle.rows)
    return Bundle(bundle.facts, servers, rows)


def _prices(texts: Sequence[str], names: set[str]) -> dict[str, float]:
    """Read NAME=1.20/h; raise UsageError for any other form, or an unknown name."""
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
            raise UsageError(f"--price {text}: the servers are {', '.join(sorted(names))}")
        prices[name] = value
    return prices

"""`make check-streams`: worlds that must have no finding, and planted defects that must have one.

PYTHONPATH=tests python -P -m support.streams --worlds 500
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from support.streams.model import write_model
from support.streams.plants import PLANTS, is_found
from support.streams.worlds import GROUP, Report, check_worlds, silent

SHOWN = 20  # findings


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    groups = range(options.group or 0, -(-options.worlds // GROUP))
    if options.group is not None:
        groups = range(options.group, options.group + 1)
    # Nothing has started a thread yet, so forked processes are safe, and need not import torch.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        worlds = [pool.submit(check_worlds, [group]) for group in groups]
        plants = [pool.submit(_found, index) for index in range(len(PLANTS))]
        report = Report()
        for future in worlds:
            report.add(future.result())
        status = _show(report)
        for plant, future in zip(PLANTS, plants, strict=True):
            findings = future.result()
            status |= not findings
            print(f"  {'found' if findings else 'NOT FOUND'}: {plant.name} ({plant.kind})")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=100, help=f"in groups of {GROUP}")
    parser.add_argument("--group", type=int, help="this group of worlds only")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    return parser


def _found(index: int) -> bool:
    """Tell whether a planted defect makes the finding that it should."""
    plant = PLANTS[index]
    with silent(), tempfile.TemporaryDirectory() as folder:
        return is_found(plant, write_model(Path(folder)))


def _show(report: Report) -> int:
    """Print a report; return 1 if there are findings."""
    counts = report.counts
    failed = ", ".join(f"{name} {report.batches[name]}" for name in sorted(report.batches))
    print(f"{report.worlds} worlds; batches and worlds with faults: {failed}")
    print(f"  {report.at_start} operations at the start of backends, {counts.operations} in worlds")
    print(f"  of those {counts.launches} on streams: {', '.join(sorted(report.streams))}")
    print(f"  {counts.blocks} allocations, {report.changes} changes of thread")
    for title, amounts in (("waits", counts.waits), ("ordered conflicts", counts.ordered)):
        print(f"  {title}: " + ", ".join(f"{n} {name}" for name, n in amounts.most_common()))
    for seed, finding in list(report.findings.values())[:SHOWN]:
        world = f"world {seed}" if seed >= 0 else "at the end"
        print(f"{world}: {finding}")
    print(f"{len(report.findings)} findings")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

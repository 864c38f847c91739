"""The progress bar of a comparison, on standard error if that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from gpuscore.measure.parity.workload import Workload

# Called after each case with the number of its items.
Scored: TypeAlias = Callable[[int], None]


def unwatched(items: int) -> None:
    """Do nothing, as a `Scored` of which nobody shows the progress."""


@contextmanager
def comparing(workload: Workload, runs: int) -> Iterator[Callable[[str], Scored]]:
    """Show a bar over the items of all runs of a workload.

    Yields:
        A function that begins a run, given its name, and returns what the run has to call.
    """
    from tqdm import tqdm

    items = sum(len(case.items) for case in workload.cases)
    with tqdm(total=runs * items, unit="item", leave=False, disable=None) as bar:

        def begin(name: str) -> Scored:
            bar.set_description(name)
            return lambda count: bar.update(count) and None

        yield begin

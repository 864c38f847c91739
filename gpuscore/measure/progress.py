"""The progress bar of a command that measures, on standard error if that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

# Called with the number of items that are done.
Counted: TypeAlias = Callable[[int], None]


def unwatched(count: int) -> None:
    """Do nothing: a `Counted` for callers that show no progress."""


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], Counted]]:
    """Show a bar over all items.

    Yields:
        A function that begins a part, given its name, and returns the part's counting function.
    """
    from tqdm import tqdm

    with tqdm(total=total, unit="item", leave=False, disable=None) as bar:

        def begin(name: str) -> Counted:
            bar.set_description(name)
            return lambda count: bar.update(count) and None

        yield begin

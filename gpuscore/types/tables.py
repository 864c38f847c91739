"""Results as tables: for pandas, and as HTML for notebooks."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import import_module
from itertools import chain, count
from typing import Any

from gpuscore.errors import ConfigError

SHOWN_ROWS = 20


class Table(ABC):
    """The base of results that are tables."""

    __slots__ = ()

    @abstractmethod
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """Return the name and the values of each column."""

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row for each item or document.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ConfigError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(dict(self.columns()))

    def _repr_html_(self) -> str:
        """Return the first SHOWN_ROWS rows as an HTML table, which notebooks show."""
        columns = self.columns()
        total = max((len(values) for values in columns.values()), default=0)
        head = "".join(f"<th>{escape(str(name))}</th>" for name in columns)
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{_cell(values[i])}</td>" for values in columns.values())
            + "</tr>"
            for i in range(min(total, SHOWN_ROWS))
        )
        more = f"<p>{total - SHOWN_ROWS} more rows</p>" if total > SHOWN_ROWS else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Return names of columns that differ from each other and from those taken.

    One that repeats an earlier name gets a number: "yes", "yes (2)".
    """
    found, used = [], set(taken)
    for name in names:
        numbered = (f"{name} ({number})" for number in count(2))
        found.append(next(one for one in chain([name], numbered) if one not in used))
        used.add(found[-1])
    return found


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))

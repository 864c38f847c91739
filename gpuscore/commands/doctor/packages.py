"""The installed packages, against what gpuscore's own package asks for."""

import operator
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from gpuscore import __version__
from gpuscore.commands.doctor.finding import Finding

EXTRAS = ("batch", "client", "eval", "jax", "otel", "parity", "ray")  # those of users


def installed() -> Iterator[Finding]:
    """Compare what is installed with what gpuscore's package asks for."""
    lines = requires("gpuscore") or []
    wrong = [line for line in map(unmet, lines) if line]
    if wrong:
        remedy = "install gpuscore again in a new virtual environment"
        yield Finding("packages", "problem", "; ".join(wrong), remedy)
    else:
        yield Finding("packages", "OK", f"gpuscore {__version__}, torch {version('torch')}")
    yield Finding("extras", "OK", ", ".join(f"{name} {_extra(name, lines)}" for name in EXTRAS))


def _extra(name: str, lines: Sequence[str]) -> str:
    """Return yes if everything is there that an extra asks for, or no with what is not."""
    asked = [line.partition(";")[0] for line in lines if re.search(rf"extra == .{name}\b", line)]
    wrong = [line for line in map(unmet, asked) if line]
    return f"no ({'; '.join(wrong)})" if wrong else "yes"


def unmet(line: str) -> str | None:
    """Return what is wrong about a requirement; None if it is met or belongs to an extra."""
    wanted, _, marker = line.partition(";")
    if "extra ==" in marker:
        return None
    name = re.split(r"[^\w.-]", wanted)[0]
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} is missing"
    limits = [(sign, limit) for sign, limit in _LIMIT.findall(wanted)]
    if all(_KEEPS[sign](_release(found), _release(limit)) for sign, limit in limits):
        return None
    return f"{name} is {found}, supported: {', '.join(sign + limit for sign, limit in limits)}"


# The signs that pyproject.toml uses.
_KEEPS = {">=": operator.ge, "<": operator.lt, "==": operator.eq}
_LIMIT = re.compile(r"(>=|<|==)\s*([\d.]+)")
_PARTS = 4  # of a release, so that 2.11 equals 2.11.0


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what a build adds to them."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text)[0])]
    return tuple([*numbers, *[0] * _PARTS][:_PARTS])

"""The reference pages of the Python API: signatures and docstrings of exported names."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import TypeAlias

from generate.markdown import block, code, page, table
from generate.settings import explained
from gpuscore.config import ModelConfig
from gpuscore.config.options import Option, options

RESULTS = ("Scores", "Ranking", "PairScores", "Classification", "ItemError")
CALL_OPTIONS = ("ScoreOptions", "FamilyOptions", "ClassifyOptions")
CLIENT = (
    "Client",
    "AsyncClient",
    "ClientError",
    "StatusError",
    "ConnectionFailed",
    "BadAnswer",
)
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):\n")
ARGUMENT = re.compile(r", (?=[*\w]+(?:[:=,]|$))")
WIDTH = 96
Method: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def pages() -> Iterator[tuple[str, str]]:
    yield (
        "scorer.md",
        page(
            "Scorer in Python",
            "`Scorer` scores in the same process, without a server.",
            *_classes("gpuscore.offline.scorer", ("Scorer",)),
            *_classes("gpuscore.types.call_arguments", CALL_OPTIONS),
            *_classes("gpuscore.offline.results", RESULTS),
            "## ModelConfig",
            "`gpuscore.config.ModelConfig` is a frozen dataclass with the settings of a model and "
            "its device. `Scorer` takes the same fields as keyword arguments.",
            table(("field", "type", "default", "meaning"), map(_row, options(ModelConfig))),
        ),
    )
    yield (
        "client.md",
        page(
            "Python client",
            "These are the clients of a gpuscore server. The base [install](../install.md) brings "
            "all that they need. Neither client imports torch. A method takes the fields of its "
            "route's body by their names, and returns the route's answer as a struct with the "
            "names of the JSON: [score](../dialects/score.md), [rerank](../dialects/rerank.md), "
            "[classify](../dialects/classify.md), [completions](../dialects/completions.md).",
            *_classes("gpuscore.client", CLIENT),
        ),
    )


def _row(option: Option) -> tuple[str, str, str, str]:
    kind = option.kind.__name__
    default = code("None" if option.default is None else repr(option.default))
    unset = f": {option.unset}" if option.unset else ""
    optional = f"{kind} or None" if option.default is None else kind
    return code(option.name), optional, default + unset, explained(option)


def _classes(module: str, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        kind = getattr(importlib.import_module(module), name)
        yield f"## {name}"
        yield f"Class {code(f'{kind.__module__}.{kind.__qualname__}')}"
        methods = _methods(kind)
        if "__init__" in methods:
            yield _signature(name, methods.pop("__init__"))
        yield from documented(inspect.getdoc(kind) or "")
        for method in methods.values():
            if (said := ast.get_docstring(method)) and not method.name.startswith("_"):
                yield f"### {name}.{method.name}"
                yield _signature(method.name, method)
                yield from documented(said)


def _methods(kind: type) -> dict[str, Method]:
    """Return the methods that a class and its bases in gpuscore define, bases' methods first."""
    methods: dict[str, Method] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("gpuscore"):
            methods |= {node.name: node for node in _body(base) if isinstance(node, Method)}
    return methods


@cache
def _body(kind: type) -> list[ast.stmt]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)  # noqa: S101 - what the source of a class is
    return node.body


def _signature(name: str, method: Method) -> str:
    """Return a method's arguments as in its source; one a line if they are many."""
    arguments = ast.unparse(method.args).removeprefix("self").removeprefix(", ").removeprefix("/, ")
    result, begin = "", ""
    if name == method.name:
        begin = "async def " if isinstance(method, ast.AsyncFunctionDef) else "def "
        result = f" -> {ast.unparse(method.returns)}" if method.returns else ""
    line = f"{begin}{name}({arguments}){result}"
    if len(line) > WIDTH:
        rows = "".join(f"    {argument},\n" for argument in ARGUMENT.split(arguments))
        line = f"{begin}{name}(\n{rows}){result}"
    return block("python", line)


def documented(docstring: str) -> Iterator[str]:
    """Yield a docstring's paragraphs, and its sections as lists."""
    for part in docstring.split("\n\n"):
        if not (section := SECTION.match(part)):
            yield part
            continue
        rows = re.split(r"\n(?=\S)", textwrap.dedent(part[section.end() :]))
        items = [" ".join(row.split()) for row in rows]
        yield f"**{section[1]}**"
        yield "\n".join(re.sub(r"^([*\w, ]+): ", r"- `\1`: ", item) for item in items)

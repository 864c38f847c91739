"""The reference pages of the Python API: exported names, which mkdocstrings fills in."""

from collections.abc import Iterator

import gpuscore
import gpuscore.client
from generate.markdown import code, page, table
from generate.settings import explained
from gpuscore.config import ModelConfig
from gpuscore.config.options import Option, options

RESULTS = ("Scores", "Ranking", "PairScores", "Classification")
CALL_OPTIONS = ("ScoreOptions", "FamilyOptions", "ClassifyOptions")
OPTIONS = ("ClientOptions", "RequestOptions", "PromptOptions")
QUESTIONS = ("Predicate", "Noul", "Choice", "Rating", "Decision", "TypedAnswer")


def pages() -> Iterator[tuple[str, str]]:
    yield (
        "scorer.md",
        page(
            "Scorer in Python",
            "`Scorer` and `AsyncScorer` score in the same process, without a server.",
            "::: gpuscore.offline.scorer.Scorer",
            "::: gpuscore.offline.scorer.AsyncScorer",
            *(f"::: gpuscore.types.call_arguments.{name}" for name in CALL_OPTIONS),
            *(f"::: gpuscore.types.results.{name}" for name in RESULTS),
            "::: gpuscore.types.results.ItemError",
            *(f"::: gpuscore.types.questions.{name}" for name in QUESTIONS),
            "## ModelConfig",
            "`gpuscore.config.ModelConfig` is a frozen dataclass with the settings of a model and "
            "its device. `Scorer` takes the same fields as keyword arguments.",
            table(("field", "type", "default", "meaning"), map(_row, options(ModelConfig))),
        ),
    )
    names = [name for name in gpuscore.client.__all__ if name not in ("Client", "AsyncClient")]
    yield (
        "client.md",
        page(
            "Python client",
            "These are the clients of a gpuscore server. `pip install gpuscore` brings all "
            "that they need. Neither client imports torch.",
            *(_item(name) for name in ("Client", "AsyncClient", *names)),
            "::: gpuscore.client.results.FromServer",
            *(f"::: gpuscore.client.options.{name}" for name in OPTIONS),
        ),
    )


def _row(option: Option) -> tuple[str, str, str, str]:
    kind = option.kind.__name__
    default = code("None" if option.default is None else repr(option.default))
    unset = f": {option.unset}" if option.unset else ""
    optional = f"{kind} or None" if option.default is None else kind
    return code(option.name), optional, default + unset, explained(option)


def _item(name: str) -> str:
    kind = getattr(gpuscore.client, name)
    return f"::: {kind.__module__}.{kind.__qualname__}"

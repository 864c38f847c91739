"""Reference of the Python API: what the packages export, for mkdocstrings to fill in."""

from collections.abc import Iterator

import gpuscore
import gpuscore.client
from generate.markdown import page


def pages() -> Iterator[tuple[str, str]]:
    yield (
        "scorer.md",
        page(
            "Scorer in Python",
            "Scores in the same process, without a server.",
            "::: gpuscore.scorer.Scorer",
            "::: gpuscore.scorer.Scores",
            "::: gpuscore.config.ModelConfig",
        ),
    )
    names = [name for name in gpuscore.client.__all__ if name not in ("Client", "AsyncClient")]
    yield (
        "client.md",
        page(
            "Python client",
            "Clients of a gpuscore server. `pip install 'gpuscore[client]'` adds httpx; neither "
            "client imports torch.",
            *(_item(name) for name in ("Client", "AsyncClient", *names)),
            "::: gpuscore.client.options.ClientOptions",
            "::: gpuscore.client.calls.ScoreOptions",
            "::: gpuscore.client.calls.RerankOptions",
        ),
    )


def _item(name: str) -> str:
    kind = getattr(gpuscore.client, name)
    return f"::: {kind.__module__}.{kind.__qualname__}"

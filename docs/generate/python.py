"""The reference pages of the Python API: exported names, which mkdocstrings fills in."""

from collections.abc import Iterator

import gpuscore
import gpuscore.client
from generate.markdown import page


def pages() -> Iterator[tuple[str, str]]:
    yield (
        "scorer.md",
        page(
            "Scorer in Python",
            "`Scorer` computes scores in the same process, without a server.",
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
            "These are the clients of a gpuscore server. `pip install 'gpuscore[client]'` adds "
            "httpx. Neither client imports torch.",
            *(_item(name) for name in ("Client", "AsyncClient", *names)),
            "::: gpuscore.client.options.ClientOptions",
            "::: gpuscore.client.calls.ScoreOptions",
            "::: gpuscore.client.calls.RerankOptions",
        ),
    )


def _item(name: str) -> str:
    kind = getattr(gpuscore.client, name)
    return f"::: {kind.__module__}.{kind.__qualname__}"

"""Promise: at start on an accelerator, attention that differs from the mask rule is refused."""

from dataclasses import replace

import numpy as np
import pytest

from gpuscore.backends import plan_backend
from gpuscore.backends.common import known_answer as common
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.types.batch import visible_rows
from support.backends import needs_jax
from support.slow import slow

pytestmark = needs_jax


@pytest.fixture
def check(tiny_model):
    """check(attention, windowed) -> runs the check of that attention on this CPU."""
    from gpuscore.backends.jax.known_answer import TOKENS, check_known_answer

    def run(attends, window=None, name="xla"):
        directory, _ = tiny_model("qwen3")
        plan = plan_backend(directory, ModelConfig(backend="jax", dtype="float32"))
        plan = replace(plan, pages=replace(plan.pages, size=64))
        model = replace(plan.architecture.config, windows=(window, None))
        sizes = replace(plan, attention=name).size(TOKENS)
        check_known_answer(
            name, attends, model, plan.heads, "float32", plan.device, sizes, plan.pages.size
        )

    return run


def attends_of(name):
    from gpuscore.backends.jax.attention import XlaAttend
    from gpuscore.backends.jax.kernel import PallasAttend

    return PallasAttend(interpret=True) if name == "pallas" else XlaAttend()


@pytest.mark.parametrize(
    ("name", "window"), [("pallas", 21), *slow(("xla", None), ("xla", 21), ("pallas", None))]
)
def test_a_right_answer(check, name, window):
    check(attends_of(name), window, name)


class Wrong:
    """XLA's attention with one argument changed."""

    def __init__(self, change):
        self.right, self.change = attends_of("xla"), change
        self.form, self.plain = self.right.form, self.right.plain

    def __call__(self, attention, tables, tiles, count, pool, layer, window, q, kv):
        arguments = {"tables": tables, "window": window, "layer": layer}
        tables, window, layer = (arguments | self.change(**arguments)).values()
        return self.right(attention, tables, tiles, count, pool, layer, window, q, kv)


@pytest.mark.parametrize(
    "change",
    [
        lambda tables, **_: {"tables": tables._replace(seen_until=tables.seen_until + 1)},
        *slow(
            lambda tables, **_: {"tables": tables._replace(prefix_lens=tables.prefix_lens - 1)},
            lambda tables, **_: {"tables": tables._replace(pages=tables.pages * 0)},
            lambda layer, **_: {"layer": layer - 1},
            lambda window, **_: {"window": window + 1},
        ),
    ],
)
def test_a_wrong_answer_is_seen(check, change):
    with pytest.raises(ConfigError, match="--attention xla computes something else"):
        check(Wrong(change), window=21)


def test_pages_that_are_written_wrong_are_seen(check, monkeypatch):
    from gpuscore.backends.jax import known_answer

    store = known_answer.store
    monkeypatch.setattr(
        known_answer,
        "store",
        lambda attention, tables, *rest: store(
            attention, tables._replace(run_slots=tables.run_slots ^ 1), *rest
        ),
    )
    with pytest.raises(ConfigError, match="writes other keys and values"):
        check(attends_of("xla"))


@pytest.mark.slow
def test_the_rule_itself_is_asked(check, monkeypatch):
    def blind_to_parents(batch):
        return visible_rows(replace(batch, parent=np.full_like(batch.parent, -1)))

    monkeypatch.setattr(common, "visible_rows", blind_to_parents)
    with pytest.raises(ConfigError, match="--attention xla computes something else"):
        check(attends_of("xla"))

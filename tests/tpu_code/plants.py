"""Defects planted in the backend, compiled for a TPU that is not there, and what the gate says.

python -P -m tpu_code.plants      # one line of JSON: complaints by defect
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

from tpu_code import environment  # noqa: F401  (before JAX is imported)

import jax  # isort: skip
import jax.numpy as jnp
from jax import Array, lax

from gpuscore.backends.jax import programs
from gpuscore.backends.jax.attention import Attention, Pool
from gpuscore.backends.jax.layout import Tables
from tpu_code import cases
from tpu_code.check import planned_of
from tpu_code.chips import CHIPS
from tpu_code.facts import Facts, measure
from tpu_code.rules import Row, complaints, row

OUTSIDE = 2**30  # no slot: a write there is dropped


def complaints_of(plant: AbstractContextManager[Any], known: Row | None) -> tuple[list[str], Row]:
    """Compile a small program with a defect; return what is wrong, and its row of a baseline."""
    cases.plan_of.cache_clear()
    cases.traced_programs.cache_clear()
    with plant:
        case = next(cases.cases([cases.SMALL]))
        facts = measure(case, None)
        if not isinstance(facts, Facts):
            return [facts], {}
        known = known or row(facts)
        return (
            complaints(facts, planned_of(case), CHIPS[case.chip], known, extends=True),
            row(facts),
        )


def scattered(attention: Attention, tables: Tables, pool: Pool, layer: Array, kv: Array) -> Pool:
    """Write each row that is kept to its slot, as before pages were written."""
    row, size = jnp.arange(len(tables.token_ids)), pool.pages.shape[2]
    run = jnp.searchsorted(tables.run_rows, row, side="right") - 1
    behind = row - tables.run_rows[run]
    kept = (run < tables.numbers.runs[0]) & (behind < tables.run_lens[run])
    slot = jnp.where(kept, tables.run_slots[run] + behind, OUTSIDE)
    rows = kv[attention.front : attention.front + len(row)].astype(pool.pages.dtype)
    page, offset = lax.div(slot, size), lax.rem(slot, size)
    return Pool(pool.pages.at[layer, page, offset].set(rows, mode="drop"))


def copied(attention: Attention, tables: Tables, pool: Pool, layer: Array, kv: Array) -> Pool:
    """Store, but need the pages of before as well."""
    stored = programs.store.before(attention, tables, pool, layer, kv)  # type: ignore[attr-defined]
    after, before = lax.optimization_barrier((stored.pages, pool.pages))  # type: ignore[no-untyped-call]
    return Pool(jnp.where(tables.numbers.runs[0] > 0, after, before))


@contextmanager
def stores(function: Callable[..., Pool]) -> Iterator[None]:
    planted = partial(function)
    planted.before = programs.store  # type: ignore[attr-defined]
    with mock.patch.object(programs, "store", planted):
        yield


@contextmanager
def kept_arguments() -> Iterator[None]:
    """Jit without donating the pool."""
    jit = jax.jit
    with mock.patch.object(jax, "jit", lambda function, **options: jit(function)):
        yield


PLANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "scatter": lambda: stores(scattered),
    "copy": lambda: stores(copied),
    "not donated": kept_arguments,
}


def main() -> int:
    complaints_by_plant, known = {}, None
    for name, plant in PLANTS.items():
        complaints_by_plant[name], got = complaints_of(plant(), known)
        known = known or got
        print(f"{name}: {complaints_by_plant[name]}", file=sys.stderr, flush=True)
    print(json.dumps(complaints_by_plant))
    return 0


if __name__ == "__main__":
    sys.exit(main())

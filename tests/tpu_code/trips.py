"""Runs a program on a batch without its floating-point numbers: counts how often each loop and
branch runs, and what Pallas kernels do.

XLA cannot know these counts, because the bounds of loops are data. `layout.py` gives them for a
batch, so all operations on integers are computed here, as far as they are bounds, indices or page
lists; everything else is a shape.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from jax._src import source_info_util  # no public name tells where an equation comes from

from tpu_code.hlo import Frames, Where
from tpu_code.integers import Value, evaluate, known
from tpu_code.kernel_memory import Memory, read, write
from tpu_code.tally import (
    MOVES,
    TRANSCENDENTAL,
    Kernel,
    Product,
    Tally,
    padded_elements,
    product_of,
)

MOST_TRIPS = 10_000_000
MOST_FRAMES = 10  # that JAX gives to XLA (jax_traceback_in_locations_limit)
OF_MEMORY = {"get", "swap", "addupdate"}
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "checkpoint": "jaxpr"}


class Uncountable(Exception):
    """A bound or a condition depends on numbers that are not computed."""


def count(jaxpr: Any, arguments: Sequence[Any]) -> Tally:
    """Count the work of a program.

    Args:
        jaxpr: closed, of the traced program.
        arguments: its flat arguments; arrays of integers are computed with, of others only the
            shapes are.

    Raises:
        Uncountable: a bound of a loop is not known.
    """
    walk = _Walk()
    values = [np.asarray(one) if _integers(one) else None for one in arguments]
    walk.run(jaxpr.jaxpr, _consts(jaxpr), values, Where())
    return walk.tally


@cache  # equations hash by identity
def frames_of(eqn: Any) -> Frames:
    """Return the functions of our source that an equation comes from, the innermost first."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return tuple((frame.function_name, frame.start_line) for frame in frames)[:MOST_FRAMES]


def loop_places(jaxpr: Any) -> list[Frames]:
    """Return the place of each loop and condition in our source."""
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name in ("while", "scan", "cond"):
            found.append(frames_of(eqn))
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(one, "jaxpr", one), "eqns"):
                    found += loop_places(one)
    return found


def inside(eqn: Any, turn: int, around: Where) -> Where:
    """Return the place of what an equation runs; XLA repeats frames, so each is named once."""
    frames = tuple(dict.fromkeys((*frames_of(eqn), *around.frames)))
    return Where(frames, (*around.turns, turn) if turn else around.turns)


class _Body:
    """A jaxpr: equations that have to be run, and the constant work of all others."""

    def __init__(self, jaxpr: Any) -> None:
        self.steps: list[Any] = []
        self.products: Counter[Product] = Counter()
        self.lanes = self.transcendental = 0
        self.turns: dict[int, int] = {}  # of a loop or condition, see `Where`
        counts: Counter[tuple[bool, Frames]] = Counter()
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("while", "scan", "cond"):
                key = (eqn.primitive.name == "cond", frames_of(eqn))
                self.turns[id(eqn)] = counts[key]
                counts[key] += 1
            if not self._constant(eqn):
                self.steps.append(eqn)

    def _constant(self, eqn: Any) -> bool:
        """Count an equation whose results are never bounds; return whether it is one."""
        name = eqn.primitive.name
        if name in CALLS:
            inner = _body(eqn.params[CALLS[name]].jaxpr)
            if inner.steps:
                return False
            self.products.update(inner.products)
            self.lanes += inner.lanes
            self.transcendental += inner.transcendental
            return True
        if name in OF_MEMORY:
            return not known(getattr(eqn.invars[0].aval, "inner_aval", eqn.invars[0].aval))
        if hasattr(_Walk, f"_{name}"):
            return False
        if any(hasattr(value, "eqns") or hasattr(value, "jaxpr") for value in eqn.params.values()):
            raise Uncountable(f"{name} has a body that is not known here, at {_place(eqn)}")
        self._work(name, eqn)
        return not any(known(out.aval) for out in eqn.outvars)

    def _work(self, name: str, eqn: Any) -> None:
        if name == "dot_general":
            product, times = product_of(eqn.params, *(one.aval for one in eqn.invars))
            self.products[product] += times
        elif name not in MOVES:
            reduces = name.startswith(("reduce", "arg", "cum"))
            shaped = eqn.invars[0] if reduces or not eqn.outvars else eqn.outvars[0]
            elements = padded_elements(getattr(shaped.aval, "shape", ()))
            self.lanes += elements
            if name in TRANSCENDENTAL:
                self.transcendental += elements


@cache  # jaxprs hash by identity
def _body(jaxpr: Any) -> _Body:
    return _Body(jaxpr)


class _Walk:
    def __init__(self) -> None:
        self.tally = Tally()
        self.kernel: Kernel | None = None  # whose body runs
        self.programs: tuple[int, ...] = ()  # of the grid
        self.grid: tuple[int, ...] = ()

    def run(
        self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], path: Where
    ) -> list[Any]:
        """Run equations; `values` are arrays, None or a kernel's `Memory`."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, values, strict=True))

        def value(one: Any) -> Any:
            if not hasattr(one, "val"):
                return env.get(one)
            return np.asarray(one.val) if np.isscalar(one.val) else one.val

        body = _body(jaxpr)
        if self.kernel is None:
            self.tally.products.update(body.products)
        else:
            self.kernel.products.update(body.products)
            self.kernel.lanes += body.lanes
            self.kernel.transcendental += body.transcendental
        for eqn in body.steps:
            turn = body.turns.get(id(eqn))
            there = path if turn is None else inside(eqn, turn, path)
            outputs = self.one(eqn, [value(one) for one in eqn.invars], there)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [value(one) for one in jaxpr.outvars]

    def one(self, eqn: Any, inputs: list[Any], path: Where) -> Sequence[Any]:
        name = eqn.primitive.name
        if (special := getattr(self, f"_{name}", None)) is not None:
            found: Sequence[Any] = special(eqn, inputs, path)
            return found
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            return self.run(inner.jaxpr, _consts(inner), inputs, path)
        return [self._value(eqn, inputs, out.aval) for out in eqn.outvars]

    def _value(self, eqn: Any, inputs: list[Any], aval: Any) -> Value:
        if len(eqn.outvars) > 1 or not known(aval):
            return None
        if not all(_integers(one) for one in inputs):
            return None
        arrays = [np.asarray(one) for one in inputs]
        found = evaluate(eqn.primitive.name, arrays, eqn.params, aval)
        if found is None and eqn.primitive.name == "gather":
            return np.asarray(eqn.primitive.bind(*arrays, **eqn.params))
        return found

    def _platform_index(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        names = eqn.params["platforms"]
        default = next(place for place, one in enumerate(names) if one is None)
        fitting = (place for place, one in enumerate(names) if one is not None and "tpu" in one)
        return [np.int32(next(fitting, default))]

    def _cond(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        index, *operands = inputs
        if index is None:
            raise Uncountable(f"the branch is not known at {_place(eqn)}")
        branch = min(int(index), len(eqn.params["branches"]) - 1)
        if self.kernel is None:
            self.tally.branches[path, branch] += 1
        chosen = eqn.params["branches"][branch]
        return self.run(chosen.jaxpr, _consts(chosen), operands, path)

    def _while(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        params = eqn.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_cond, of_body, state = inputs[:first], inputs[first:second], list(inputs[second:])
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        self._ran(path, 0)
        for _ in range(MOST_TRIPS):
            (more,) = self.run(test.jaxpr, _consts(test), [*of_cond, *state], path)
            if more is None:
                raise Uncountable(f"the bound of a loop is not known at {_place(eqn)}")
            if not more:
                return state
            self._ran(path)
            state = self.run(body.jaxpr, _consts(body), [*of_body, *state], path)
        raise Uncountable(f"a loop runs over {MOST_TRIPS:,} times at {_place(eqn)}")

    def _scan(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        params = eqn.params
        first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, state, each = inputs[:first], list(inputs[first:second]), inputs[second:]
        body, length = params["jaxpr"], params["length"]

        def run(index: int, state: list[Any]) -> list[Any]:
            at = length - 1 - index if params["reverse"] else index
            now = [None if one is None else np.asarray(one)[at] for one in each]
            self._ran(path)
            done = self.run(body.jaxpr, _consts(body), [*consts, *state, *now], path)
            return done[: len(state)]

        if length > 3 and self.kernel is None and self._alike(run, length, state):
            state = [None] * len(state)  # a body that reads a counter afterwards is Uncountable
        else:
            for index in range(length):
                state = run(index, state)
        return [*state, *[None] * (len(eqn.outvars) - len(state))]

    def _alike(self, run: Any, length: int, state: list[Any]) -> bool:
        """Run the first, middle and last iteration; if they agree, count all as the first.

        They agree if they do the same work and move known numbers by the same steps, as the
        counter of a loop.
        """
        whole, found = self.tally, []
        steps: list[Any] = [0] * len(state)  # a number, or None if a step is no number
        for index in (0, length // 2, length - 1):
            self.tally = Tally()
            now = [
                None if one is None else one + np.asarray(step * index, one.dtype)
                for one, step in zip(state, steps, strict=True)
            ]
            moved = [_step(*pair) for pair in zip(now, run(index, now), strict=True)]
            steps = moved if not index else steps
            found.append(self.tally if moved == steps else None)
            if None in moved:
                break
        self.tally = whole
        if len(found) < 3 or found[0] is None or not found[0] == found[1] == found[2]:
            return False
        whole.add(found[0], length)
        return True

    def _ran(self, place: Where, times: int = 1) -> None:
        if self.kernel is None:
            self.tally.loops[place] += times

    def _pallas_call(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        from tpu_code.kernel_calls import run_kernel  # it calls back into this walk

        name = str(eqn.params.get("name") or eqn.params["jaxpr"].debug_info.func_name)
        self.kernel = self.tally.kernels.setdefault(name, Kernel())
        self.kernel.calls += 1
        run_kernel(self, eqn, inputs, path)
        self.kernel = None
        return [None] * len(eqn.outvars)

    def _program_id(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        return [np.int32(self.programs[eqn.params["axis"]])]

    def _num_programs(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        return [np.int32(self.grid[eqn.params["axis"]])]

    def _get(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        return [read(eqn, inputs)]

    def _swap(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        return [write(eqn, inputs)]

    def _addupdate(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        memory = inputs[0]
        assert isinstance(memory, Memory)
        memory.value = None
        return []

    def _dma_start(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        assert self.kernel is not None
        source, *_ = eqn.params["tree"].unflatten([one.aval for one in eqn.invars])
        itemsize = np.dtype(source.dtype).itemsize
        self.kernel.copied += int(np.prod(source.shape, dtype=np.int64)) * itemsize
        return []

    def _run_scoped(self, eqn: Any, inputs: list[Any], path: Where) -> list[Any]:
        inner = eqn.params["jaxpr"]
        scratch = [Memory.empty(one.aval) for one in inner.invars]
        return self.run(inner, inputs, scratch, path)


def _integers(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iub"


def _step(before: Any, after: Any) -> int | None:
    """Return by how much a number grows in an iteration; None if it is no number, or unknown."""
    if before is None:
        return 0
    if after is None or np.ndim(before):
        return 0 if after is not None and np.array_equal(before, after) else None
    return int(after) - int(before)


def _consts(closed: Any) -> list[Any]:
    return [np.asarray(one) if known(one) else None for one in closed.consts]


def _place(eqn: Any) -> str:
    return " < ".join(f"{function}:{line}" for function, line in frames_of(eqn)[:3])

"""Operators on `Card`s: each runs on the CPU memory behind them, and is recorded.

As on a device, host and device memory may not be mixed, a copy from pageable memory makes the
thread wait, and so does whatever brings a number to the host.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.streams.checker import Span
from support.streams.recorder import Block, Recorder
from support.streams.tensors import DEVICE, Card, Pinned, pin_as, spans_of

aten = torch.ops.aten

# Results whose number of elements, or value, the host has to know.
SYNCHRONISING = {"nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero"}
UNTOUCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
MIXED = {"index", "index_put", "index_put_"}  # take indices on the host


@dataclass(frozen=True, slots=True)
class Rule:
    """The part of an operator's schema that counts here."""

    written: tuple[int | str, ...]  # arguments, by position or keyword
    may_view: bool  # its result may share an argument's memory
    waits: bool  # it makes the host wait
    mixed: bool  # it takes host tensors beside device tensors
    writes_nothing: bool  # its result is memory that nothing has written


def rule_of(func: Any) -> Rule:
    name = func._schema.name.removeprefix("aten::")
    written = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = any(result.alias_info is not None for result in func._schema.returns)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    return Rule(
        written,
        may_view=aliases or composite,
        waits=name in SYNCHRONISING,
        mixed=name in MIXED,
        writes_nothing=name in UNTOUCHED,
    )


class Dispatch(TorchDispatchMode):
    """Runs operators on the memory behind `Card`s; every thread has to enter one."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self._rules: dict[Any, Rule] = {}
        self._special: dict[Any, Callable[..., Any]] = {
            aten.copy_.default: self._copy,
            aten._to_copy.default: self._to_copy,
            aten._local_scalar_dense.default: self._scalar,
            aten.pin_memory.default: self._pin,
            aten._pin_memory.default: self._pin,
        }
        for overload in aten.to.overloads():
            self._special[getattr(aten.to, overload)] = partial(
                self._decomposed, getattr(aten.to, overload)
            )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        special = self._special.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = rule_of(func)
        return self._run(func, rule, args, dict(kwargs or {}))

    def _run(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in _flat((*args, *kwargs.values())) if isinstance(x, Tensor)]
        cards = [x for x in tensors if type(x) is Card]
        device = kwargs.get("device")
        if device is None:
            on_card = bool(cards)
        else:
            on_card = torch.device(device).type == "cuda"
            kwargs["device"] = torch.device("cpu")
        pin = kwargs.pop("pin_memory", None)
        if not on_card:
            return self._on_host(func, rule, args, kwargs, tensors, pin)
        if not rule.mixed and any(x.dim() for x in tensors if not isinstance(x, Card)):
            raise RuntimeError(f"{func}: expected all tensors to be on {DEVICE}, found some on cpu")
        inner, options = _inner(args), {name: _inner(x) for name, x in kwargs.items()}
        if rule.written:
            return self._in_place(func, rule, args, kwargs, cards, partial(func, *inner, **options))
        result = func(*inner, **options)
        return self._wrapped(func, rule, cards, result, partial(func, *inner, **options))

    def _in_place(
        self, func: Any, rule: Rule, args: Any, kwargs: Any, cards: list[Card], again: Any
    ) -> Any:
        written = [kwargs[at] if isinstance(at, str) else args[at] for at in rule.written]
        reads, writes = _spans(cards), _spans(x for x in _flat(written) if isinstance(x, Card))
        if not self.recorder.launch(str(func), reads, writes, again):
            again()
        return written[0] if len(written) == 1 else tuple(written)

    def _wrapped(
        self, func: Any, rule: Rule, cards: list[Card], result: Any, again: Callable[[], Any]
    ) -> Any:
        """Return an operator's result on the device; record what it read and wrote."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        wrapped: list[Any] = []
        fresh: list[Card] = []
        for tensor in results:
            block = _block_of(tensor, cards) if rule.may_view else None
            if block is None and isinstance(tensor, Tensor):
                fresh.append(self.place(tensor))
                wrapped.append(fresh[-1])
            else:
                wrapped.append(Card(tensor, block) if block is not None else tensor)
        if fresh and not rule.writes_nothing:
            places = [card.inner for card in fresh]
            self.recorder.launch(
                str(func), _spans(cards), _spans(fresh), lambda: _refill(places, again())
            )
        if rule.waits:
            self.recorder.synchronise(self.recorder.stream)
        return wrapped[0] if results is not result else type(result)(wrapped)

    def place(self, inner: Tensor) -> Card:
        """Return device memory that holds `inner`, whose storage no other tensor has."""
        return Card(inner, self.recorder.allocate(inner))

    def _on_host(
        self, func: Any, rule: Rule, args: Any, kwargs: Any, tensors: list[Tensor], pin: Any
    ) -> Any:
        if any(isinstance(x, Card) for x in tensors):
            raise NotImplementedError(f"{func} from the device to the host")
        result = func(*args, **kwargs)
        if pin:
            return self._pinned(result)
        if any(isinstance(x, Pinned) for x in tensors) and not rule.may_view:
            written = [kwargs[at] if isinstance(at, str) else args[at] for at in rule.written]
            writes = [s for x in written if isinstance(x, Pinned) for s in x.spans()]
            reads = [s for x in tensors if isinstance(x, Pinned) for s in x.spans()]
            self.recorder.host(str(func), reads, writes)
        return result

    # ---- operators with a meaning of their own ----

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not isinstance(to, Card) and not isinstance(source, Card):
            return self._run(aten.copy_.default, rule_of(aten.copy_.default), (to, source), {})
        again = partial(aten.copy_.default, _inner(to), _inner(source))
        sides = (spans_of(source), spans_of(to))
        if not self.recorder.launch(_name_of_copy(to, source), *sides, again):
            again()
        self._wait_for_copy(to, source, non_blocking)
        return to

    def _wait_for_copy(self, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Wait as torch and cudaMemcpyAsync do.

        A copy from pageable memory that need not block returns once that was read, and one to
        pageable memory once it is done.
        """
        if isinstance(to, Card) and (isinstance(source, Card) or non_blocking):
            return
        if not (isinstance(to, Pinned) and non_blocking):
            self.recorder.synchronise(self.recorder.stream)

    def _to_copy(
        self, x: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any
    ) -> Tensor:
        target = x.device if device is None else torch.device(device)
        options.pop("pin_memory", None)
        moved = aten._to_copy.default(_inner(x), device=torch.device("cpu"), **options)
        if target.type == "cpu" and not isinstance(x, Card):
            return moved
        again = partial(aten._to_copy.default, _inner(x), device=torch.device("cpu"), **options)
        if target.type == "cpu":
            self.recorder.launch("copy to the host", spans_of(x), (), again)
            self.recorder.synchronise(self.recorder.stream)
            return moved
        card = self.place(moved)
        refill = lambda: _refill([card.inner], again())  # noqa: E731
        self.recorder.launch(_name_of_copy(card, x), spans_of(x), [card.span], refill)
        self._wait_for_copy(card, x, non_blocking)
        return card

    def _scalar(self, x: Tensor) -> Any:
        if isinstance(x, Card):
            self.recorder.launch("a number for the host", [x.span], (), lambda: None)
            self.recorder.synchronise(self.recorder.stream)
        return aten._local_scalar_dense.default(_inner(x))

    def _pin(self, x: Tensor, device: Any = None) -> Tensor:
        return self._pinned(x.clone())

    def _pinned(self, memory: Tensor) -> Pinned:
        self.recorder.pin(memory)
        return pin_as(memory, self.recorder)

    def _decomposed(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        with self:
            return func.decompose(*args, **kwargs)


def _name_of_copy(to: Tensor, source: Tensor) -> str:
    if isinstance(to, Card) and isinstance(source, Card):
        return "copy on the device"
    return "copy to the device" if isinstance(to, Card) else "copy to the host"


def _spans(cards: Iterable[Card]) -> list[Span]:
    return [card.span for card in cards]


def _block_of(result: Any, cards: Sequence[Card]) -> Block | None:
    """Return the memory that a result shares with an argument, if it does."""
    if not isinstance(result, Tensor):
        return None
    shared = (card.block for card in cards if torch._C._is_alias_of(result, card.inner))
    return next(shared, None)


def _refill(places: Sequence[Tensor], results: Any) -> None:
    """Put a repeated operator's results into the memory that a graph gave to the first ones."""
    for place, result in zip(
        places, results if isinstance(results, (tuple, list)) else (results,), strict=True
    ):
        place.copy_(result)


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _inner(value: Any) -> Any:
    kind = type(value)  # asked for first, because most values are numbers
    if kind is Card:
        return value.inner
    if kind is Pinned:
        return value.plain()
    if kind is list or kind is tuple:
        return kind([_inner(x) for x in value])
    return value

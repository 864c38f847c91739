"""References of what torch has for CUDA only: FlashAttention, FlexAttention, its profiler."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import flex_attention as flex
from torch.utils._device import _device_constructors

from support.streams.tensors import Card

if TYPE_CHECKING:
    from support.stub_card.card import Player

aten = torch.ops.aten
Place = Callable[[Tensor], Card]
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def own_operators(place: Place, player: "Player") -> Mapping[Any, Callable[..., Any]]:
    """Return, by operator, what runs on the CPU memory of cards and places its results."""

    def placed(operator: Any, compute: Callable[..., tuple[Tensor, Tensor]]) -> Any:
        others = [isinstance(one.type, torch.TensorType) for one in operator._schema.returns[2:]]

        def run(*args: Any, **options: Any) -> tuple[Any, ...]:
            again = partial(compute, *(x.inner if isinstance(x, Card) else x for x in args))
            results = [place(one) for one in again(**options)]
            player.launch("flash attention", (), (), lambda: _refill(results, again(**options)))
            return (*results, *(place(torch.empty(0)) if tensor else 0 for tensor in others))

        return run

    references = {
        aten._flash_attention_forward.default: attention_of_sequences,
        aten._scaled_dot_product_flash_attention.default: attention_of_heads,
    }
    return {operator: placed(operator, compute) for operator, compute in references.items()}


def attention_of_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    q_longest: int,
    k_longest: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Compute `_flash_attention_forward`: each sequence's rows over its own keys.

    Args:
        q, k, v: [T, H, D] with starts of sequences, or [B, T, H, D] without.

    Returns:
        out like q, and lse [H, T] or [B, H, T].
    """
    if q_starts is None or k_starts is None:
        sides = [_attend(*one, causal, scale) for one in zip(q, k, v, strict=True)]
        return torch.stack([out for out, _ in sides]), torch.stack([lse for _, lse in sides])
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    ends = zip(q_starts.tolist(), q_starts[1:].tolist(), strict=False)
    keys = zip(k_starts.tolist(), k_starts[1:].tolist(), strict=False)
    for (first, last), (start, end) in zip(ends, keys, strict=True):
        rows = slice(first, last)
        out[rows], lse[:, rows] = _attend(q[rows], k[start:end], v[start:end], causal, scale)
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = scale * torch.einsum("thd,shd->hts", q.float(), k)
    if causal:
        scores.masked_fill_(~torch.ones(len(q), len(k)).tril().bool(), -torch.inf)
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
    return out.to(q.dtype), scores.logsumexp(-1)


def attention_of_heads(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Compute `_scaled_dot_product_flash_attention`, without a mask.

    Args:
        q, k, v: [B, H, M, D].

    Returns:
        out like q, and lse [B, H, M].
    """
    scores = scale * (q.float() @ k.float().transpose(-1, -2))
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def _refill(places: Sequence[Card], results: Sequence[Tensor]) -> None:
    """Put a repeated operator's results into the memory that a graph gave to the first ones."""
    for card, fresh in zip(places, results, strict=True):
        card.inner.copy_(fresh)


class Generator(torch.Generator):
    """Makes a generator of the CPU, whatever the device."""

    def __new__(cls, device: object = None) -> "Generator":
        made: Generator = super().__new__(cls)
        return made


plain_tensor = torch.tensor
_device_constructors()  # torch remembers its functions, for `with torch.device(...)`


def _tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """Make a tensor on the host and copy it; torch looks for the device's own code at once."""
    made = plain_tensor(data, **options)
    return made if device is None else made.to(device)


def library_functions(player: "Player") -> list[tuple[Any, Mapping[str, Any]]]:
    """Return what takes the place of names, by owner."""
    return [
        (torch, {"Generator": Generator, "tensor": _tensor, "compile": lambda run, **_: run}),
        (flex, {"create_block_mask": _block_mask, "flex_attention": _flex_attention}),
        (torch.profiler, {"profile": lambda **_: _profile(player)}),
    ]


def _block_mask(mask: Mask, batch: None, heads: None, rows: int, keys: int, device: str) -> Tensor:
    """Return which keys [rows, keys] each row sees."""
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    row = torch.arange(rows, device=device)[:, None]
    return mask(nothing, nothing, row, torch.arange(keys, device=device)[None])


def _flex_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Tensor, enable_gqa: bool, scale: float
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = scale * (q.float() @ k.transpose(-1, -2))
    return (scores.masked_fill(~block_mask, -torch.inf).softmax(-1) @ v).to(q.dtype)


@contextmanager
def _profile(player: "Player") -> Iterator[Any]:
    """Note the device's operations, each with the time until the next begins."""
    player.profiled = noted = []
    try:
        yield SimpleNamespace(key_averages=lambda: _averages([*noted, ("end", ended)]))
    finally:
        player.profiled, ended = None, time.perf_counter()


def _averages(noted: list[tuple[str, float]]) -> list[Any]:
    found: dict[str, SimpleNamespace] = {}
    for (name, start), (_, end) in zip(noted, noted[1:], strict=False):
        event = found.setdefault(
            name,
            SimpleNamespace(
                key=name, device_type=DeviceType.CUDA, self_device_time_total=0.0, count=0
            ),
        )
        event.count += 1
        event.self_device_time_total += 1e6 * (end - start)
    return [*found.values()]

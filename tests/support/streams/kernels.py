"""Our Triton kernels: the memory that each argument declares, and references that compute them.

`DECLARED` says which arguments a kernel reads and which it writes, in the whole extent of the
tensor that is passed. `tests/kernels/triton_interpreter/test_declared_memory.py` holds the kernels
to it. A reference computes what a launch would, on the same arguments.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from gpuscore_kernels.extend_attention.layout import NUM_ROWS, TileShape
from gpuscore_kernels.extend_attention.reference import extend_attention
from gpuscore_kernels.extend_attention.table import DeviceTiles
from gpuscore_kernels.label_head import label_logits
from gpuscore_kernels.qk_norm_rope_store import Pages, qk_norm_rope_store
from gpuscore_kernels.quantized.reference import quantize_rows, quantized_product
from gpuscore_kernels.reference import add_rms_norm, gated
from gpuscore_kernels.routing import choose
from support.streams.checker import Span
from support.streams.recorder import Recorder, without_recording
from support.streams.tensors import Card

Bound = Mapping[str, Any]  # arguments of a launch by name


@dataclass(frozen=True, slots=True)
class Declared:
    """The arguments that a kernel reads and those that it writes.

    Args:
        reads, writes: names, separated by spaces.
        only: compile-time arguments, separated by spaces, that must all be true (numbers: over 0)
            for an argument to be touched; an argument that is not listed always is.
    """

    reads: str
    writes: str
    only: Mapping[str, str] = field(default_factory=dict)

    def touched(self, side: str, bound: Bound) -> list[str]:
        """Names of the arguments that a launch reads (side "reads") or writes."""
        return [
            name
            for name in getattr(self, side).split()
            if all(bound[flag] for flag in self.only.get(name, "").split())
        ]


OF_HEADS = {
    "q_norm": "HAS_NORM HEADS",
    "k_norm": "HAS_NORM KV_HEADS",
    "slots": "HAS_PAGES KV_HEADS",
    "q": "HEADS",
    "k": "KV_HEADS",
    "k_pages": "HAS_PAGES KV_HEADS",
    "v_pages": "HAS_PAGES KV_HEADS",
}
DECLARED = {
    "add_rms_norm_kernel": Declared(
        "x delta weight", "total normed", {"delta": "HAS_DELTA", "total": "HAS_DELTA"}
    ),
    "gated_kernel": Declared("gate_up", "out"),
    "qk_norm_rope_store_kernel": Declared(
        "qkv cos sin q_norm k_norm slots",
        "q k k_pages v_pages",
        OF_HEADS,
    ),
    "label_logits_kernel": Declared("hidden weight rows label_ids", "out"),
    "slice_statistics_kernel": Declared(
        "hidden weight rows",
        "peaks sums best_ids best_logits",
        {"rows": "HAS_ROWS", "best_ids": "TOP", "best_logits": "TOP_COLUMNS"},
    ),
    "merge_slices_kernel": Declared(
        "peaks sums best_ids",
        "lse top_ids top_logits",
        dict.fromkeys(("best_ids", "top_ids", "top_logits"), "NEED_TOP"),
    ),
    "merge_best_kernel": Declared("peaks sums best_ids best_logits", "lse top_ids top_logits"),
    "extend_attention_kernel": Declared(
        "q k v pool_k pool_v rows tiles pool_tiles masked", "out lse", {"lse": "NEED_LSE"}
    ),
    "route_kernel": Declared("logits filled", "weights chosen counts", {"filled": "HAS_FILLED"}),
    "place_kernel": Declared("chosen counts", "places rows starts"),
    "expert_gate_up_kernel": Declared("x gate_up rows starts", "out"),
    "expert_down_kernel": Declared("inner down starts", "out"),
    "combine_experts_kernel": Declared("results weights places", "out"),
    "quantize_rows_kernel": Declared("x", "q scales"),
    "quantized_norm_kernel": Declared(
        "x delta weight", "total q scales", {"delta": "HAS_DELTA", "total": "HAS_DELTA"}
    ),
    "quantized_gated_kernel": Declared("gate_up", "q scales"),
    "int8_product_kernel": Declared("q scale_x w scale_w bias", "out", {"bias": "HAS_BIAS"}),
}


def _norm_of(a: Bound) -> Tensor:
    """Store the sum; return its norm."""
    delta = a["delta"] if a["HAS_DELTA"] else None
    total, normed = add_rms_norm(a["x"], delta, a["weight"], a["eps"], a["ONE_PLUS"])
    if delta is not None:
        a["total"].copy_(total)
    return normed


def _add_rms_norm(a: Bound) -> None:
    a["normed"].copy_(_norm_of(a))


def _gated_of(a: Bound) -> Tensor:
    return gated(a["gate_up"], "gelu_tanh" if a["GELU"] else "silu")


def _gated(a: Bound) -> None:
    a["out"].copy_(_gated_of(a))


def _bias(a: Bound) -> Tensor | None:
    return a["bias"] if a["HAS_BIAS"] else None


def _qk_norm_rope_store(a: Bound) -> None:
    stores = a["HAS_PAGES"] and a["KV_HEADS"] > 0
    heads = qk_norm_rope_store(
        a["qkv"],
        a["cos"],
        a["sin"],
        num_heads=a["HEADS"],
        num_kv_heads=a["KV_HEADS"],
        q_norm=a["q_norm"] if a["HAS_NORM"] else None,
        k_norm=a["k_norm"] if a["HAS_NORM"] else None,
        eps=a["eps"],
        one_plus=a["ONE_PLUS"],
        pages=Pages(a["k_pages"], a["v_pages"], a["slots"]) if stores else None,
        impl="reference",
    )
    for name, value in zip(("q", "k"), heads, strict=False):  # values stay where they are
        if value.numel():
            a[name].copy_(value)


def _label_logits(a: Bound) -> None:
    cap = a["softcap"] if a["HAS_CAP"] else None
    rows, ids = a["rows"], a["label_ids"]
    a["out"].copy_(label_logits(a["hidden"], a["weight"], rows, ids, softcap=cap, impl="reference"))


def _slice_statistics(a: Bound) -> None:
    hidden = a["hidden"][a["rows"].long()] if a["HAS_ROWS"] else a["hidden"]
    logits = hidden.float() @ a["weight"].float().T
    if a["HAS_CAP"]:
        logits = a["softcap"] * torch.tanh(logits / a["softcap"])
    tiles = -(-a["VOCAB"] // a["BLOCK_N"])
    width = -(-tiles // a["SLICES"]) * a["BLOCK_N"]  # tokens of a slice
    padded = logits.new_full((len(logits), width * a["SLICES"]), -torch.inf)
    padded[:, : a["VOCAB"]] = logits
    slices = padded.view(len(logits), a["SLICES"], width)
    peaks, best = slices.max(dim=-1)
    a["peaks"].copy_(peaks)
    finite = peaks.clamp_min(torch.finfo(peaks.dtype).min).unsqueeze(-1)
    a["sums"].copy_((slices - finite).exp().sum(dim=-1))
    if a["TOP"] == 1:
        a["best_ids"].copy_(best + width * torch.arange(a["SLICES"]))
    if a["TOP"] > 1:
        values, ids = slices.topk(min(a["TOP"], width), dim=-1)
        firsts = width * torch.arange(a["SLICES"])[:, None]
        a["best_logits"].fill_(-torch.inf)[..., : values.shape[-1]].copy_(values)
        a["best_ids"].fill_(-1)[..., : values.shape[-1]].copy_(ids + firsts)


def _merge_slices(a: Bound) -> None:
    highest, winner = a["peaks"].max(dim=-1)
    total = (a["sums"] * (a["peaks"] - highest[:, None]).exp()).sum(dim=-1)
    a["lse"].copy_(highest + total.log())
    if a["NEED_TOP"]:
        a["top_ids"].copy_(a["best_ids"].gather(1, winner[:, None]))
        a["top_logits"].copy_(highest[:, None])


def _merge_best(a: Bound) -> None:
    _merge_slices({**a, "NEED_TOP": False})
    values, places = a["best_logits"].flatten(1).topk(a["TOP"], dim=-1)
    a["top_logits"].copy_(values)
    a["top_ids"].copy_(a["best_ids"].flatten(1).gather(1, places).clamp_min(0))


def _extend_attention(a: Bound) -> None:
    tiles = a["tiles"][a["tiles"][:, NUM_ROWS] > 0]  # padding does nothing
    shape = TileShape(a["BM"] // a["GROUP"], a["BN"], a["OWN"])
    table = DeviceTiles(shape, a["WINDOW"] or None, a["rows"], tiles, a["pool_tiles"], a["masked"])
    factor = a["scale"] / 1.4426950408889634  # the kernel's exponentials have base 2
    cap = a["cap"] if a["CAP"] else None
    rows = (a["q"], a["k"], a["v"])
    options = {"scale": factor if cap is None else factor * cap / 2, "softcap": cap}
    out, lse = extend_attention(*rows, (a["pool_k"], a["pool_v"]), table, **options)
    a["out"].copy_(out)
    if a["NEED_LSE"]:
        a["lse"].copy_(lse)


def _route(a: Bound) -> None:
    weights, chosen = choose(a["logits"], a["TOP_K"], a["NORMALISE"])
    padding = torch.arange(len(chosen)) >= (a["filled"] if a["HAS_FILLED"] else len(chosen))
    a["weights"].copy_(weights.masked_fill(padding[:, None], 0))
    a["chosen"].copy_(chosen.masked_fill(padding[:, None], -1))
    for block, counts in zip(a["chosen"].split(a["ROWS"]), a["counts"], strict=True):
        counts.copy_(torch.bincount(block[block >= 0], minlength=len(counts)))


def _place(a: Bound) -> None:
    experts = a["chosen"].flatten()
    order = torch.argsort(experts, stable=True)[int((experts < 0).sum()) :]
    a["places"].fill_(-1).view(-1)[order] = torch.arange(len(order), dtype=torch.int32)
    a["rows"][: len(order)] = (order // a["TOP_K"]).int()
    a["starts"][0] = 0
    a["starts"][1:] = a["counts"].sum(dim=0)[: a["EXPERTS"]].cumsum(0)


def _of_experts(a: Bound) -> Iterator[tuple[int, slice]]:
    """Yield each expert and its places."""
    bounds = a["starts"].tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        yield expert, slice(start, end)


def _expert_gate_up(a: Bound) -> None:
    for expert, places in _of_experts(a):
        product = linear(a["x"][a["rows"][places].long()], a["gate_up"][expert])
        a["out"][places] = gated(product, "gelu_tanh" if a["GELU"] else "silu")


def _expert_down(a: Bound) -> None:
    for expert, places in _of_experts(a):
        a["out"][places] = linear(a["inner"][places], a["down"][expert])


def _combine_experts(a: Bound) -> None:
    results = a["results"][a["places"].clamp_min(0).long()].float()
    a["out"].copy_((results * a["weights"].unsqueeze(-1)).sum(dim=1))


def _quantized(x: Tensor, a: Bound) -> None:
    q, scales = quantize_rows(x, a["q"].dtype)
    a["q"].copy_(q)
    a["scales"].copy_(scales)


def _quantize_rows(a: Bound) -> None:
    _quantized(a["x"], a)


def _quantized_norm(a: Bound) -> None:
    _quantized(_norm_of(a), a)


def _quantized_gated(a: Bound) -> None:
    _quantized(_gated_of(a), a)


def _int8_product(a: Bound) -> None:
    factors = a["q"], a["scale_x"], a["w"], a["scale_w"]
    a["out"].copy_(quantized_product(*factors, _bias(a), a["out"].dtype))


REFERENCES: dict[str, Callable[[Bound], None]] = {
    "add_rms_norm_kernel": _add_rms_norm,
    "gated_kernel": _gated,
    "qk_norm_rope_store_kernel": _qk_norm_rope_store,
    "label_logits_kernel": _label_logits,
    "slice_statistics_kernel": _slice_statistics,
    "merge_slices_kernel": _merge_slices,
    "merge_best_kernel": _merge_best,
    "extend_attention_kernel": _extend_attention,
    "route_kernel": _route,
    "place_kernel": _place,
    "expert_gate_up_kernel": _expert_gate_up,
    "expert_down_kernel": _expert_down,
    "combine_experts_kernel": _combine_experts,
    "quantize_rows_kernel": _quantize_rows,
    "quantized_norm_kernel": _quantized_norm,
    "quantized_gated_kernel": _quantized_gated,
    "int8_product_kernel": _int8_product,
}


def bound(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a launch by name."""
    return dict(zip(kernel.arg_names, args, strict=False)) | dict(options)


def launcher(recorder: Recorder) -> Callable[..., None]:
    """Return what takes the place of Triton's launch: it records, and runs the reference."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = kernel.fn.__name__
        if name not in DECLARED:
            raise NotImplementedError(f"{name} declares no memory: add it to {__name__}.DECLARED")
        values = bound(kernel, args, options)
        reads, writes = (_spans(name, side, values) for side in ("reads", "writes"))
        inner = {n: v.inner if isinstance(v, Card) else v for n, v in values.items()}

        def again() -> None:
            with without_recording():
                REFERENCES[name](inner)

        if not recorder.launch(name, reads, writes, again):
            again()

    return run


def _spans(kernel: str, side: str, values: Bound) -> list[Span]:
    found = []
    for name in DECLARED[kernel].touched(side, values):
        value: Tensor = values[name]
        if not isinstance(value, Card):
            raise TypeError(f"{kernel} got {name} on {value.device}, not on the device")
        found.append(value.span)
    return found

"""Our Triton kernels: the memory that each argument declares.

`DECLARED` says which arguments a kernel reads and which it writes, in the whole extent of the
tensor that is passed. `tests/kernels/triton_interpreter/test_declared_memory.py` holds the kernels
to it. Here a launch writes zeros: the order of accesses does not depend on numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    "convolve_kernel": Declared("mixed extra places weight", "out"),
    "gated_norm_kernel": Declared("x gate weight", "out"),
    "systems_kernel": Declared("convolved strength decay rows", "solutions scores"),
    "delta_chunks_kernel": Declared(
        "convolved decay rows sources before solutions scores",
        "out states",
        dict.fromkeys(("sources", "before"), "HAS_STATE"),
    ),
    "int8_product_kernel": Declared("q scale_x w scale_w bias", "out", {"bias": "HAS_BIAS"}),
}


def bound(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a launch by name."""
    return dict(zip(kernel.arg_names, args, strict=False)) | dict(options)


def launcher(recorder: Recorder) -> Callable[..., None]:
    """Return what takes the place of Triton's launch: it records, and zeroes what is written."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = kernel.fn.__name__
        if name not in DECLARED:
            raise NotImplementedError(f"{name} declares no memory: add it to {__name__}.DECLARED")
        values = bound(kernel, args, options)
        reads, writes = (_touched(name, side, values) for side in ("reads", "writes"))

        def again() -> None:
            with without_recording():
                for card in writes:
                    card.inner.zero_()

        spans = ([card.span for card in side] for side in (reads, writes))
        if not recorder.launch(name, *spans, again):
            again()

    return run


def _touched(kernel: str, side: str, values: Bound) -> list[Card]:
    touched = []
    for name in DECLARED[kernel].touched(side, values):
        value = values[name]
        if not isinstance(value, Card):
            raise TypeError(f"{kernel} got {name} on {value.device}, not on the device")
        touched.append(value)
    return touched

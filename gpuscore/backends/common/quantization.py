"""Eight-bit linear layers: a checkpoint's own formats, and the choice of what is computed.

`read_storage` reads `quantization_config` and refuses, by name, every format that would not be
computed as the checkpoint's makers meant. Quantised layers have a scale beside their weight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

from gpuscore.errors import ConfigError
from gpuscore.models.files import shown

# How linear layers are computed: in the model's dtype from weights that were never quantised; in
# INT8, activations too; in the model's dtype from quantised weights.
Precision: TypeAlias = Literal["full", "int8", "w8a16"]

EightBits: TypeAlias = Literal["int8", "fp8"]
# Says why a backend does not compute INT8 here; None if it does.
WhyNot: TypeAlias = Callable[[], str | None]
ON_CPUS = "torch computes INT8 on CPUs only"

BLOCK = 128  # rows and columns of a weight that share a scale, where scales are per block
# Parts of a layer that may be quantised; the others stay as they are.
LINEAR = frozenset({"q", "k", "v", "o", "gate", "up", "down"})
EXPERTS = frozenset({"expert_gate", "expert_up", "expert_down"})

ORIGINAL = "serve the model that was quantised"
_SECTION = "config.json: quantization_config"


@dataclass(frozen=True, slots=True)
class Storage:
    """The form in which a checkpoint stores its quantised layers.

    Args:
        weights: the format of the numbers.
        scale: ending of the name of a weight's scale, which is multiplied with the weight.
        blocks: scales are per block of 128 x 128; otherwise per row or per tensor.
        activations: "token": each row is quantised when it comes, with a scale of its own;
            "group": each 128 columns of a row; "static": with the scale stored as `input_scale`;
            None: they are not quantised.
    """

    weights: EightBits
    scale: str = "_scale"
    blocks: bool = False
    activations: Literal["token", "group", "static"] | None = "token"

    @property
    def input_scale(self) -> str | None:
        """Name, beside a layer's weight, of the stored scale of its input; None if there is
        none."""
        return "input_scale" if self.activations == "static" else None


def read_storage(fields: Mapping[str, Any]) -> Storage | None:
    """Return how the checkpoint's weights are quantised; None if they are not.

    Args:
        fields: the fields of config.json.

    Raises:
        ConfigError: the format is not supported, or scores would depend on other requests.
    """
    sections = {
        name: fields[name]
        for name in ("quantization_config", "compression_config")
        if fields.get(name) is not None
    }
    if len(sections) > 1:
        raise ConfigError(
            "config.json: quantization_config and compression_config are both set; supported: one"
        )
    if not sections:
        return None
    ((name, section),) = sections.items()
    if not isinstance(section, dict):
        raise ConfigError(f"config.json: {name} must be an object, found {shown(section)}")
    if (method := section.get("quant_method")) == "compressed-tensors":
        return _compressed_tensors(section)
    if method == "fp8":
        return _fine_grained(section)
    bits = f" ({shown(section['bits'])} bits)" if "bits" in section else ""
    raise ConfigError(
        f"{_SECTION}.quant_method is {shown(method)}{bits}; supported: compressed-tensors "
        f"(INT8 or FP8), fp8 (blocks of 128 x 128); {ORIGINAL}"
    )


def choose_precision(quantization: str, storage: Storage | None, why_not: WhyNot) -> Precision:
    """Return the `Precision` for a `--quantization`.

    Args:
        quantization: auto or w8a16.
        storage: how the checkpoint stores its weights.
        why_not: says why the backend cannot compute in INT8.

    Raises:
        ConfigError: the checkpoint is not quantised, or its INT8 is not computed here.
    """
    if storage is None:
        if quantization == "w8a16":
            raise ConfigError("--quantization w8a16 needs a quantised checkpoint; this one is not")
        return "full"
    if quantization == "w8a16" or storage.activations is None or storage.weights == "fp8":
        return "w8a16"
    # An INT8 checkpoint is refused where INT8 cannot be computed: w8a16 does not round activations,
    # so scores differ, and the user must choose that.
    if (reason := why_not()) is not None:
        raise ConfigError(
            f"--quantization auto: the checkpoint is quantised to {storage.weights}: {reason}; "
            "supported: w8a16, which converts weights to --dtype when they are loaded"
        )
    return "int8"


def described(precision: Precision, storage: Storage | None) -> str:
    """Say, for people, how linear layers are stored and computed."""
    if storage is None:
        return "not quantised"
    computed = {
        "int8": "computed in INT8, activations too",
        "w8a16": "converted to the number format of the model at load (w8a16)",
    }[precision]
    return f"{storage.weights.upper()} in the checkpoint, {computed}"


# Keys that do not change the numbers, or that were checked before.
_IGNORED = frozenset({"ignore", "global_compression_ratio", "version", "quant_method"})
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")


def _compressed_tensors(section: dict[str, Any]) -> Storage:
    _only(
        section,
        "",
        {
            "format": (*_FORMATS, None),
            "quantization_status": ("compressed", "frozen", None),
            "kv_cache_scheme": (None,),
            "transform_config": (None, {}),
            "sparsity_config": (None, {}),
            "moe_sparsity_config": (None, {}),
        },
        _IGNORED | {"config_groups"},
    )
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        _refuse("config_groups", groups, "one group, for all linear layers")
    ((name, group),) = groups.items()
    where = f"config_groups.{name}"
    if not isinstance(group, dict):
        _refuse(where, group, "an object")
    supported = {
        "targets": (["Linear"],),
        "output_activations": (None,),
        "format": (*_FORMATS, None),
    }
    _only(group, where, supported, frozenset({"weights", "input_activations"}))
    weights, blocks = _weights(group.get("weights"), f"{where}.weights")
    return Storage(
        weights=weights,
        blocks=blocks,
        activations=_activations(
            group.get("input_activations"), f"{where}.input_activations", weights, blocks
        ),
    )


# Of weights and activations; observers chose scales when the checkpoint was made.
_COMMON: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "symmetric": (True,),
    "actorder": (None, False),
    "scale_dtype": (None, "torch.float32", "torch.bfloat16", "torch.float16"),
}
_OBSERVED = frozenset({"observer", "observer_kwargs", "zp_dtype", "type", "strategy", "dynamic"})


def _weights(scheme: Any, where: str) -> tuple[EightBits, bool]:
    """Return the format of weights, and whether their scales are per block."""
    if not isinstance(scheme, dict):
        _refuse(where, scheme, "an object")
    supported = _COMMON | {"group_size": (None,), "block_structure": (None, [BLOCK, BLOCK])}
    _only(scheme, where, supported, _OBSERVED)
    if scheme.get("dynamic", False) is not False:
        _refuse(f"{where}.dynamic", scheme["dynamic"], "false")
    kind = scheme.get("type")
    strategy = scheme.get("strategy")
    if kind == "int" and strategy in ("channel", "tensor"):
        return "int8", False
    if kind == "float" and strategy in ("channel", "tensor", "block"):
        return "fp8", strategy == "block"
    _refuse(
        where,
        f"{kind} per {strategy}",
        "int per channel or tensor, float per channel, tensor or block",
    )


def _activations(
    scheme: Any, where: str, weights: str, blocks: bool
) -> Literal["token", "group", "static"] | None:
    if scheme is None:
        return None
    if not isinstance(scheme, dict):
        _refuse(where, scheme, "an object")
    supported = _COMMON | {"group_size": (None, BLOCK), "block_structure": (None,)}
    _only(scheme, where, supported, _OBSERVED)
    kind, strategy, dynamic = (scheme.get(name) for name in ("type", "strategy", "dynamic"))
    if kind != {"int8": "int", "fp8": "float"}[weights]:
        _refuse(f"{where}.type", kind, "the type of the weights")
    if strategy == "tensor" and dynamic is True:
        _refuse(
            where,
            "a dynamic scale per tensor",
            "dynamic per token, or static: a scale of a whole batch depends on other callers' "
            "requests",
        )
    if dynamic is True and strategy == "token":
        return "token"
    if dynamic is True and strategy == "group" and blocks:
        return "group"
    if dynamic is False and strategy == "tensor" and weights == "fp8":
        return "static"
    _refuse(
        where,
        f"{'dynamic' if dynamic else 'static'} per {strategy}",
        "dynamic per token; for float static per tensor, or dynamic per group of 128 beside blocks",
    )


def _fine_grained(section: dict[str, Any]) -> Storage:
    """Read the format of Qwen3-FP8 and DeepSeek: `weight_scale_inv`, blocks of 128 x 128."""
    supported = {
        "activation_scheme": ("dynamic",),
        "weight_block_size": ([BLOCK, BLOCK],),
        "fmt": ("e4m3", None),
        "scale_fmt": ("float", None),
        "expert_dtype": ("fp8", None),
        "dequantize": (False, True, None),
        "modules_to_convert": (None, []),
    }
    ignored = frozenset({"quant_method", "modules_to_not_convert", "ignored_layers"})
    _only({"weight_block_size": None, "activation_scheme": None} | section, "", supported, ignored)
    return Storage("fp8", scale="_scale_inv", blocks=True, activations="group")


def _only(
    section: Mapping[str, Any],
    where: str,
    supported: Mapping[str, tuple[Any, ...]],
    ignored: frozenset[str],
) -> None:
    """Refuse a key that is not known, or a value that is not supported."""
    for key, value in section.items():
        name = f"{where}.{key}" if where else key
        if key in supported:
            if not any(
                value == accepted and type(value) is type(accepted) for accepted in supported[key]
            ):
                values = ", ".join(map(str, supported[key]))
                _refuse(name, value, values)
        elif key not in ignored and value is not None:
            _refuse(name, value, "no such key")


def _refuse(name: str, value: Any, supported: str) -> NoReturn:
    raise ConfigError(f"{_SECTION}.{name} is {shown(value)}; supported: {supported}; {ORIGINAL}")

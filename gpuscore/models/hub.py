"""Model directories: of `demo`, of a local path, or of a name on the Hugging Face hub.

Models in other formats and of other kinds are refused here with what the user can do with them.
Everything here is refused elsewhere, too, but there the error can only name a missing file or an
unknown architecture.
"""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError
from gpuscore.models.files import read_object, shown

DEMO = "demo"
MODEL_FILES = (".json", ".safetensors", ".jinja")  # that a score depends on
# Weights in safetensors and the other files that are read; no other formats of the same weights.
_WANTED = ["*.json", "chat_template.jinja", "*.safetensors"]


def model_directory(model: str, revision: str | None = None) -> Path:
    """Return the directory of the model's files; download a hub model that is not cached.

    Raises:
        ConfigError: there is no such model, its format or kind is not served, or the hub cannot be
            reached; the message says how to go on.
    """
    if model == DEMO:
        return Path(str(files("gpuscore"))) / DEMO
    path = Path(model).expanduser()
    if path.is_file():
        refuse_file(path)
    directory = path if path.is_dir() else _from_hub(model, path, revision)
    refuse_other_formats(directory)
    return directory


def model_name(model: str) -> str:
    """Return the name by which a model is shown: for a local directory its folder's, else as given.

    Absolute paths tell callers about the machine, and differ between machines.
    """
    path = Path(model).expanduser()
    if model == DEMO or not path.is_dir():
        return model
    return Path(os.path.abspath(path)).name or model  # not `resolve`: a link has a name of its own


def _from_hub(model: str, path: Path, revision: str | None) -> Path:
    if path.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1:
        raise ConfigError(f"MODEL {model}: the directory does not exist")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    offline = (
        f"MODEL {model} is not a directory here and the Hugging Face hub cannot be reached; "
        f"download it on a connected machine (`hf download {model} --local-dir DIR`) and pass DIR"
    )
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_WANTED))
    except HFValidationError as error:
        raise ConfigError(f"MODEL {model} is neither a directory nor a valid hub name") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"MODEL {model} has no --revision {revision} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"the hub has no MODEL {model}, or it needs a login") from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(offline) from error


OUT, CONVERTED = "MERGED", "CONVERTED"  # the folders that printed commands write
DECODERS = "gpuscore serves decoders, such as Qwen/Qwen3-Reranker-0.6B"

# `AutoPeftModelFor...` reads the base model's name from the adapter's files.
_MERGE = (
    "from peft import AutoPeftModelFor{task}; from transformers import AutoTokenizer; "
    "AutoPeftModelFor{task}.from_pretrained({directory!r}).merge_and_unload()"
    ".save_pretrained({out!r}); AutoTokenizer.from_pretrained({base!r}).save_pretrained({out!r})"
)
_CONVERT = (
    "from transformers import AutoModelFor{task}, AutoTokenizer; "
    "AutoModelFor{task}.from_pretrained({directory!r}, dtype='auto').save_pretrained({out!r}); "
    "AutoTokenizer.from_pretrained({directory!r}).save_pretrained({out!r})"
)
_TASKS = {"CAUSAL_LM": "CausalLM", "SEQ_CLS": "SequenceClassification"}
# Kinds of adapters in peft whose weights can be added to the base model's.
_MERGED = ("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "VERA")


def refuse_file(path: Path) -> None:
    """Refuse a file in the place of a model directory.

    Raises:
        ConfigError: always.
    """
    if path.suffix == ".gguf":
        raise ConfigError(f"MODEL {path} is a GGUF file, {_GGUF}")
    if path.suffix in (".safetensors", ".json"):
        raise ConfigError(f"MODEL {path} is a file; give its directory, {path.parent}")
    raise ConfigError(f"MODEL {path} is a file; supported: a Hugging Face model directory")


def refuse_other_formats(directory: Path) -> None:
    """Refuse a model directory of a known other format or kind; all others pass.

    Raises:
        ConfigError: the directory has an adapter, weights of another format only, or a model that
            is no decoder with a head; or its config.json cannot be read.
    """
    _refuse_adapter(directory)
    config = read_object(directory / "config.json")
    if config is not None:
        _refuse_kind(directory, config)
        _refuse_unnamed_quantization(directory, config)
    _refuse_weights(directory, config or {})


def _refuse_adapter(directory: Path) -> None:
    """Refuse an adapter, even beside whole weights: transformers then loads the base model."""
    adapter = read_object(directory / "adapter_config.json")
    if adapter is None:
        return
    kind, base = adapter.get("peft_type"), adapter.get("base_model_name_or_path")
    subject = f"MODEL {directory} is a {shown(kind)} adapter of {shown(base)} (adapter_config.json)"
    if kind not in _MERGED or not isinstance(base, str):
        raise ConfigError(f"{subject}; supported: whole models, so adapters that peft can merge")
    task = _TASKS.get(str(adapter.get("task_type")), "CausalLM")
    code = _MERGE.format(task=task, directory=str(directory), base=base, out=OUT)
    raise ConfigError(
        f"{subject}; merge it into its base model and serve {OUT}: pip install peft transformers; "
        f"{_python(code)}; delete adapter_config.json if the weights beside it are merged already"
    )


def architecture_name(config: Mapping[str, Any]) -> str:
    """Return the architecture that a config.json names; empty if it names none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _refuse_kind(directory: Path, config: dict[str, Any]) -> None:
    """Refuse an encoder, an encoder-decoder, a model of images or sound, or without a head."""
    name = architecture_name(config)
    subject = f"MODEL {directory} is {name or shown(config.get('model_type'))}"
    for is_kind, why in _KINDS:
        if key := is_kind(name, config):
            raise ConfigError(f"{subject}, {why.format(key=key)}; {DECODERS}")


def _is_encoder(kind: object) -> bool:
    return isinstance(kind, str) and ("bert" in kind or kind in _ENCODERS)


# Of transformers' encoders those whose names do not say "bert"; `new` is GTE's, with remote code.
_ENCODERS = frozenset({"electra", "mpnet", "new", "longformer", "big_bird", "ernie", "funnel"})
_TOWERS = (
    *("vision_config", "vision_tower", "mm_vision_tower", "visual", "audio_config"),
    *("speech_config", "image_size"),
)
# Models of text and pictures whose text is served; requests cannot send pictures.
TEXT_TOWERS = frozenset({"Qwen3_5ForConditionalGeneration", "Qwen3_5ForSequenceClassification"})
_KINDS: tuple[tuple[Callable[[str, dict[str, Any]], object], str], ...] = (
    (
        lambda name, config: next(
            (key for key in _TOWERS if name not in TEXT_TOWERS and config.get(key) is not None), ""
        ),
        "which takes images or sound ({key}); choose a model of text only",
    ),
    (
        lambda _, config: config.get("is_encoder_decoder") is True,
        "an encoder-decoder; its decoder does not read the prompt itself",
    ),
    (
        lambda name, config: name.endswith("ForMaskedLM") or _is_encoder(config.get("model_type")),
        "an encoder, whose tokens see those after them; serve it with text-embeddings-inference "
        "or sentence-transformers",
    ),
    (
        # GPT2LMHeadModel and its like have heads.
        lambda name, _: name.endswith("Model") and "Head" not in name,
        "a model without a head, which gives embeddings and no probabilities; serve it with "
        "text-embeddings-inference or sentence-transformers",
    ),
)


def _refuse_unnamed_quantization(directory: Path, config: dict[str, Any]) -> None:
    """Refuse quantised weights that config.json names not at all, or in another library's key."""
    apart, mlx = read_object(directory / "hf_quant_config.json"), config.get("quantization")
    subject = ""
    if apart is not None and config.get("quantization_config") is None:
        inner = apart.get("quantization")
        method = inner.get("quant_algo") if isinstance(inner, dict) else None
        subject = f"ModelOpt to {shown(method)} (hf_quant_config.json)"
    elif isinstance(mlx, dict) and "bits" in mlx:
        subject = f"MLX to {shown(mlx['bits'])} bits (config.json: quantization)"
    if subject:
        raise ConfigError(f"MODEL {directory} is quantised by {subject}; serve the original model")


def _refuse_weights(directory: Path, config: dict[str, Any]) -> None:
    """Refuse a directory whose weights are all in other formats than safetensors."""
    if any((directory / name).exists() for name in _READ):
        return
    for pattern, why in _WEIGHTS:
        names = sorted(path.name for path in directory.glob(pattern))
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            reason = why.format(command=_converting(directory, config), out=CONVERTED)
            raise ConfigError(f"MODEL {directory} has its weights in {names[0]}{more}, {reason}")


def _converting(directory: Path, config: dict[str, Any]) -> str:
    """Return the command by which transformers writes a model's safetensors."""
    classifies = "ForSequenceClassification" in str(config.get("architectures"))
    task = _TASKS["SEQ_CLS" if classifies else "CAUSAL_LM"]
    return _python(_CONVERT.format(task=task, directory=str(directory), out=CONVERTED))


def _python(code: str) -> str:
    """Return a command that runs code in this Python, which has torch and safetensors."""
    return shlex.join([sys.executable, "-c", code])


_READ = ("model.safetensors", "model.safetensors.index.json")
_GGUF = (
    "llama.cpp's format; load the model's safetensors, because transformers' reading of GGUF loses "
    "head sizes, RoPE scaling and soft caps, and only gpuscore's tag before-demolition has a "
    "checked conversion"
)
_WEIGHTS = (
    (
        "pytorch_model*.bin",
        "pickled by torch; supported: safetensors. Convert it and serve {out}: pip install "
        "transformers; {command}",
    ),
    ("*.gguf", _GGUF),
    (
        "consolidated*",
        "the format of the model's authors; supported: safetensors as transformers writes them, "
        "which the same repository on the hub usually has",
    ),
    ("*.onnx", "ONNX; supported: safetensors, so serve the model from which it was made"),
    ("onnx/*.onnx", "ONNX; supported: safetensors, so serve the model from which it was made"),
    ("tf_model*.h5", "TensorFlow's format; supported: safetensors"),
    ("flax_model*.msgpack", "Flax's format; supported: safetensors"),
)

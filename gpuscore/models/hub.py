"""Finds the directory of a model: `demo`, a local path, or a name on the Hugging Face hub.

Errors for weights in other formats say what the user can do with them.
"""

import os
from importlib.resources import files
from pathlib import Path

from gpuscore.errors import ConfigError
from gpuscore.models.adapter import overlay_directory

DEMO = "demo"
MODEL_FILES = (".json", ".safetensors", ".jinja")  # files that scores depend on
# Models of text and pictures whose text is served; requests cannot send pictures.
TEXT_TOWERS = frozenset({"Qwen3_5ForConditionalGeneration", "Qwen3_5ForSequenceClassification"})
# Only the files that are read: no other formats of the same weights.
_DOWNLOADED = ["*.json", "chat_template.jinja", "*.safetensors"]


def model_directory(model: str, revision: str | None = None, adapter: str | None = None) -> Path:
    """Return the directory of the model's files; download a hub model that is not cached.

    Args:
        model: "demo", a directory, or a hub name.
        revision: the commit, branch or tag of a hub model; None: its main branch.
        adapter: the directory of a LoRA adapter that is merged into the model.

    Raises:
        ConfigError: there is no such model, its format is not supported, or the hub cannot be
            reached. The message says what to do.
    """
    directory = _base_directory(model, revision)
    if adapter is None:
        return directory
    return overlay_directory(directory, Path(adapter).expanduser(), model)


def _base_directory(model: str, revision: str | None) -> Path:
    if model == DEMO:
        return Path(str(files("gpuscore"))) / DEMO
    path = Path(model).expanduser()
    if path.is_file():
        why = _OTHER_FORMATS.get(path.suffix, f"one file; give a model's directory: {path.parent}?")
        raise ConfigError(f"MODEL {path} is {why}")
    directory = path if path.is_dir() else _from_hub(model, path, revision)
    _refuse_other_formats(directory)
    return directory


def model_name(model: str) -> str:
    """Return the name that callers see: a local directory's last part, or another `model` as it is.

    Absolute paths tell callers about the machine, and differ between machines.
    """
    path = Path(model).expanduser()
    if model == DEMO or not path.is_dir():
        return model
    return Path(os.path.abspath(path)).name or model  # not `resolve`, to keep the name of a link


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
        return Path(snapshot_download(model, revision=revision, allow_patterns=_DOWNLOADED))
    except HFValidationError as error:
        raise ConfigError(f"MODEL {model} is neither a directory nor a valid hub name") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"MODEL {model} has no --revision {revision} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"the hub has no MODEL {model}, or it needs a login") from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(offline) from error


_READ = ("model.safetensors", "model.safetensors.index.json")
_OTHER_FORMATS = {
    ".bin": "pickled by torch; AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW) and "
    "the same of AutoTokenizer, from transformers, write safetensors "
    "(AutoModelForSequenceClassification keeps a classifier's head)",
    ".gguf": "in llama.cpp's format GGUF; load the model's safetensors, because transformers' "
    "reading of GGUF loses head sizes, RoPE scaling and soft caps, and only gpuscore's tag "
    "before-demolition has a checked conversion",
    ".pth": "in the format of the model's authors; take the safetensors that transformers writes, "
    "which the same repository on the hub usually has",
    ".onnx": "in ONNX; take the safetensors of the model from which it was made",
    ".h5": "in TensorFlow's format; supported: safetensors",
    ".msgpack": "in Flax's format; supported: safetensors",
}


def _refuse_other_formats(directory: Path) -> None:
    """Refuse an adapter, and weights that are all in other formats than safetensors."""
    # This holds even beside whole weights, because transformers then loads the base model.
    if (directory / "adapter_config.json").exists():
        raise ConfigError(
            f"MODEL {directory} is an adapter (adapter_config.json): serve its base model with "
            f"--adapter {directory}, or delete the file if the weights beside it are merged already"
        )
    if any((directory / name).exists() for name in _READ):
        return
    for path in sorted(directory.rglob("*")):
        if why := _OTHER_FORMATS.get(path.suffix):
            raise ConfigError(f"MODEL {directory} has {path.name}, which is {why}")

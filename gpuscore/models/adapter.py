"""Loads a LoRA adapter, saved by peft, together with its base model.

Makes a temporary directory of links to the files of both, so that all other code sees one model
directory. The weights are merged when they are read (`backends/common/lora`).
"""

import atexit
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError
from gpuscore.models.files import architecture_name, is_file, read_object, shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # begins all tensor names of an adapter
HEAD = f"{PREFIX}score.weight"
# Keys that change what an adapter computes, and the values that are supported.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other methods change the base model's weights before training.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(("fan_in_fan_out", "use_dora", "lora_bias", "use_qalora"), (None, False)),
    **dict.fromkeys(("layer_replication", "trainable_token_indices"), (None,)),
    **dict.fromkeys(("target_parameters", "alora_invocation_tokens"), (None, [])),
    **dict.fromkeys(("use_bdlora", "arrow_config", "kasa_config", "velora_config"), (None,)),
    "monteclora_config": (None,),
}

logger = logging.getLogger(__name__)


def overlay_directory(base: Path, adapter: Path, model: str) -> Path:
    """Return a temporary directory of the files of base and adapter, removed at the process's end.

    Args:
        base: the base model's directory.
        adapter: a directory with adapter_config.json and adapter_model.safetensors.
        model: the base model as the user names it.

    Raises:
        ConfigError: a file is missing or damaged, or this kind of adapter is not supported.
    """
    settings = _read_settings(adapter)
    named = settings.get("base_model_name_or_path")
    if isinstance(named, str) and Path(named).name != Path(model).name:
        logger.warning(
            "--adapter %s was trained on %s and is merged into %s", adapter, named, model
        )
    config = read_object(base / "config.json")
    if config is None:
        raise ConfigError(f"{base} has no config.json: not a Hugging Face model directory")
    overlay = Path(tempfile.mkdtemp(prefix="gpuscore-adapter-"))
    atexit.register(_remove, overlay, os.getpid())
    for path in base.iterdir():
        if path.name != "config.json":
            (overlay / path.name).symlink_to(path.resolve())
    for name in (CONFIG, WEIGHTS):
        (overlay / name).symlink_to((adapter / name).resolve())
    fields = _with_head(config, adapter) if settings.get("task_type") == "SEQ_CLS" else config
    (overlay / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    # A batch job that is resumed compares the times of the files with those at its start.
    shutil.copystat(base / "config.json", overlay / "config.json")
    return overlay


def _read_settings(adapter: Path) -> dict[str, Any]:
    path = adapter / CONFIG
    settings = read_object(path)
    if settings is None or not is_file(adapter / WEIGHTS):
        missing = CONFIG if settings is None else WEIGHTS
        raise ConfigError(f"--adapter {adapter} has no {missing}; supported: LoRA adapters of peft")
    for key, supported in _SUPPORTED.items():
        if settings.get(key, supported[0]) not in supported:
            raise ConfigError(
                f"{path}: {key} is {shown(settings[key])}; supported: {shown(supported[0])}; merge "
                "the adapter with peft's merge_and_unload and serve the result"
            )
    return settings


def _with_head(config: dict[str, Any], adapter: Path) -> dict[str, Any]:
    """Return the base model's config.json, changed to describe a model with the adapter's head."""
    name = architecture_name(config)
    if not name.endswith("ForCausalLM"):
        return config
    from safetensors import SafetensorError, safe_open  # both backends import it, too

    try:
        with safe_open(adapter / WEIGHTS, framework="np") as file:
            shape = file.get_slice(HEAD).get_shape() if HEAD in file.keys() else []  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{adapter / WEIGHTS} cannot be read as safetensors: {error}") from error
    if len(shape) != 2:
        raise ConfigError(f"{adapter / WEIGHTS} has no {HEAD}, which a SEQ_CLS adapter needs")
    fields = {key: value for key, value in config.items() if key not in ("num_labels", "label2id")}
    return fields | {
        "architectures": [name.replace("ForCausalLM", "ForSequenceClassification")],
        "id2label": {str(i): f"LABEL_{i}" for i in range(shape[0])},
    }


def _remove(overlay: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(overlay, ignore_errors=True)

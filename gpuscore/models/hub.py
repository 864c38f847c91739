"""Model directories: of `demo`, of a local path, or of a name on the Hugging Face hub."""

import os
from importlib.resources import files
from pathlib import Path

from gpuscore.errors import ConfigError
from gpuscore.models.other_formats import refuse_file, refuse_other_formats

DEMO = "demo"
# Weights in safetensors and the other files that are read; no other formats of the same weights.
_WANTED = ["*.json", "chat_template.jinja", "*.safetensors"]


def model_directory(model: str, revision: str | None = None) -> Path:
    """Return the directory of the model's files; download a hub model that is not cached.

    Raises:
        ConfigError: there is no such model, it has another format or kind than those that are
            served, or the hub cannot be reached; the message says how to go on.
    """
    if model == DEMO:
        return Path(str(files("gpuscore"))) / DEMO
    path = Path(model).expanduser()
    if path.is_file():
        refuse_file(path)
    directory = path if path.is_dir() else _downloaded(model, path, revision)
    refuse_other_formats(directory)
    return directory


def _downloaded(model: str, path: Path, revision: str | None) -> Path:
    if path.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1:
        raise ConfigError(f"MODEL {model}: the directory does not exist")
    return _from_hub(model, revision)


def model_name(model: str) -> str:
    """Return the name by which a model is shown: for a local directory its folder's, else as given.

    Absolute paths tell callers about the machine, and differ between machines.
    """
    path = Path(model).expanduser()
    if model == DEMO or not path.is_dir():
        return model
    return Path(os.path.abspath(path)).name or model  # not `resolve`: a link has a name of its own


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
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
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        raise ConfigError(offline) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(offline) from error

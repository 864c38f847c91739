"""The models of a server: their names, and the model that each name loads."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuscore.config import ModelConfig, ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory, model_name

ANY_MODEL = "default"  # what requests may write for "no name"
_NAME = re.compile(r"[^\s=,]{1,128}")


@dataclass(frozen=True, slots=True)
class ServedConfig:
    """A model that is served, and the names that requests may use for it.

    Args:
        name: the name that answers, metrics and the log show.
        config: the settings; `config.model` is what is loaded.
        others: further names that requests may use.
        directory: the directory of its files, once it is known.
    """

    name: str
    config: ModelConfig
    others: tuple[str, ...] = ()
    directory: Path = Path()

    def located(self) -> "ServedConfig":
        """Return this with its directory; download the model first if necessary."""
        model = self.config
        return replace(self, directory=model_directory(model.model, model.revision, model.adapter))

    @property
    def sources(self) -> tuple[str, ...]:
        """The names that may show the family of the model, the most reliable first."""
        return tuple(dict.fromkeys((self.config.model, *self.others, self.name)))


def served_models(model: ModelConfig, server: ServerConfig) -> list[ServedConfig]:
    """Return the models that MODEL names.

    Raises:
        ConfigError: a name is malformed or comes twice, or a setting needs a single model.
    """
    if re.search("[=,]", model.model) and not Path(model.model).expanduser().is_dir():
        pairs = [_pair(text) for text in model.model.split(",")]
    else:
        pairs = [(model_name(model.model), model.model)]
    _check([name for name, _ in pairs], model, server)
    if server.served_model_name is not None:
        pairs = [(server.served_model_name, source) for _, source in pairs]
    if len(pairs) > 1:
        return [ServedConfig(name, replace(model, model=source)) for name, source in pairs]
    ((name, source),) = pairs
    names = dict.fromkeys((name, model_name(source), source))
    return [ServedConfig(name, replace(model, model=source), (*names,)[1:])]


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return names for a message, the first ones if there are many."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _pair(text: str) -> tuple[str, str]:
    name, _, source = text.partition("=")
    if not _NAME.fullmatch(name) or not source or name == ANY_MODEL:
        raise ConfigError(
            f"--model {text}: must be NAME=MODEL, such as reranker=Qwen/Qwen3-Reranker-0.6B; NAME "
            f"has up to 128 characters, no spaces or commas, and is not {ANY_MODEL}"
        )
    return name, source


def _check(names: Sequence[str], model: ModelConfig, server: ServerConfig) -> None:
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise ConfigError(f"--model {twice[0]}=... is given twice; each model needs its own name")
    of_one = {
        "--backend jax": model.backend == "jax",
        f"--revision {model.revision}": model.revision is not None,
        f"--served-model-name {server.served_model_name}": server.served_model_name is not None,
        f"--adapter {model.adapter}": model.adapter is not None,
        f"--family {server.family}": server.family not in ("auto", "none"),
    }
    for setting, given in of_one.items():
        if given and len(names) > 1:
            raise ConfigError(f"{setting} is for one model, and --model names {len(names)}")

"""Models and scores of transformers, kept in .cache/tests between runs.

A name is a hash of all that decides the content: the versions of the libraries, the instructions
that torch uses, and the model's class, configuration and weights, or the code and the arguments
that make these. With RECOMPUTE in the environment (`make test-all`) everything is made again and
compared with what was kept.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "tests"
RECOMPUTE = "RECOMPUTE_REFERENCES"
SOURCES = tuple(Path(__file__).with_name(name) for name in ("models.py", "token_ids.py"))
# Between two computations of a score on one machine; the tests' own tolerance is 1e-4.
TOLERANCE = 1e-9


@cache
def libraries() -> list[tuple[str, str]]:
    """Return the versions of the libraries, whose metadata takes 40 ms to read."""
    return [(name, version(name)) for name in ("transformers", "torch", "numpy")]


def name_of(*parts: Any) -> str:
    """Return the hash of values that JSON or a buffer can hold, and of the libraries' versions."""
    digest = hashlib.sha256()
    for part in (libraries(), torch.backends.cpu.get_cpu_capability(), *parts):
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:40]


def model_directory(family: str, overrides: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Return a directory with the files of `make_model`; none of its callers may change them."""
    kept = folder / "models" / name_of(*map(Path.read_bytes, SOURCES), family, overrides)
    if kept.is_dir() and not os.environ.get(RECOMPUTE):
        return kept
    from support.models import make_model  # takes seconds to import

    kept.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=kept.parent))
    make_model(made, family, **overrides)
    if kept.is_dir():
        for path in made.iterdir():
            same = path.read_bytes() == (kept / path.name).read_bytes()
            assert same, f"{kept / path.name} is not what {family} with {overrides} gives now"
        shutil.rmtree(made)
    else:
        made.rename(kept)
    return kept


_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def _name_of_model(model: Any) -> str:
    if model not in _names:
        tensors = [
            part
            for name, tensor in sorted(model.state_dict().items())
            for part in (
                [name, str(tensor.dtype), list(tensor.shape)],
                tensor.detach().flatten().view(torch.uint8).numpy().tobytes(),
            )
        ]
        config = model.config.to_json_string(use_diff=False)
        attention = model.config._attn_implementation
        _names[model] = name_of(type(model).__name__, config, attention, *tensors)
    return _names[model]


def scores_of(
    model: Any,
    what: str,
    prompts: list[list[int]],
    compute: Callable[[], NDArray[Any]],
    folder: Path = FOLDER,
) -> NDArray[Any]:
    """Return `compute()`, or what it gave for the same model, prompts and `what` before."""
    name = hashlib.sha256(json.dumps([what, prompts]).encode()).hexdigest()[:40]
    path = folder / "scores" / _name_of_model(model) / f"{name}.npy"
    if path.exists() and not os.environ.get(RECOMPUTE):
        return np.load(path)
    made = compute()
    if path.exists():
        np.testing.assert_allclose(made, np.load(path), rtol=0, atol=TOLERANCE, err_msg=str(path))
        return made
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        np.save(file, made)
    Path(file.name).rename(path)  # at once: several workers may compute the same
    return made

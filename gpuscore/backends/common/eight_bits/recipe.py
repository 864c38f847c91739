"""`Recipe`: the products of a plain checkpoint in eight bits that stay in 16, and its answers in
float32.

A recipe is computed once for each digest of weights and texts, and kept in a file, which replicas,
restarts and all backends share.
"""

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from gpuscore.types.batch import BackendLimits

logger = logging.getLogger(__name__)

VERSION = 3  # of how recipes are made: a change makes all kept ones unknown
# Products that are in one format, by the name of the group.
GROUPS = {"q": ("q", "k", "v"), **{part: (part,) for part in ("o", "gate", "up", "down")}}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The products that stay in 16 bits, and float32's answers, which judge the result.

    Args:
        digest: of weights, texts and everything else that decides the recipe.
        kept: the `GROUPS` that are in 16 bits, in all layers.
        prompts: token ids of the held-out texts.
        labels: ids of the labels that were asked.
        answers: of the model whose layers are in float32, [prompts, labels]; see `judge.values`.
    """

    digest: str
    kept: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    answers: tuple[tuple[float, ...], ...]

    @property
    def fingerprint(self) -> str:
        """A digest that is equal on machines that compute the same model."""
        made = repr((self.digest, self.kept))
        return hashlib.sha256(made.encode()).hexdigest()[:16]

    @property
    def about(self) -> str:
        """One line for people."""
        return f"{self.fingerprint}: {', '.join(self.parts) or 'no product'} in 16 bits"

    @property
    def parts(self) -> list[str]:
        """The layers' parts that are in 16 bits."""
        return [part for group in self.kept for part in GROUPS[group]]

    def named(self, limits: BackendLimits) -> BackendLimits:
        """Return limits that name this recipe, on which cached keys and values depend."""
        return replace(
            limits, identity=f"{limits.identity} {self.fingerprint}", eight_bits=self.about
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `as_json` wrote; ValueError, KeyError or TypeError for other text."""
        fields = json.loads(text)
        nested: dict[str, Any] = {
            name: _tuples(fields[name]) for name in ("kept", "prompts", "labels", "answers")
        }
        return cls(digest=fields["digest"], **nested)

    def as_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def group_of(part: str) -> str | None:
    """Return the group of a part of a layer; None for parts of experts."""
    return next((group for group, parts in GROUPS.items() if part in parts), None)


def digest_of(directory: Path, *beside: object) -> str:
    """Return the SHA-256 of all weights of a model directory, its other files of JSON, and of
    anything else."""
    total = hashlib.sha256(repr((VERSION, beside)).encode())
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")]):
        with path.open("rb") as file:
            total.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


class KeptRecipes:
    """Recipes in files of a directory, by digest; by default the user's cache directory."""

    def __init__(self, directory: str | None) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._directory = Path(base) / "gpuscore" if directory is None else Path(directory)

    def read(self, digest: str) -> Recipe | None:
        """Return the recipe; None if there is none, or its file is damaged."""
        path = self._path(digest)
        try:
            recipe = Recipe.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read, it is made again: %s", path, error)
            return None
        return recipe if recipe.digest == digest else None

    def write(self, recipe: Recipe) -> Recipe:
        """Keep a recipe; return the kept recipe, which may be another process's that was first.

        A directory that cannot be written gives a warning.
        """
        path = self._path(recipe.digest)
        part = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(recipe.as_json(), encoding="utf-8")
            try:
                os.link(part, path)  # fails if another process was faster
            except FileExistsError:
                return self.read(recipe.digest) or recipe
            finally:
                part.unlink()
        except OSError as error:
            logger.warning("recipes are not kept and will be made again: %s", error)
        return recipe

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest[:32]}-int8.json"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

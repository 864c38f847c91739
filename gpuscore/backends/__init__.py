"""The backends, behind one interface (`base.Backend`); each is imported only when it is used."""

import logging
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from gpuscore.backends.base import Backend, Prepared, Progress, unreported
from gpuscore.backends.common.eight_bits.judge import judge
from gpuscore.backends.common.eight_bits.recipe import KeptRecipes, Recipe, digest_of
from gpuscore.backends.common.eight_bits.texts import ask, ask_at_random, read_texts
from gpuscore.backends.common.plan import ITEM_SIZE
from gpuscore.backends.common.quantization import described
from gpuscore.backends.common.shapes import count_kept_bytes
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.system.extras import install

if TYPE_CHECKING:
    from gpuscore.backends.jax.plan import JaxPlan
    from gpuscore.backends.torch.plan import TorchPlan

logger = logging.getLogger(__name__)

Plan: TypeAlias = "TorchPlan | JaxPlan"

# Settings of torch's allocator for CUDA, which torch reads from the environment. Batches have all
# sizes. In blocks of fixed addresses, what is free between them would soon be too small for the
# largest batch; segments that grow have no such gaps.
ALLOCATOR = "expandable_segments:True"
# torch's name, and its older one.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def plan_backend(directory: Path, config: ModelConfig) -> Plan:
    """Decide what to load, without reading weights; raises ConfigError if it is not supported."""
    if config.backend == "jax":
        if find_spec("jax") is None:
            raise ConfigError(f"--backend jax: JAX is not installed here; {install('jax')}")
        from gpuscore.backends.jax import plan as of_jax

        return of_jax.plan_backend(directory, config)
    set_allocator()
    from gpuscore.backends.torch import plan as of_torch

    return of_torch.plan_backend(directory, config)


def create_backend(
    plan: Plan,
    progress: Progress = unreported,
    lost: Callable[[str], None] = lambda line: None,
) -> Backend:
    """Load the weights; raises ConfigError for a damaged checkpoint.

    Args:
        plan: what to load.
        progress: called while weights are read.
        lost: called with one line for people when another rank has ended.
    """
    if plan.framework == "torch" and plan.shard.ranks > 1:
        from gpuscore.backends.torch.ranks.backend import ParallelBackend

        return ParallelBackend(plan, progress, lost)
    recipe = recipe_of(plan)
    backend = _alone(plan if recipe is None else _with_kept(plan, recipe), progress, recipe)
    if recipe is not None:
        try:
            settings = plan.settings
            judge(backend, recipe, settings.quantization_error, settings.allow_degenerate)
        except BaseException:
            backend.close()
            raise
    return backend


def _alone(plan: Plan, progress: Progress, recipe: Recipe | None) -> Backend:
    if plan.framework == "jax":
        from gpuscore.backends.jax.backend import JaxBackend

        return JaxBackend(plan, progress, recipe)
    from gpuscore.backends.torch.backend import TorchBackend

    return TorchBackend(plan, progress=progress, recipe=recipe)


def _with_kept(plan: Plan, recipe: Recipe) -> Plan:
    """Return a plan that counts the weights which a recipe leaves in 16 bits."""
    size = ITEM_SIZE[plan.dtype_name]
    more = count_kept_bytes(plan.architecture.config, size, recipe.parts)
    spare = None if plan.pages.spare is None else max(0, plan.pages.spare - more)
    pages = replace(plan.pages, spare=spare)
    return replace(plan, pages=pages, weight_bytes=plan.weight_bytes + more)


def recipe_of(plan: Plan) -> Recipe | None:
    """Return how a model is computed in eight bits: the recipe that is kept, or else a new one.

    None for a model in 16 or 32 bits. A model without a tokenizer gets a warning.

    Raises:
        ConfigError: the texts cannot be read, or the checkpoint is damaged.
    """
    if plan.precision not in ("int8", "fp8"):
        return None
    directory, settings = Path(plan.directory), plan.settings
    texts, classes = read_texts(settings.quantization_texts), plan.architecture.config.classes
    longest = min(plan.max_model_len, plan.max_tokens)
    count = None if classes is None else len(classes)
    questions = ask(directory, texts, longest, count)
    if questions is None:
        logger.warning(
            "eight bits (%s): the model has no tokenizer.json with labels of one token, so random "
            "ids judge how it is quantised, and nobody knows whether it still ranks real texts",
            plan.precision,
        )
        questions = ask_at_random(plan.architecture.config.vocab_size, longest, count)
    decided_by = questions, plan.precision, plan.dtype_name, settings.quantization_error
    digest, kept = digest_of(directory, *decided_by), KeptRecipes(settings.compile_cache)
    recipe = kept.read(digest)
    if recipe is not None:
        return recipe
    logger.info("eight bits: %d texts decide how the model is quantised", len(questions.scaled))
    from gpuscore.backends.torch.recipes import make_recipe

    made = make_recipe(_in_torch(plan), questions, digest, settings.quantization_error)
    return kept.write(made)


def _in_torch(plan: Plan) -> "TorchPlan":
    if plan.framework == "torch":
        return plan
    from gpuscore.backends.torch import plan as of_torch

    settings = ModelConfig(
        dtype=plan.dtype_name, device="cpu", quantization=plan.precision, max_batch_tokens=2048
    )
    return of_torch.plan_backend(Path(plan.directory), settings)


def prepare(directory: Path, config: ModelConfig) -> Prepared:
    """Plan now and return a function that loads, for the engine's process; raises ConfigError."""
    plan = plan_backend(directory, config)
    about = f"{plan.dtype_name} on {plan.device_name}"
    if config.tensor_parallel > 1:
        about += f", in {config.tensor_parallel} ranks"
    if plan.precision != "full":
        about += f", linear layers {described(plan.precision, plan.architecture.storage)}"
    return Prepared(about, partial(create_backend, plan, lost=_end_process), plan.dtype_name)


def _end_process(line: str) -> None:
    """Log why this engine's process cannot go on, and end it; its supervisor starts another."""
    logger.critical(line)
    logging.shutdown()  # writes the line
    os._exit(1)


def set_allocator() -> None:
    """Choose growing segments, unless the environment has settings or torch was imported before.

    torch reads the variable while it is imported, so this function is called before. Segments need
    Linux outside of Windows: in WSL the driver fails at their first allocation (pytorch issue
    192330).
    """
    chosen = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    native = sys.platform == "linux" and "microsoft" not in platform.release().lower()
    if native and "torch" not in sys.modules and not chosen:
        os.environ[ALLOCATOR_VARIABLES[0]] = ALLOCATOR

"""The memory that models need on a device, computed before a model is loaded.

python -P -m gpuscore.backends.needs, in a process of its own, because the question needs torch and
the server must not import it. Standard input has names, directories and settings as JSON,
the last line of standard output the list of answers, or an error.
"""

import json
import sys
from pathlib import Path
from typing import Any

from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError


def needs_of(directory: Path, config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `processes.replicas.placement.Needs`, with the memory that is free now.

    Raises:
        ConfigError: the model cannot be served, not even alone.
    """
    # Float32 is chosen later, by an engine, and only if it fits into that engine's share.
    plan = plan_backend(directory, config.unmeasured())
    prompt = int(plan.pages.needed * plan.pages.page_bytes / plan.pages.fraction)
    return {
        "kind": plan.device_name.partition(":")[0],
        "weights": plan.weight_bytes,
        "prompt": plan.pages.exact_bytes or prompt,
        "free": plan.free_memory(),
    }


def main() -> None:
    answers: Any = []
    for name, directory, config in json.load(sys.stdin):
        try:
            answers.append(needs_of(Path(directory), ModelConfig(**config)))
        except ConfigError as error:
            answers = {"error": f"--model {name}: {error}"}
            break
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

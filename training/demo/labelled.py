"""Writes prompts of the demo's world as JSON lines, each with its right answer.

PYTHONPATH=training .venv/bin/python -P -m demo.labelled --rows 400 > labelled.jsonl
"""

import argparse
import json
import random
from collections.abc import Iterator

from demo.synthetic import draw_training_group, held_count, prompt_query

ITEMS = 4  # of each query


def labelled(rows: int, seed: int) -> Iterator[tuple[str, bool]]:
    """Yield prompts of the demo model, with True where the item has all that its query asks for."""
    rng = random.Random(f"labelled-{seed}")
    while rows > 0:
        group = draw_training_group(rng, min(ITEMS, rows))
        query = prompt_query(group.query.text, group.preamble)
        for item in group.items:
            yield query + item.text, held_count(group.query, item) == len(group.query.requested)
        rows -= ITEMS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for prompt, good in labelled(options.rows, options.seed):
        print(json.dumps({"prompt": prompt, "good": good}))


if __name__ == "__main__":
    main()

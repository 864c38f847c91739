"""Writes typed questions about the demo's world as JSON lines, each with its right answer, as
`gpuscore calibrate` takes them. Their states combine attributes in ways that training never sees.

PYTHONPATH=training .venv/bin/python -P -m demo.questions --rows 400 > questions.jsonl
"""

import argparse
import json
import random
from collections.abc import Iterator

from demo.asked import Asked
from demo.decisions import draw_typed_group

QUESTIONS = 3  # of each state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for state, asked in labelled_questions(options.rows, options.seed):
        row = {
            "state": state,
            "questions": {name: question.body for name, question in asked.items()},
            "answers": {name: question.answer for name, question in asked.items()},
        }
        print(json.dumps(row, ensure_ascii=False))


def labelled_questions(rows: int, seed: int) -> Iterator[tuple[str, dict[str, Asked]]]:
    """Yield states, each with questions by name."""
    rng = random.Random(f"questions-{seed}")
    for _ in range(rows):
        group = draw_typed_group(rng, QUESTIONS, held_out=True)
        yield group.state, {f"q{i}": asked for i, asked in enumerate(group.questions, start=1)}


if __name__ == "__main__":
    main()

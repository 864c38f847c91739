"""Classify a file of prompts in this process: classify_many.py INPUT OUTPUT [MODEL].

INPUT has JSON lines with `prompt`; OUTPUT gets each with its probability of "yes", once scored.
"""

import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gpuscore import Scorer

LABELS = ["yes", "no"]
AT_ONCE = 2000  # rows of one request


def batches(file: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file, a list of AT_ONCE at a time."""
    with Path(file).open(encoding="utf-8") as lines:
        rows = map(json.loads, lines)
        while batch := list(islice(rows, AT_ONCE)):
            yield batch


def main(source: str, target: str, model: str = "demo") -> None:
    with Scorer(model) as scorer, Path(target).open("w", encoding="utf-8") as output:
        start, rows = time.monotonic(), 0
        for batch in batches(source):
            prompts = [row["prompt"] for row in batch]
            result = scorer.score("", prompts, labels=LABELS, apply_softmax=True)
            for row, (yes, _) in zip(batch, result.scores.tolist(), strict=True):
                output.write(json.dumps(row | {"yes": yes}) + "\n")
            rows += len(batch)
        seconds = time.monotonic() - start
    print(f"{rows} rows in {seconds:.1f} s, {rows / seconds:.0f} rows/s")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Writes typed questions about the demo's world as JSON lines, each with its right answer, as
`gpuscore calibrate` takes them.

PYTHONPATH=training .venv/bin/python -P -m demo.questions --rows 400 > questions.jsonl
"""

import argparse
import json

from demo.labelled import labelled

FITS = {"type": "noul", "instructions": "Does the item fit the query?"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for prompt, good in labelled(options.rows, options.seed):
        row = {"state": prompt, "questions": {"fits": FITS}, "answers": {"fits": good}}
        print(json.dumps(row))


if __name__ == "__main__":
    main()

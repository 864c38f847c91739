"""Choose a guard's threshold from labelled texts: threshold.py FILE URL LABEL LABEL.

FILE has JSON lines with `prompt`, and `good`, which is true for a text that should pass. The server
at URL gives each prompt the probability of the first label, which is that of a text that should
pass. One half of the texts, drawn at random, chooses the threshold; the other half, which it has
not seen, tells how good it is.
"""

import json
import sys
from pathlib import Path

import numpy as np

from gpuscore.client import Client

MOST_BAD = 0.02  # the share of bad texts that may pass
LEAST_MASS = 0.5  # below it, the model's next token is probably neither of the labels


def read(file: str) -> tuple[list[str], np.ndarray]:
    """Return prompts and answers, shuffled, because files are often sorted."""
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    rows = [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]
    return [row["prompt"] for row in rows], np.array([row["good"] for row in rows], bool)


def scores_of(url: str, prompts: list[str], labels: list[str]) -> np.ndarray:
    """Return the probability of the first label for each prompt."""
    with Client(url, deadline=600) as client:
        answer = client.classify(prompts, labels=labels, return_label_mass=True)
    unsure = sum(row.label_mass < LEAST_MASS for row in answer.data)
    if unsure:
        raise SystemExit(f"{unsure} of {len(prompts)} label masses are below {LEAST_MASS}")
    return np.array([row.probs[0] for row in answer.data])


def choose(scores: np.ndarray, good: np.ndarray) -> float:
    """Return the lowest threshold at which at most MOST_BAD of the bad texts pass.

    It lies in the middle between the highest score that is stopped for it and the next one.
    """
    bad = np.sort(scores[~good])[::-1]
    stopped = bad[int(MOST_BAD * len(bad))]
    passing = scores[scores > stopped]
    if not passing.size:
        raise SystemExit(f"with at most {MOST_BAD:.0%} of the bad texts, no text passes")
    return float(stopped + passing.min()) / 2


def at_most(wrong: int, total: int) -> float:
    """Return the upper end of Wilson's 95 % interval of a share."""
    z, share = 1.96, wrong / total
    spread = z * np.sqrt(share * (1 - share) / total + (z / total / 2) ** 2)
    return float((share + z**2 / total / 2 + spread) / (1 + z**2 / total))


def main(file: str, url: str, *labels: str) -> None:
    prompts, good = read(file)
    half = len(prompts) // 2
    for kind in (good, ~good):
        if not kind[:half].any() or not kind[half:].any():
            raise SystemExit(f"{kind.sum()} texts of one kind in {file} are too few")
    scores = scores_of(url, prompts, list(labels))
    threshold = choose(scores[:half], good[:half])
    print(f"threshold {threshold:.4f}, chosen with {half} texts")
    passes, good = scores[half:] >= threshold, good[half:]
    for kind, wrong in (("bad ones pass", passes[~good]), ("good ones are stopped", ~passes[good])):
        count, total = int(wrong.sum()), len(wrong)
        share, most = count / total, at_most(count, total)
        print(f"others: {count} of {total} {kind}: {share:.1%}, at most {most:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])

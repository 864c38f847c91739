"""Score in the same process, without a server: offline.py [MODEL]."""

import sys

from gpuscore import Scorer

QUERY = "query: a blue wooden chair for the garden\nitem: "
ITEMS = ["A red steel lamp.", "A wooden garden chair in blue.", "A blue wool scarf."]


def main(model: str = "demo") -> None:
    with Scorer(model) as scorer:
        result = scorer.score(QUERY, ITEMS, labels=["yes", "no"], apply_softmax=True)
    for item, (yes, _) in zip(ITEMS, result.scores, strict=True):
        print(f"{yes:.4f}  {item}")


if __name__ == "__main__":
    main(*sys.argv[1:])

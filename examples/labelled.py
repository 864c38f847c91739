"""Write labelled prompts of the demo model as JSON lines: labelled.py ROWS.

Each line has a `prompt`, and `good`, which is true if the item has all that the query asks for. The
demo model knows the words of a made-up shop; these are a few of them.
"""

import json
import random
import sys
from collections.abc import Iterator

COLOURS = {"red": "crimson", "blue": "navy", "green": "emerald", "black": "charcoal"}
MATERIALS = {"wooden": "oak", "metal": "steel", "wool": "knitted", "leather": "suede"}
SIZES = {"small": "little", "large": "big"}
KINDS = ("lamp", "chair", "scarf", "table", "rug", "bag")
ASKED = 3  # the most properties of a query
ITEMS = 4  # of each query, so that many prompts begin alike


def drawn(rng: random.Random) -> list[str]:
    """Return a thing's size, colour, material and kind."""
    return [rng.choice(list(words)) for words in (SIZES, COLOURS, MATERIALS, KINDS)]


def near(rng: random.Random, thing: list[str]) -> list[str]:
    """Return a thing that shares most words with another, because those are hard to tell apart."""
    other = drawn(rng)
    return [word if rng.random() < 0.5 else other[place] for place, word in enumerate(thing)]


def said(rng: random.Random, thing: list[str]) -> str:
    """Return a thing's text, in which some words are replaced by others of the same meaning."""
    same = {**COLOURS, **MATERIALS, **SIZES}
    return " ".join(same.get(word, word) if rng.random() < 0.4 else word for word in thing)


def labelled(rows: int) -> Iterator[dict[str, str | bool]]:
    rng = random.Random(0)
    for row in range(rows):
        if row % ITEMS == 0:
            thing = drawn(rng)
            asked = sorted(rng.sample(range(4), rng.randint(1, ASKED)))
            query = said(rng, [thing[place] for place in asked])
        item = near(rng, thing)
        good = all(item[place] == thing[place] for place in asked)
        yield {"prompt": f"query: {query}\nitem: {said(rng, item)}", "good": good}


if __name__ == "__main__":
    for line in labelled(int(sys.argv[1])):
        print(json.dumps(line))

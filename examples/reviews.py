"""Write labelled reviews as JSON lines: reviews.py ROWS.

Each line has a `prompt`, which asks for the sentiment of a made-up review after two examples, and
`good`, which is true for a positive review.
"""

import json
import random
import sys
from collections.abc import Iterator

EXAMPLES = (
    "Review: The cake was lovely.\nSentiment: positive\n\n"
    "Review: The cake was awful.\nSentiment: negative\n\n"
)
THINGS = ("soup", "room", "film", "phone", "concert", "bread", "hotel", "bicycle", "lamp", "show")
GOOD = ("excellent", "wonderful", "perfect", "better than I hoped", "worth every penny", "superb")
BAD = ("terrible", "broken", "dirty", "a waste of money", "worse than I feared", "disappointing")
MORE_GOOD = ("I will come back", "My family loved it", "The service was fast", "Thank you")
MORE_BAD = ("I want my money back", "Nobody helped us", "I waited for hours", "Never again")


def labelled(rows: int) -> Iterator[dict[str, str | bool]]:
    rng = random.Random(0)
    for _ in range(rows):
        good = rng.random() < 0.5
        negated = rng.random() < 0.2  # "not terrible" is praise, which is hard to judge
        word = rng.choice(GOOD if good != negated else BAD)
        review = f"The {rng.choice(THINGS)} was {'not ' if negated else ''}{word}."
        if rng.random() < 0.5:
            review += f" {rng.choice(MORE_GOOD if good else MORE_BAD)}."
        yield {"prompt": f"{EXAMPLES}Review: {review}\nSentiment:", "good": good}


if __name__ == "__main__":
    for line in labelled(int(sys.argv[1])):
        print(json.dumps(line))

"""Classify texts and choose a threshold from labelled ones: guard.py URL [API_KEY].

Plain HTTP with httpx, as any language can do it. The demo model is no guard: it says whether an
item fits a query. A guard would get texts without labels and answer with classes of its own.
"""

import sys

import httpx

# Prompts of the demo model, and whether they should pass.
LABELLED = [
    ("query: a red lamp\nitem: A red steel lamp.", True),
    ("query: a red lamp\nitem: A blue wool scarf.", False),
    ("query: a blue wooden chair\nitem: A wooden garden chair in blue.", True),
    ("query: a blue wooden chair\nitem: A red steel lamp.", False),
    ("query: a wool scarf\nitem: A blue wool scarf.", True),
    ("query: a wool scarf\nitem: A wooden garden chair in blue.", False),
]
LEAST_MASS = 0.5  # below it the model would have said something else than yes or no


def probabilities(url: str, headers: dict[str, str], texts: list[str]) -> list[float]:
    """The probability of "yes" for each text."""
    body = {"input": texts, "labels": ["yes", "no"], "return_label_mass": True}
    answer = httpx.post(f"{url}/v1/classify", json=body, headers=headers, timeout=60)
    answer.raise_for_status()
    found = answer.json()["data"]
    if any(one["label_mass"] < LEAST_MASS for one in found):
        raise SystemExit("the model wants to say something else than yes or no")
    return [one["probs"][0] for one in found]


def threshold(scores: list[float], passes: list[bool]) -> float:
    """Halfway between the best bad text and the worst good one."""
    worst_good = min(score for score, good in zip(scores, passes, strict=True) if good)
    best_bad = max(score for score, good in zip(scores, passes, strict=True) if not good)
    if best_bad >= worst_good:
        raise SystemExit("no threshold separates these texts; choose by the errors you can accept")
    return (best_bad + worst_good) / 2


def main(url: str, api_key: str | None = None) -> None:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    scores = probabilities(url, headers, [text for text, _ in LABELLED])
    limit = threshold(scores, [good for _, good in LABELLED])
    print(f"threshold {limit:.4f}")
    for (text, _), score in zip(LABELLED, scores, strict=True):
        print(f"{score:.4f}  {'pass' if score >= limit else 'stop'}  {text.splitlines()[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])

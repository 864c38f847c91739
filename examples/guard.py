"""Classify texts and choose a threshold from labelled ones: guard.py URL [API_KEY].

The program uses plain HTTP, as any language can. The demo model is no guard: it tells if an item
fits a query. A guard model needs no labels in the request and answers with its own classes.
"""

import sys

import httpx

# Prompts of the demo model; True for those that should pass.
LABELLED = [
    ("query: a red lamp\nitem: A red steel lamp.", True),
    ("query: a red lamp\nitem: A blue wool scarf.", False),
    ("query: a blue wooden chair\nitem: A wooden garden chair in blue.", True),
    ("query: a blue wooden chair\nitem: A red steel lamp.", False),
    ("query: a wool scarf\nitem: A blue wool scarf.", True),
    ("query: a wool scarf\nitem: A wooden garden chair in blue.", False),
]
LEAST_MASS = 0.5  # below it, the model's next token is probably neither yes nor no


def probabilities(url: str, headers: dict[str, str], texts: list[str]) -> list[float]:
    """Return the probability of "yes" for each text."""
    body = {"input": texts, "labels": ["yes", "no"], "return_label_mass": True}
    answer = httpx.post(f"{url}/v1/classify", json=body, headers=headers, timeout=60)
    answer.raise_for_status()
    classified = answer.json()["data"]
    if any(entry["label_mass"] < LEAST_MASS for entry in classified):
        raise SystemExit("the model's next token is probably neither yes nor no")
    return [entry["probs"][0] for entry in classified]


def threshold(scores: list[float], passes: list[bool]) -> float:
    """Return the middle between the best bad text's score and the worst good one's."""
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

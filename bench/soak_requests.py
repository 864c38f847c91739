"""The soak's requests with their known answers, and the comparison of answers."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

WORDS = ("red", "blue", "green", "wooden", "steel", "wool", "lamp", "chair", "scarf", "garden")
VOLATILE = ("id", "created", "usage")  # fields that differ from answer to answer
# Two float32 answers from different batches; each is within 1e-4 in log p of the exact one.
TOLERANCE = 2e-4
Answer = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """A request, and the server's answer when it was sent alone."""

    kind: str
    path: str
    body: bytes
    weight: float
    answer: Answer | None = None


def table(rng: np.random.Generator, vocab: int) -> list[Known]:
    """Return fixed requests of every kind: more queries than the prefix cache holds, so that it
    evicts. Their weights say how often each is sent."""
    requests = [
        Known("score ids", "/v1/score", _ids(rng, vocab, 3), 0.40 / 200) for _ in range(200)
    ]
    requests += [Known("large", "/v1/score", _ids(rng, vocab, 60), 0.02 / 4) for _ in range(4)]
    makers = (
        ("score text", "/v1/score", _text, 0.18, 40),
        ("rerank", "/v1/rerank", _rerank, 0.12, 30),
        ("decisions", "/v1/decisions", _decisions, 0.04, 20),
        ("system one", "/v1/systemone", _system_one, 0.04, 20),
        ("completions", "/v1/completions", _completions, 0.10, 20),
        ("tokenize", "/tokenize", _tokenize, 0.05, 20),
        ("models", "/v1/models", None, 0.02, 1),
        ("livez", "/livez", None, 0.02, 1),
    )
    for kind, path, make, share, count in makers:
        bodies = [b"" if make is None else json.dumps(make(rng)).encode() for _ in range(count)]
        requests += [Known(kind, path, body, share / count) for body in bodies]
    return requests


def same(expected: Any, got: Any, name: str = "") -> bool:
    """True if an answer equals the known one, except for volatile fields and rounding."""
    if isinstance(expected, dict) and isinstance(got, dict):
        names = [key for key in expected if key not in VOLATILE]
        kept = {key for key in got if key not in VOLATILE}
        return kept == set(names) and all(
            same(expected[key], got[key], key or name) for key in names
        )
    if isinstance(expected, list) and isinstance(got, list):
        pairs = zip(_ordered(expected), _ordered(got), strict=False)
        return len(expected) == len(got) and all(same(value, other, name) for value, other in pairs)
    if isinstance(expected, float) and isinstance(got, float):
        return _near(expected, got)
    return type(expected) is type(got) and expected == got


def _near(expected: float, got: float) -> bool:
    """True if two numbers are near: log-probabilities (below 0) absolutely, others relatively."""
    if expected < 0:
        return abs(expected - got) <= TOLERANCE
    return math.isclose(expected, got, rel_tol=TOLERANCE, abs_tol=1e-12)


def _ordered(rows: list[Any]) -> list[Any]:
    """Sort rankings by the documents' own order, because equal ones may change places."""
    ranked = bool(rows) and all(isinstance(row, dict) and "index" in row for row in rows)
    return sorted(rows, key=lambda row: row["index"]) if ranked else rows


def _ids(rng: np.random.Generator, vocab: int, items: int) -> bytes:
    body = {
        "query": rng.integers(1, vocab, rng.integers(16, 160)).tolist(),
        "items": [rng.integers(1, vocab, rng.integers(1, 24)).tolist() for _ in range(items)],
        "label_token_ids": rng.choice(vocab, 3, replace=False).tolist(),
        "apply_softmax": bool(rng.integers(2)),
    }
    return json.dumps(body).encode()


def _sentence(rng: np.random.Generator, low: int = 3, high: int = 30) -> str:
    return " ".join(rng.choice(WORDS, rng.integers(low, high)))


def _text(rng: np.random.Generator) -> Answer:
    query, items = f"query: {_sentence(rng)}\nitem: ", [_sentence(rng) for _ in range(4)]
    return {"query": query, "items": items, "labels": ["yes", "no"], "apply_softmax": True}


def _rerank(rng: np.random.Generator) -> Answer:
    return {"query": _sentence(rng), "documents": [_sentence(rng, 3, 60) for _ in range(5)]}


def _decisions(rng: np.random.Generator) -> Answer:
    choices = [{"value": str(word)} for word in rng.choice(WORDS, 3, replace=False)]
    questions = [
        {"type": "predicate", "name": "p", "instructions": _sentence(rng)},
        {"type": "choice", "instructions": _sentence(rng), "choices": choices},
    ]
    return {"input": _sentence(rng), "questions": questions}


def _system_one(rng: np.random.Generator) -> Answer:
    """Return questions with labels of one token and of two."""
    names = [f"{rng.choice(WORDS)} {number}" for number in range(30)]
    questions = {
        "yes": {"type": "noul", "instructions": _sentence(rng)},
        "which": {"type": "choice", "criteria": dict.fromkeys(names)},
        "how": {"type": "score", "criteria": [_sentence(rng, 1, 3) for _ in range(4)]},
    }
    return {"state": {"text": _sentence(rng)}, "questions": questions}


def _completions(rng: np.random.Generator) -> Answer:
    return {"prompt": _sentence(rng), "max_tokens": 0, "echo": True, "logprobs": 1}


def _tokenize(rng: np.random.Generator) -> Answer:
    return {"prompt": _sentence(rng)}

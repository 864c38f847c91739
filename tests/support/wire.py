"""The table of wire cases: requests of every dialect, which `gpuscore serve`, `gpuscore batch
--requests` and Ray answer alike. Many have answers that are sent in pieces."""

from typing import Any

Asked = tuple[str, dict[str, Any]]  # a path and a body

ODD = 'A "lamp"\n\t\\ \x01 é 中 \U0001f600 '  # characters of every length as JSON
WORDS = ["a", "red", "steel", "lamp", "and", "a", "blue", "wooden", "chair", "for", "the", "garden"]
LABELS = {"labels": ["yes", "no"]}
NULL = {"on_error": "null"}
MASS = {"return_label_mass": True}
SPARSE = [None if i % 7 == 1 else [i % 400] for i in range(3600)]  # every seventh item is bad


def texts(count: int, text: str = "{} lamp") -> list[str]:
    return [text.format(i) for i in range(count)]


def score(items: Any, **fields: Any) -> Asked:
    return "/v1/score", {"items": items} | fields


def ids(count: int, labels: list[Any], **fields: Any) -> Asked:
    """Ask for scores of items of three ids."""
    items = [[(7 * i + j) % 300 for j in range(3)] for i in range(count)]
    return score(items, label_token_ids=labels, **fields)


def rerank(path: str = "/v1/rerank", **fields: Any) -> Asked:
    return path, {"query": "q"} | fields


def complete(prompt: Any, max_tokens: int, **fields: Any) -> Asked:
    return "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens} | fields


LARGE = ids(700, [*range(60)], return_label_logprobs=True)
OBJECT = {"text": "a", ODD: [1.5, True, {ODD: 7}]}
ANSWERED: dict[str, Asked] = {
    "score": LARGE,
    "mass": ids(1500, [1, 2, 2], apply_softmax=True, **MASS),
    "lists": ids(300, [[*range(1 + i % 63)] for i in range(300)]),
    "sequences": score(texts(70), labels=["yes it is", "no", "yes"], query="q"),
    "mean of tokens": score(
        texts(70),
        labels=["yes it is", "no"],
        label_length_normalization="mean",
        return_label_logprobs=True,
        **MASS,
    ),
    "a model": score(["A lamp."], query="q", apply_softmax=True, model="demo", **LABELS),
    "errors": score(
        SPARSE, label_token_ids=[*range(9)], return_label_logprobs=True, **MASS, **NULL
    ),
    "no item": ids(0, [1], **MASS),
    "all errors": score([None], labels=["a"], **NULL),
    "pairs": ("/v1/score", {"queries": "a", "documents": texts(90)}),
    "pairs with errors": ("/v1/score", {"queries": "a", "documents": [None, *texts(30)]} | NULL),
    "classify": ("/v1/classify", {"input": texts(70)} | LABELS | MASS),
    "logits": ("/v1/classify", {"input": ODD, "use_activation": False} | LABELS),
    "rerank": rerank(documents=texts(70), **MASS),
    "rerank of bad documents": rerank(documents=[None], **NULL),
    "rerank with documents": rerank(
        "/rerank", documents=[*texts(70, ODD + "{}"), OBJECT], return_documents=True, **NULL
    ),
    "texts": rerank("/rerank", texts=texts(80, ODD + "{}"), return_text=True),
    "inputs": (
        "/pipeline/text-ranking",
        {"inputs": {"query": "q", "texts": texts(80), "return_text": True}},
    ),
    "raw texts": rerank("/rerank", texts=["A lamp.", "A rug."], raw_scores=True),
    "echo": complete(
        [[(7 * i + j) % 500 for j in range(40)] for i in range(20)], 0, echo=True, logprobs=20
    ),
    "echo of texts": complete(texts(30, ODD + "{}"), 1, echo=True, logprobs=0),
    "next token": complete(texts(70), 1, logprobs=3),
    "echo alone": complete([[7, 300, 2]], 0, echo=True),
    "tokenize": ("/tokenize", {"prompt": " ".join(WORDS * 450)}),
    "tokenize with names": ("/tokenize", {"prompt": ODD * 300, "return_token_strs": True}),
    "detokenize": ("/detokenize", {"tokens": [i % 500 for i in range(9000)]}),
}
REFUSED: dict[str, Asked] = {
    "an unknown field": score(["a"], unknown=1, **LABELS),
    "no labels": score(["a"], labels=[]),
    "no labels for classes": ("/v1/classify", {"input": ["a"]}),
    "another model": score(["a"], model="another", **LABELS),
    "too many items": score(["a"] * 10_001, **LABELS),
    "a long query": score(["a"], query="a " * 5000, **LABELS),
    "an id out of range": score([[1]], query=[10**6], label_token_ids=[2]),
    "another kind": ("/v1/score", {"query": 5}),
    "no texts": rerank("/rerank", texts=[]),
    "neither documents nor texts": rerank(),
    "a conversation": ("/v1/chat/completions", {"messages": []}),
    "another path": ("/v1/nowhere", {}),
}

"""Bodies whose meaning multiplies: a server that builds the product before it looks at its limits
takes far more memory than a body has bytes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.serving import RunningServer, children

MIB = 2**20
LONG, LONGEST = 4 * MIB, 16 * MIB - 1  # bytes of bodies with one long list
SCORE, RERANK, CLASSIFY, COMPLETIONS = "/v1/score", "/rerank", "/v1/classify", "/v1/completions"


@dataclass(frozen=True)
class Product:
    """Bodies of two factors, such as items and labels; `first` and `second` are the largest."""

    name: str
    path: str
    body: Callable[[int, int], bytes]
    first: int
    second: int


def product(
    path: str, name: str, first: int, second: int, fields: Callable[[int, int], dict[str, object]]
) -> Product:
    def body(n: int, m: int) -> bytes:
        return json.dumps(fields(n, m), separators=(",", ":")).encode()

    return Product(name, path, body, first, second)


def a_list(path: str, name: str, start: str, entry: str, end: str, size: int = LONG) -> Product:
    """Return a body that is one long list of equal entries, which no second factor multiplies."""

    def body(n: int, m: int) -> bytes:
        return f"{start}{','.join([entry] * n)}{end}".encode()

    return Product(name, path, body, (size - len(start + end)) // (len(entry) + 1), 1)


def ids(count: int, start: int = 0) -> list[int]:
    return [(start + 7 * n) % 499 for n in range(count)]


def pairs(count: int) -> list[list[int]]:
    """Return different items of two ids."""
    return [[n % 499, n // 499] for n in range(count)]


def numbers(count: int) -> list[str]:
    return [str(n) for n in range(count)]


def words(count: int) -> str:
    return "a " * count


THOUSAND = f"[{','.join('1' * 1000)}]"  # ids
ONE_LABEL = '],"label_token_ids":[1]}'
NULL = '"on_error":"null"'
ECHO = '{"max_tokens":0,"echo":true,'
PRODUCTS = (
    product(
        *(SCORE, "items x labels", 10_000, 128),
        lambda n, m: {"items": pairs(n), "label_token_ids": [*range(m)], "return_label_mass": True},
    ),
    product(
        *(SCORE, "items x lists of labels", 10_000, 128),
        lambda n, m: {"items": pairs(n), "label_token_ids": [[*range(m)]] * n},
    ),
    product(
        *(SCORE, "items x tokens of labels", 10_000, 32),
        lambda n, m: {"items": pairs(n), "label_sequences": [ids(m, k) for k in range(128)]},
    ),
    product(
        *(SCORE, "items x label texts", 500, 128),
        lambda n, m: {"items": numbers(n), "labels": [f"label {k}" for k in range(m)]},
    ),
    product(
        *(SCORE, "items before a query of ids", 10_000, 4_000),
        lambda n, m: {
            **{"items": pairs(n), "query": ids(m), "label_token_ids": [1]},
            **{"item_first": True, "on_error": "null"},
        },
    ),
    product(
        *(SCORE, "items before a query of text", 10_000, 2_000),
        lambda n, m: {"items": numbers(n), "query": words(m), "item_first": True, "labels": ["a"]},
    ),
    product(
        *(SCORE, "items after a query of ids", 500, 4_000),
        lambda n, m: {
            **{"items": pairs(n), "query": ids(m), "label_token_ids": [1], "on_error": "null"},
        },
    ),
    product(
        *(SCORE, "items after a query of text", 500, 3_000),
        lambda n, m: {"items": numbers(n), "query": words(m), "labels": ["a"]},
    ),
    product(
        *(SCORE, "items after a query that is too long", 10_000, 6_000),
        lambda n, m: {
            **{"items": numbers(n), "query": words(m), "labels": ["a"], "on_error": "null"},
        },
    ),
    product(
        *(SCORE, "documents of a pair's query", 500, 3_000),
        lambda n, m: {"queries": words(m), "documents": numbers(n)},
    ),
    a_list(SCORE, "nulls", '{"items":[', "null", ONE_LABEL),
    a_list(SCORE, "the longest of nulls", f'{{{NULL},"items":[', "null", ONE_LABEL, LONGEST),
    a_list(SCORE, "empty items", '{"items":[', "[]", ONE_LABEL),
    a_list(SCORE, "items of an id", '{"items":[', "[1]", ONE_LABEL),
    a_list(SCORE, "the longest of items", '{"items":[', "[]", ONE_LABEL, LONGEST),
    a_list(
        SCORE, "the longest of ids", '{"item_first":true,"items":[', THOUSAND, ONE_LABEL, LONGEST
    ),
    a_list(SCORE, "an item of ids", '{"items":[[', "1", f"]{ONE_LABEL}"),
    a_list(SCORE, "label ids", '{"items":[[1]],"label_token_ids":[', "1", "]}"),
    a_list(SCORE, "lists of label ids", '{"items":[[1]],"label_token_ids":[', "[1]", "]}"),
    a_list(SCORE, "long lists of label ids", '{"items":[[1]],"label_token_ids":[', THOUSAND, "]}"),
    a_list(SCORE, "label sequences", '{"items":[[1]],"label_sequences":[', "[1]", "]}"),
    a_list(SCORE, "a query", '{"items":[[1]],"label_token_ids":[1],"query":[', "1", "]}"),
    a_list(SCORE, "queries", '{"documents":"a","queries":[', '""', "]}"),
    a_list(
        *(SCORE, "arguments", '{"documents":"a","queries":"a","chat_template_kwargs":{"a":['),
        *("[[[[]]]]", "]}}"),
    ),
    product(
        *(RERANK, "documents x one field", 5_000, 30_000),
        lambda n, m: {"query": "a", "documents": [{"a": "b"}] * n, "rank_fields": ["a"] * m},
    ),
    product(
        *(RERANK, "documents x fields", 9_000, 30_000),
        lambda n, m: {
            **{"query": "a", "documents": [{}] * n, "on_error": "null"},
            "rank_fields": [f"n{k}" for k in range(m)],
        },
    ),
    product(
        *(RERANK, "documents after a query", 500, 3_000),
        lambda n, m: {"query": words(m), "documents": numbers(n), "return_documents": True},
    ),
    product(
        *(RERANK, "documents after a query that is too long", 10_000, 6_000),
        lambda n, m: {
            **{"query": words(m), "documents": numbers(n), "on_error": "null", "truncate": True},
        },
    ),
    a_list(RERANK, "empty documents", f'{{{NULL},"query":"a","documents":[', "{}", "]}"),
    a_list(RERANK, "the longest of documents", '{"query":"a","documents":[', "{}", "]}", LONGEST),
    a_list(RERANK, "documents of a name", '{"query":"a","documents":[', '{"a":1}', "]}"),
    a_list(RERANK, "nested documents", '{"query":"a","documents":[', '{"a":{"a":{}}}', "]}"),
    product(
        *(RERANK, "documents of lists", 9_000, 100),
        lambda n, m: {"query": "a", "documents": [{"text": "a", "b": [[]] * m}] * n},
    ),
    a_list(RERANK, "a document of lists", '{"query":"a","documents":[{"a":[', "[[[[[]]]]]", "]}]}"),
    a_list(RERANK, "a document of objects", '{"query":"a","documents":[{"a":[', "{}", "]}]}"),
    a_list(RERANK, "a document of a name", '{"query":"a","documents":[{', '"a":1', "}]}"),
    product(
        *(RERANK, "a document of names", 400_000, 1),
        lambda n, m: {"query": "a", "documents": [dict.fromkeys(numbers(n))]},
    ),
    a_list(RERANK, "texts", '{"query":"a","texts":[', '""', "]}"),
    a_list(RERANK, "fields", '{"query":"a","documents":[{}],"rank_fields":[', '"a"', "]}"),
    product(
        *(CLASSIFY, "texts x labels", 10_000, 26),
        lambda n, m: {"input": numbers(n), "labels": [chr(97 + k) for k in range(m)]},
    ),
    a_list(CLASSIFY, "inputs", '{"labels":["a"],"input":[', '"a"', "]}"),
    a_list(CLASSIFY, "classes", '{"input":["a"],"labels":[', '"a"', "]}"),
    product(
        *(COMPLETIONS, "positions x logprobs", 60, 20),
        lambda n, m: {
            **{"prompt": [ids(400, k) for k in range(n)], "max_tokens": 0, "echo": True},
            "logprobs": m,
        },
    ),
    product(
        *(COMPLETIONS, "prompts x logprobs", 10_000, 20),
        lambda n, m: {"prompt": pairs(n), "max_tokens": 1, "logprobs": m},
    ),
    a_list(COMPLETIONS, "prompts", f'{ECHO}"prompt":[', "[1]", "]}"),
    a_list(COMPLETIONS, "a prompt", f'{ECHO}"prompt":[', "1", "]}"),
    a_list(COMPLETIONS, "the longest of prompts", f'{ECHO}"prompt":[', THOUSAND, "]}", LONGEST),
    a_list(COMPLETIONS, "options", f'{ECHO}"prompt":"a","stream_options":{{"a":[', "[[]]", "]}}"),
    product(
        *(COMPLETIONS, "biases", 400_000, 1),
        lambda n, m: {"prompt": "a", "logit_bias": dict.fromkeys(numbers(n), 1)},
    ),
    a_list(COMPLETIONS, "a field again", "{", '"n":1', "}"),
    a_list(COMPLETIONS, "stops", f'{ECHO}"prompt":"a","stop":[', '"a"', "]}"),
    a_list("/tokenize", "a text", '{"return_token_strs":true,"prompt":"', "a", '"}'),
    a_list("/detokenize", "tokens", '{"tokens":[', "1", "]}"),
)


class Peak:
    """The most memory that a server and its engine take, each above a level of its own.

    An engine's level is the most that it had before: its largest batch, which was measured at
    start.
    """

    def __init__(self, server: RunningServer) -> None:
        self._pids = (server.process.pid, *children(server.process.pid))
        self._engines = [_memory(pid, "VmHWM") for pid in self._pids[1:]]
        self.rest = self.resident

    def reset(self) -> None:
        self.rest = min(self.rest, self.resident)  # the first requests' memory may be back by now
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM becomes VmRSS

    @property
    def resident(self) -> int:
        return _memory(self._pids[0], "VmRSS")

    def growth(self) -> int:
        """Return the bytes since `reset`."""
        own = _memory(self._pids[0], "VmHWM") - self.rest
        engines = zip(self._pids[1:], self._engines, strict=True)
        return own + sum(max(0, _memory(pid, "VmHWM") - most) for pid, most in engines)


def _memory(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024

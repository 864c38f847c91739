"""A small server with POST /v1/score that is right, except for the defects that a test plants.

Its model is a hash: logits are random numbers seeded by the ids of the whole prompt. The tokens of
a text are its bytes.
"""

import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

VOCAB, CONTEXT, MODEL = 300, 4096, "Stub/Qwen3-0.6B"


class Refusal(Exception):
    """An error answer's message and status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class WrongServer:
    """A server with planted defects; `defects` may change at any time and holds names that the
    methods check."""

    def __init__(self, salt: int = 0) -> None:
        self.defects: set[str] = set()
        self.salt = salt  # another salt is another model
        self.answers = 0
        self.under_way = 0
        self.dead = False
        self.key: str | None = None  # callers have to send it
        self.seen: dict[tuple, list] = {}  # a wrong cache, keyed by the query's end
        self.url = ""

    def has(self, defect: str) -> bool:
        return defect in self.defects

    def logits(self, prompt: list[int]) -> np.ndarray:
        seed = zlib.crc32(np.array([self.salt, *prompt], dtype=np.int64).tobytes())
        return 2.0 * np.random.RandomState(seed).standard_normal(VOCAB)

    def answer(self, raw: bytes) -> dict | list:
        self.answers += 1
        if self.has("concurrent requests mix") or self.has("not healthy under load"):
            time.sleep(0.02)  # so that requests overlap
        body = self.checked(raw)
        labels, query = body["label_token_ids"], body["query"]
        items = [body["items"]] if isinstance(body["items"], str) else body["items"]
        if self.has("no items are an error") and not items:
            raise Refusal("items is empty")
        prompts = self.prompts(query, items, bool(body.get("item_first")))
        rows = [self.row(prompt, labels, body) for prompt in prompts]
        scores = self.spoiled(rows, query, items, labels)
        usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": 0}
        answer = {"scores": scores, "model": body.get("model"), "object": "scoring"}
        if self.has("another object"):
            answer["object"] = "list"
        if self.has("answers are lists"):
            return [answer]
        return answer | {"usage": None if self.has("no usage") else usage}

    def checked(self, raw: bytes) -> dict:
        try:
            body = json.loads(raw)
            query, items = body.get("query", []), body["items"]
            labels = body["label_token_ids"] = self.labels_of(body)
            self.check_types(body, query, items, labels)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            if self.has("bad bodies are errors of the server"):
                raise Refusal("oops", 500) from error
            if self.has("bad bodies kill"):
                self.dead = True
            raise Refusal("no such request") from error
        ids = [id for part in [query, *items] if not isinstance(part, str) for id in part]
        if any(id < 0 for id in ids) and not self.has("tokens are not looked at"):
            raise Refusal("a negative token id")
        if any(id >= VOCAB for id in ids) and not self.has("tokens are not looked at"):
            raise Refusal(f"a token id over {VOCAB - 1}")
        limit = VOCAB - 1 if self.has("the last id is refused") else VOCAB
        if any(not 0 <= id < limit for id in labels) and not self.has("labels are not looked at"):
            raise Refusal(f"labels are below {limit}")
        longest = len(query) + max(map(len, items), default=0)
        if longest > CONTEXT and not self.has("long prompts are cut"):
            raise Refusal("too long" if self.has("no numbers") else f"the limit is {CONTEXT}")
        if len(items) > 256 and self.has("many items are refused"):
            raise Refusal("too many items", 503)
        return body

    def labels_of(self, body: dict) -> list | None:
        """Return a body's labels; the model's own, if it has some and the body names none."""
        ids = body.get("label_token_ids")
        if ids is not None or not self.has("there are default labels"):
            return ids
        if "label_token_ids" in body and self.has("null is one label"):
            return [3]
        if "label_token_ids" in body and self.has("null is other labels"):
            return [4, 6]
        return [3, 5]

    def check_types(self, body, query, items, labels) -> None:
        loose = self.has("types are not looked at")
        if not loose and not isinstance(body.get("apply_softmax", False), bool):
            raise TypeError
        if not isinstance(items, str | list) or not (labels or self.has("labels may be empty")):
            raise TypeError
        if isinstance(labels, str) or any(type(id) is not int and not loose for id in labels):
            raise TypeError
        kinds = {isinstance(item, str) for item in items} | (
            {isinstance(query, str)} if query else set()
        )
        if not loose and (len(kinds) > 1 or not all(isinstance(i, str | list) for i in items)):
            raise TypeError
        if not loose and items and not query and not all(items):
            raise TypeError

    def prompts(self, query, items, item_first: bool) -> list[list[int]]:
        if self.has("item_first is ignored") and len(items) > 1:
            item_first = False
        encode = self.encode if isinstance(query, str) else list
        if isinstance(query, str) and not self.has("text is tokenised apart"):
            return [encode(item + query if item_first else query + item) for item in items]
        prompts = []
        for index, item in enumerate(items):
            own = encode(item)
            if self.has("an empty item is a delimiter") and not own:
                own = [9]
            if self.has("an empty query is a delimiter") and not query:
                own = [9, *own]
            if self.has("long items are cut"):
                own = own[:1000]
            if self.has("items see the item before") and index:
                own = [*encode(items[index - 1]), *own]
            if self.has("items see how many there are") and len(items) > 2:
                own = [len(items), *own]
            if isinstance(query, str) and len(items) > 1:
                own = [1, *own]  # with a BOS
            prompts.append([*own, *encode(query)] if item_first else [*encode(query), *own])
        return prompts

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def row(self, prompt, labels, body) -> list[float]:
        logits = self.logits(prompt[:CONTEXT])
        if self.has("labels are not looked at"):
            labels = [id % VOCAB for id in labels]
        p = np.exp(logits - np.logaddexp.reduce(logits))[[int(id) for id in labels]]
        if self.has("probabilities are shared by the labels"):
            p = p / len(labels)
        if self.has("concurrent requests mix") and self.under_way > 1:
            p = p + 0.1
        if not body.get("apply_softmax", self.has("softmax is on")):
            return (np.log(p) if self.has("log-probabilities") else p).tolist()
        if self.has("a softmax of probabilities"):
            p = np.exp(p)
        return (p if self.has("no softmax") else p / p.sum()).tolist()

    def spoiled(self, rows, query, items, labels):
        """Apply the defects that need only the right answer."""
        if self.has("rows are sorted"):
            rows = sorted(rows)
        if self.has("columns are in the order of the ids"):
            rows = [[row[i] for i in np.argsort(labels, kind="stable")] for row in rows]
        if self.has("all rows are the first"):
            rows = [rows[0]] * len(rows)
        if self.has("equal items differ"):
            rows = [[x + 0.01 * index for x in row] for index, row in enumerate(rows)]
        if self.has("equal labels differ"):
            rows = [[x * (1 + 1e-6 * n) for n, x in enumerate(row)] for row in rows]
        if self.has("jitter"):
            rows = [[x * (1 + 1e-9 * self.answers) for x in row] for row in rows]
        key = (len(query), tuple(query[-5:]), str(items))
        if self.has("a query is found by its end"):
            rows = self.seen.setdefault(key, rows)
        if self.has("warm differs") and key in self.seen:
            rows = [[x + 0.01 for x in row] for row in rows]
        if self.has("warm differs"):
            self.seen[key] = rows
        return rows


@contextmanager
def running(server: WrongServer) -> Iterator[WrongServer]:
    """Serve on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.reply(200, {"data": [{"id": MODEL}]})
            else:
                busy = server.has("not healthy under load") and server.under_way
                self.reply(503 if busy else 200, {})

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            server.under_way += 1
            try:
                sent = self.headers["Authorization"]
                if server.key and sent != f"Bearer {server.key}".encode().decode("latin-1"):
                    raise Refusal("no such key", 401)
                if server.dead:
                    raise Refusal("dead", 500)
                self.reply(200, server.answer(raw))
            except Refusal as refusal:
                words = {} if server.has("no words") else {"message": str(refusal)}
                self.reply(refusal.status, {"error": words})
            finally:
                server.under_way -= 1

        def reply(self, status: int, body: object) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    class Listener(ThreadingHTTPServer):
        request_queue_size = 64  # the suite sends concurrent requests

    with Listener(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        server.url = f"http://127.0.0.1:{listener.server_address[1]}"
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()

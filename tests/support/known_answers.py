"""Answers of known latency and scores, for tests of clients."""

import json
import time


def answer_of(status, body, *headers):
    head = "".join(f"{line}\r\n" for line in headers)
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


def scores(body, change=lambda rows: rows):
    """Return an answer that takes 4 ms of the only processor, whose scores, the items' own, have
    been changed; where only the first label has a score, in vLLM's form."""
    time.sleep(0.004)
    asked = json.loads(body or "{}")
    if "items" not in asked:
        return answer_of(404, b"{}")
    items, labels = asked["items"], asked["label_token_ids"]
    rows = change([[(sum(i) % 97 + 1) / (label + 200) for label in labels] for i in items])
    told = {"scores": rows}
    if "add_special_tokens" in asked:
        told = {"data": [{"index": n, "score": row[0]} for n, row in enumerate(rows)][::-1]}
    return answer_of(200, json.dumps(told).encode())

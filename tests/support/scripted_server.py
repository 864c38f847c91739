"""A loopback HTTP server that follows a script, for tests of clients."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Step:
    """One answer after `seconds`; with `close` the server hangs up instead."""

    status: int = 200
    body: Any = None  # JSON; a text is sent as it is
    fields: dict[str, str] = field(default_factory=dict)
    close: bool = False
    seconds: float = 0.0


def refusal(status: int, code: str, **fields: str) -> Step:
    error = {"message": "no", "type": "server_error", "param": None, "code": code}
    return Step(status, {"error": error}, {name.replace("_", "-"): v for name, v in fields.items()})


@dataclass
class Scripted:
    url: str
    requests: list[tuple[dict[str, str], Any]]  # header fields in lower case, body
    most: int = 0  # requests at the same time


@contextmanager
def scripted(script) -> Iterator[Scripted]:
    """Serve a script: a list of steps, whose last one repeats, or a function of a request's
    body."""
    lock, running = threading.Lock(), 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal running
            content = self.rfile.read(int(self.headers.get("content-length", "0")))
            body = json.loads(content) if content else None
            with lock:
                number, running = len(server.requests), running + 1
                server.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
                server.most = max(server.most, running)
            step = script(body) if callable(script) else script[min(number, len(script) - 1)]
            time.sleep(step.seconds)
            with lock:
                running -= 1
            self.close_connection = True
            if not step.close:
                self._answer(step)

        do_GET = do_POST

        def _answer(self, step: Step) -> None:
            text = step.body if isinstance(step.body, str) else json.dumps(step.body)
            self.send_response(step.status)
            for name, value in step.fields.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server = Scripted(f"http://127.0.0.1:{listener.server_port}", [])
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()

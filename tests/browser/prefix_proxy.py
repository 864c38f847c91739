"""A proxy that has the server below a path, as one server of several."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PREFIX = "/models/one"


@contextmanager
def below_a_path(url: str) -> Iterator[str]:
    """Yield the address of a proxy to the server at `url`; everything outside PREFIX is 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(f"{PREFIX}/"):
                self.send_error(404)
                return
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length) if length else None
            kinds = ("Content-Type", "Authorization", "Accept")
            fields = {name: self.headers[name] for name in kinds if name in self.headers}
            target = url + self.path.removeprefix(PREFIX)
            try:
                answer = urllib.request.urlopen(urllib.request.Request(target, body, fields))
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                content = answer.read()
                self.send_response(answer.status)
                for name in ("Content-Type", "Content-Security-Policy"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}{PREFIX}"
        finally:
            proxy.shutdown()
            thread.join()

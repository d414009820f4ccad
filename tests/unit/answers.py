"""A server that answers as a Prefect server does in one respect, for what a real one never says."""

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def server(
    answers: dict[str, tuple[int, str]], login: str = "", asked: list[tuple[str, str]] | None = None
) -> Iterator[str]:
    """URL of a server that answers by a path's beginning, with status and body; otherwise with 404.

    A server with a ``login`` (``name:password``) requires it, except for the path ``/health``.
    The path and the body of each request are appended to ``asked``.
    """
    token = f"Basic {base64.b64encode(login.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
            if asked is not None:
                asked.append((self.path.removeprefix("/api"), body))
            known = [answers[path] for path in answers if self.path.startswith(f"/api{path}")]
            status, body = known[0] if known else (404, "{}")
            if login and self.headers.get("authorization") != token and self.path != "/api/health":
                status, body = 401, '{"exception_message": "Unauthorized"}'
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}/api"
        made.shutdown()

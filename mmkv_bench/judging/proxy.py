"""A server on this process's loopback that lmms-eval's scorers take for OpenAI. It answers from a scoring pass.

Scorers read the judge's address when their module is loaded, some once per process, in one of two forms: the base url (clients
of the package `openai`) or the full url (posted to unchanged). The proxy answers both. It never waits for a judge and uses no
network. A question without an answer gets a filler, and the scoring_pass remembers that.
"""

from __future__ import annotations

import json
import secrets
import socketserver
import threading
import time
from functools import cache, partial
from http.server import BaseHTTPRequestHandler
from typing import Any

from mmkv_bench.judging.client import open_pass
from mmkv_bench.judging.questions import Question

PATH = "/v1/chat/completions"
LARGEST = 64 << 20  # maximum bytes of a question


class Proxy(socketserver.ThreadingTCPServer):
    """Local server that stands in for OpenAI. Its address is known once it is made, but it answers only after `listen`.

    token: the key that scorers get, so that other processes cannot ask in their name."""

    daemon_threads = True

    def __init__(self) -> None:
        self.token = f"loopback-{secrets.token_hex(16)}"
        super().__init__(("127.0.0.1", 0), partial(_Handler, self.token), bind_and_activate=False)
        self.server_bind()
        self._thread: threading.Thread | None = None

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def listen(self) -> None:
        """Start answering. Safe to call twice."""
        if self._thread is None:
            self.server_activate()
            self._thread = threading.Thread(target=self.serve_forever, name="judge-proxy", daemon=True)
            self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a scorer that closed the connection."""


@cache
def proxy() -> Proxy:
    """Return this process's proxy."""
    return Proxy()


def task_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return environment variables by which a task's code uses the proxy as its judge, without a real key.

    environment: the process's environment, for its list of hosts without an HTTP proxy.
    """
    judge = proxy()
    direct = environment.get("no_proxy") or environment.get("NO_PROXY")
    direct = f"{direct},127.0.0.1" if direct else "127.0.0.1"
    return {
        "API_TYPE": "openai",
        "OPENAI_API_KEY": judge.token,
        "OPENAI_API_URL": judge.root + PATH,  # used as base or as full url; the proxy answers both paths
        "OPENAI_BASE_URL": f"{judge.root}/v1",  # of the package `openai`
        "MODEL_VERSION": "judge",  # ignored: the configured model is asked
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # of a silent connection [s]

    def __init__(self, token: str, *request: Any) -> None:
        self.token = token
        super().__init__(*request)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        body = self.rfile.read(int(length)) if length.isdecimal() and int(length) <= LARGEST else b""
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            return self._send(401, {"error": {"message": "this address answers the scorers of its own process"}})
        if not self.path.endswith("/chat/completions"):
            return self._send(404, {"error": {"message": "only /chat/completions is answered"}})
        scoring_pass = open_pass()
        if scoring_pass is None:
            return self._send(503, {"error": {"message": "nothing is being scored"}})
        try:
            request = json.loads(body)
            limit = request.get("max_tokens") or request.get("max_completion_tokens") or 1024
            question = Question.of(request["messages"], request.get("temperature", 0.0), limit)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return self._send(400, {"error": {"message": f"no chat completion request: {error!r}"}})
        message = {"role": "assistant", "content": scoring_pass.fill(question)}
        completion = {"id": "judge", "object": "chat.completion", "created": int(time.time()), "model": "judge"}
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        return self._send(200, completion | {"choices": choices, "usage": usage})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing: rows and notices report on questions."""

"""A server that lmms-eval's scorers take for OpenAI: on the loopback of this process, with the answers of a scoring pass.

Scorers read the judge's address when their module is loaded, some once for the whole process, and know two conventions
for it: the base url (clients of the package `openai`) and the full one (posted to as it is). The proxy answers both.
It never waits for a judge and reaches no network: what has no answer gets a filler, and the scoring_pass remembers that.
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
LARGEST = 64 << 20  # bytes of a question


class Proxy(socketserver.ThreadingTCPServer):
    """The address exists from the start; nothing listens there before `listen`. `token` is the key that scorers see:
    no other process can ask in their name."""

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
        """Start answering; again is fine."""
        if self._thread is None:
            self.server_activate()
            self._thread = threading.Thread(target=self.serve_forever, name="judge-proxy", daemon=True)
            self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scorer that hung up."""


@cache
def proxy() -> Proxy:
    """This process's proxy."""
    return Proxy()


def task_variables(environment: dict[str, str]) -> dict[str, str]:
    """The environment in which a task's code finds the proxy where it looks for a judge, and no key.

    environment: the process's own, for the hosts that are reached without an HTTP proxy.
    """
    judge = proxy()
    direct = environment.get("no_proxy") or environment.get("NO_PROXY")
    direct = f"{direct},127.0.0.1" if direct else "127.0.0.1"
    return {
        "API_TYPE": "openai",
        "OPENAI_API_KEY": judge.token,
        "OPENAI_API_URL": judge.root + PATH,  # taken as base or as full url: both paths are answered
        "OPENAI_BASE_URL": f"{judge.root}/v1",  # of the package `openai`
        "MODEL_VERSION": "judge",  # the configured model is asked, whatever the scorer names
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # of a connection that stays silent [s]

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
        """Nothing: rows and notices say what became of questions."""

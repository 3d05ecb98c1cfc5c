"""A judge behind real HTTP on the loopback: it answers, and misbehaves in the ways that endpoints do."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

Reply = Callable[[list[dict]], str]


class JudgeServer(socketserver.ThreadingTCPServer):
    """Each request is handled by the next of `behaviours`, and by `answer` when none is left.

    requests: bodies in the order of their arrival; keys: their Authorization headers; most: requests under way at once.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, reply: Reply) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.behaviours: list[Callable[[_Handler, dict], None]] = []
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.wanted_key: str | None = None
        self.pause_s = 0.0
        self.under_way = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, client_address) -> None:
        """Clients hang up on purpose here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: JudgeServer = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(body)
            server.keys.append(self.headers.get("Authorization"))
            server.paths.append(self.path)
            behave = server.behaviours.pop(0) if server.behaviours else answer
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        try:
            time.sleep(server.pause_s)
            if server.wanted_key is not None and server.keys[-1] != f"Bearer {server.wanted_key}":
                return self.send(401, json.dumps({"error": f"no such key: {self.headers.get('Authorization')}"}))
            behave(self, body)
        finally:
            with server.lock:
                server.under_way -= 1

    def send(self, status: int, text: str, **headers: str) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *values) -> None:
        pass


def completion(text, model: str = "served-model") -> str:
    return json.dumps({"model": model, "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]})


def answer(handler: _Handler, body: dict) -> None:
    handler.send(200, completion(handler.server.reply(body["messages"])))


def says(text) -> Callable:
    """A proper completion with this content."""
    return lambda handler, body: handler.send(200, completion(text))


def fails(status: int, text: str = "try later", **headers: str) -> Callable:
    return lambda handler, body: handler.send(status, text, **headers)


def nonsense(handler: _Handler, body: dict) -> None:
    handler.send(200, "<html>welcome</html>")


def other_json(handler: _Handler, body: dict) -> None:
    handler.send(200, json.dumps({"choices": []}))


def truncated(handler: _Handler, body: dict) -> None:
    data = completion("5").encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[: len(data) // 2])
    handler.close_connection = True


def hangs_up(handler: _Handler, body: dict) -> None:
    handler.close_connection = True


def drips(handler: _Handler, body: dict) -> None:
    """One byte every 50 ms, of an answer that would take a minute."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1200")
    handler.end_headers()
    for _ in range(1200):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def drips_headers(handler: _Handler, body: dict) -> None:
    """The same with a header that does not end."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Patience: ")
    for _ in range(1200):
        handler.wfile.write(b"x")
        time.sleep(0.05)


def endless(handler: _Handler, body: dict) -> None:
    handler.send(200, "x" * (9 << 20))


def silent(seconds: float) -> Callable:
    def behave(handler: _Handler, body: dict) -> None:
        time.sleep(seconds)
        handler.close_connection = True

    return behave


@contextmanager
def serving(reply: Reply = lambda messages: "0.5") -> Iterator[JudgeServer]:
    with JudgeServer(reply) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def dead_address() -> str:
    """A base url where nothing listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"

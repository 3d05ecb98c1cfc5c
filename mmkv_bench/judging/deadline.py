"""A time limit for one HTTP request as a whole. What `requests` calls a timeout is the longest silence: a server that
sends a byte of its headers now and then would be listened to for ever."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import requests


class Watch:
    """Ends the connection that one thread talks through when the time of its request is up.

    late: whether that happened to the last request; whatever came of it is then no answer.
    """

    def __init__(self) -> None:
        self.connection: Any = None
        self.late = False

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        self.late = False
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def uses(self, connection: Any) -> None:
        """Called by a connection before it waits for anything. Raises TimeoutError when the time is up already."""
        self.connection = connection
        if self.late:
            raise TimeoutError("the request's time is up")

    def _end(self) -> None:
        self.late = True
        if (sock := getattr(self.connection, "sock", None)) is not None:
            with contextlib.suppress(OSError):  # ended by itself
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # also below TLS; the waiting thread reads an end


def watched_session(watch: Watch) -> requests.Session:
    """A session whose connections tell `watch` that they are in use; for one thread."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.connection import HTTPConnection, HTTPSConnection

    class Plain(HTTPConnection):
        def connect(self) -> None:
            watch.uses(self)
            super().connect()

        def request(self, *args: Any, **options: Any) -> None:
            watch.uses(self)
            super().request(*args, **options)

    class Secure(Plain, HTTPSConnection):
        """Its own `connect` comes after that of `Plain`, which it calls."""

    pools = {
        "http": type("PlainPool", (HTTPConnectionPool,), {"ConnectionCls": Plain}),
        "https": type("SecurePool", (HTTPSConnectionPool,), {"ConnectionCls": Secure}),
    }

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **options: Any) -> None:
            super().init_poolmanager(*args, **options)
            self.poolmanager.pool_classes_by_scheme = pools

        def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
            manager = super().proxy_manager_for(*args, **options)
            manager.pool_classes_by_scheme = pools
            return manager

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
    return session

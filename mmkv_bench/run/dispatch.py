"""Samples handed out to the processes of one run as they ask for them, so that none waits for another's share.

All processes go through the same samples in the same order; each answers those that it is given. The starting process keeps
who has what (`Dispatcher`), over a socket to each that ends with it: what a process that died had and had not answered is free
again, and those that are left come back for it.

Messages are JSON, a line each: {"take": [dataset, sample]} -> true | false; {"done": [dataset, sample]}; {"again": true} ->
whether there is something to come back for, answered when nobody can leave something any more.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

VARIABLE = "MMKV_BENCH_DISPATCH"
"""Environment variable with the number of the descriptor on which a process asks."""
_POLL_S = 0.5

Key = tuple[str, str]


class Dispatcher:
    """Assignment of samples to processes. Thread-safe: each process is served by a thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owners: dict[Key, int] = {}
        self._done: set[Key] = set()
        self._freed: dict[Key, int] = {}
        self._deaths = 0
        self._count = 0
        self._seen: dict[int, int] = {}  # living process -> deaths when it last came back
        self._waiting: set[int] = set()

    def connect(self) -> socket.socket:
        """The end of a new process; to be closed here when it has it."""
        ours, theirs = socket.socketpair()
        with self._changed:
            self._count += 1
            owner = self._count
            self._seen[owner] = self._deaths
        threading.Thread(target=self._serve, args=(owner, ours), name=f"dispatch-{owner}", daemon=True).start()
        return theirs

    def take(self, owner: int, key: Key) -> bool:
        """Tell whether the sample is this process's to answer."""
        with self._changed:
            if key in self._owners:
                return False
            self._owners[key] = owner
            self._freed.pop(key, None)
            return True

    def done(self, key: Key) -> None:
        """It is answered and stored."""
        with self._changed:
            self._done.add(key)

    def again(self, owner: int) -> bool:
        """Waits until nobody else is at work or something was left since this process last asked; whether something was."""
        with self._changed:
            self._waiting.add(owner)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._left(owner) or not self._seen.keys() - self._waiting)
            found = self._left(owner)
            if found:
                self._seen[owner] = self._deaths
                self._waiting.remove(owner)
            return found

    def died(self, owner: int) -> None:
        """Free the samples that a process had and had not answered."""
        with self._changed:
            self._seen.pop(owner, None)
            lost = [key for key, of in self._owners.items() if of == owner and key not in self._done]
            self._deaths += 1
            for key in lost:
                del self._owners[key]
                self._freed[key] = self._deaths
            self._changed.notify_all()

    def _left(self, owner: int) -> bool:
        return any(since > self._seen.get(owner, since) for since in self._freed.values())

    def _serve(self, owner: int, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rw") as stream:
                for line in stream:
                    answer = self._answer(owner, json.loads(line))
                    if answer is not None:
                        stream.write(f"{json.dumps(answer)}\n")
                        stream.flush()
        except OSError:
            pass  # it died while it was answered
        finally:
            self.died(owner)

    def _answer(self, owner: int, message: dict[str, Any]) -> bool | None:
        if "take" in message:
            return self.take(owner, tuple(message["take"]))
        if "done" in message:
            self.done(tuple(message["done"]))
            return None
        return self.again(owner)


class SampleQueueClient:
    """The samples that this process is given; all of them where nobody hands them out.

    check: called while this process waits; what it raises ends the waiting.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        number, self._check = os.environ.get(VARIABLE), check
        self._socket = None if number is None else socket.socket(fileno=os.dup(int(number)))
        self._read = b""

    def take(self, dataset: str, sample: str) -> bool:
        """Tell whether to answer it now."""
        return self._asked({"take": [dataset, sample]}, alone=True)

    def done(self, dataset: str, sample: str) -> None:
        """It is stored."""
        if self._socket is not None:
            self._send({"done": [dataset, sample]})

    def again(self) -> bool:
        """Tell whether others left something, once all that is under way has ended."""
        return self._asked({"again": True}, alone=False)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _asked(self, message: dict[str, Any], alone: bool) -> bool:
        if self._socket is None:
            return alone
        self._send(message)
        self._socket.settimeout(_POLL_S)
        while b"\n" not in self._read:
            try:
                got = self._socket.recv(4096)
            except TimeoutError:
                self._check()
                continue
            if not got:
                return False  # who hands them out is gone, and what it started ends
            self._read += got
        line, _, self._read = self._read.partition(b"\n")
        return bool(json.loads(line))

    def _send(self, message: dict[str, Any]) -> None:
        assert self._socket is not None
        self._socket.settimeout(None)
        self._socket.sendall(f"{json.dumps(message)}\n".encode())

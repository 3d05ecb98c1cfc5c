"""Distribution of samples to the processes of one run, one at a time on request, so that no process waits for another's share.

All processes go through the same samples in the same order, and each answers those it gets. The starting process keeps the
assignment (`Dispatcher`) and talks to each process over a socket. If a process dies, the socket ends, and the samples that it
had not answered are free again for the others.

Messages are JSON, one per line. {"take": [dataset, sample]} is answered by true or false. {"done": [dataset, sample]} has no
answer. {"again": true} asks whether a process that died freed samples. The answer comes as soon as it is yes, or when no other
process is at work.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

VARIABLE = "MMKV_BENCH_DISPATCH"
"""Environment variable with the descriptor number of a process's socket."""
_POLL_S = 0.5

Key = tuple[str, str]


class Dispatcher:
    """The assignment of samples to processes. Thread-safe: a thread serves each process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owners: dict[Key, int] = {}
        self._done: set[Key] = set()
        self._freed: dict[Key, int] = {}
        self._deaths = 0
        self._count = 0
        self._seen: dict[int, int] = {}  # living process -> number of deaths at its last `again`
        self._waiting: set[int] = set()

    def connect(self) -> socket.socket:
        """Return a new process's end of the socket. The caller closes it after starting the process."""
        ours, theirs = socket.socketpair()
        with self._changed:
            self._count += 1
            owner = self._count
            self._seen[owner] = self._deaths
        threading.Thread(target=self._serve, args=(owner, ours), name=f"dispatch-{owner}", daemon=True).start()
        return theirs

    def take(self, owner: int, key: Key) -> bool:
        """Assign the sample to this process. Return False if another process has it."""
        with self._changed:
            if key in self._owners:
                return False
            self._owners[key] = owner
            self._freed.pop(key, None)
            return True

    def done(self, key: Key) -> None:
        """Mark the sample as answered and stored."""
        with self._changed:
            self._done.add(key)

    def again(self, owner: int) -> bool:
        """Wait until samples are freed or no other process is at work. Return whether samples were freed since the last call."""
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
        """Free the samples that a process was given but had not answered."""
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
            pass  # the process died while it was answered
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
    """This process's connection to the dispatcher, which assigns samples. Without a dispatcher the process gets all samples.

    check: called while this process waits; an exception ends the wait.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        number, self._check = os.environ.get(VARIABLE), check
        self._socket = None if number is None else socket.socket(fileno=os.dup(int(number)))
        self._read = b""

    def take(self, dataset: str, sample: str) -> bool:
        """Return whether this process must answer the sample now."""
        return self._asked({"take": [dataset, sample]}, alone=True)

    def done(self, dataset: str, sample: str) -> None:
        """Report the sample as stored."""
        if self._socket is not None:
            self._send({"done": [dataset, sample]})

    def again(self) -> bool:
        """Wait until a process dies and leaves samples, or no other process is at work. Return whether there are such samples."""
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
                return False  # the dispatcher is gone, and it ends the processes that it started
            self._read += got
        line, _, self._read = self._read.partition(b"\n")
        return bool(json.loads(line))

    def _send(self, message: dict[str, Any]) -> None:
        assert self._socket is not None
        self._socket.settimeout(None)
        self._socket.sendall(f"{json.dumps(message)}\n".encode())

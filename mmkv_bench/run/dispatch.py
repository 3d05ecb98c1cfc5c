"""A queue of samples for the processes of one run, so that no process waits while another has samples left.

All processes go through the same samples in the same order, and each answers the samples that it gets. The starting
process has the queue (`Dispatcher`) and talks to each process over a pipe. When a process dies, its pipe closes, and
its unfinished samples are free for the other processes.

Messages are JSON. ["take", dataset, sample] is answered by true or false. ["done", dataset, sample] has no answer.
["again"] asks whether samples of a dead process are free: true as soon as some are, or false when all living processes
are waiting.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

VARIABLE = "MMKV_BENCH_DISPATCH"
"""Environment variable with the descriptor number of a process's pipe."""
_POLL_S = 0.5

Key = tuple[str, str]


class Dispatcher:
    """Queue that assigns each sample (question) of a run to one process. One thread serves each process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owners: dict[Key, int] = {}
        self._done: set[Key] = set()
        self._freed: dict[Key, int] = {}
        self._deaths = 0
        self._count = 0
        self._deaths_at_last_answer: dict[int, int] = {}  # living process -> number of deaths at its last `again`
        self._waiting: set[int] = set()

    def connect(self) -> Connection:
        """Register a new process and return its end of a pipe. The caller closes it after starting the process."""
        dispatcher_end, process_end = Pipe()
        with self._changed:
            self._count += 1
            owner = self._count
            self._deaths_at_last_answer[owner] = self._deaths
        threading.Thread(
            target=self._serve, args=(owner, dispatcher_end), name=f"dispatch-{owner}", daemon=True
        ).start()
        return process_end

    def take(self, owner: int, key: Key) -> bool:
        """Assign a sample (dataset, id) to the process `owner`. Return False if it is assigned already."""
        with self._changed:
            if key in self._owners:
                return False
            self._owners[key] = owner
            self._freed.pop(key, None)
            return True

    def done(self, key: Key) -> None:
        """Record that the answers of a sample (dataset, id) are stored."""
        with self._changed:
            self._done.add(key)

    def again(self, owner: int) -> bool:
        """Wait until samples are freed or all living processes wait. Return whether samples were freed since the last
        True for `owner`."""
        with self._changed:
            self._waiting.add(owner)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._has_freed_samples(owner) or not self._deaths_at_last_answer.keys() - self._waiting
            )
            has_freed = self._has_freed_samples(owner)
            if has_freed:
                self._deaths_at_last_answer[owner] = self._deaths
                self._waiting.remove(owner)
            return has_freed

    def release(self, owner: int) -> None:
        """Free the samples that the process `owner` had taken but not finished."""
        with self._changed:
            self._deaths_at_last_answer.pop(owner, None)
            unfinished_samples = [key for key, of in self._owners.items() if of == owner and key not in self._done]
            self._deaths += 1
            for key in unfinished_samples:
                del self._owners[key]
                self._freed[key] = self._deaths
            self._changed.notify_all()

    def _has_freed_samples(self, owner: int) -> bool:
        return any(since > self._deaths_at_last_answer.get(owner, since) for since in self._freed.values())

    def _serve(self, owner: int, pipe: Connection) -> None:
        with pipe, suppress(EOFError, OSError):  # the process died, perhaps while it was answered
            while True:
                verb, *sample = json.loads(pipe.recv_bytes())
                if verb == "done":
                    self.done(tuple(sample))
                else:
                    answer = self.take(owner, tuple(sample)) if verb == "take" else self.again(owner)
                    pipe.send_bytes(json.dumps(answer).encode())
        self.release(owner)


class SampleQueueClient:
    """A process's connection to the `Dispatcher`. Without a dispatcher, the process answers all samples.

    check: called repeatedly while the process waits; may raise an exception to stop waiting.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        descriptor, self._check = os.environ.get(VARIABLE), check
        self._pipe = None if descriptor is None else Connection(os.dup(int(descriptor)))

    def take(self, dataset: str, sample: str) -> bool:
        """Ask for a sample. Return whether this process must answer the sample."""
        return self._pipe is None or self._ask(self._pipe, "take", dataset, sample)

    def done(self, dataset: str, sample: str) -> None:
        """Report that a sample's answers are stored."""
        if self._pipe is not None:
            self._pipe.send_bytes(json.dumps(["done", dataset, sample]).encode())

    def again(self) -> bool:
        """Wait until a dead process leaves unfinished samples (return True) or no process is working (return False)."""
        return self._pipe is not None and self._ask(self._pipe, "again")

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()

    def _ask(self, pipe: Connection, *message: str) -> bool:
        pipe.send_bytes(json.dumps(message).encode())
        while not pipe.poll(_POLL_S):
            self._check()
        try:
            return bool(json.loads(pipe.recv_bytes()))
        except EOFError:  # the dispatcher is gone, and it ends the processes that it started
            return False

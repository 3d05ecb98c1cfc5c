"""Many questions side by side: attempts with backoff, a bound on what is under way, and an end when the judge is gone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

from mmkv_bench.judging.endpoint import Endpoint, Failure, Reply
from mmkv_bench.judging.judge_config import JudgeSettings
from mmkv_bench.judging.question import Question

LONGEST_WAIT_S = 120.0  # an endpoint that asks for more is not waited for
LOST_IN_A_ROW = 3  # questions without an answer after which an endpoint that has answered counts as gone

Keep = Callable[[Question, Reply], None]


class Asker:
    """Asks one endpoint. `gone` says why it is asked no more, once it is: a dead judge costs one question's attempts.

    An endpoint is gone when it refuses the key or the model, when it never answered and one question's attempts are
    used up, or when that many questions in a row got nothing. Unreadable answers and refusals of one question
    do not count.
    """

    def __init__(self, settings: JudgeSettings, endpoint: Endpoint | None = None) -> None:
        self.settings = settings
        self.endpoint = endpoint or Endpoint(settings)
        self.gone: str | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._answered, self._lost = False, 0
        self._random = random.SystemRandom()  # jitter; scorers seed the shared generator

    def ask_all(self, questions: Mapping[str, Question], keep: Keep) -> dict[str, Reply | Failure]:
        """name -> what became of it. `keep` is called with each reply as it arrives, in the asking thread.

        The first question goes alone until the endpoint has answered once; then `concurrency` at a time.
        """
        outcomes: dict[str, Reply | Failure] = {}
        waiting = dict(questions)
        while waiting and not self._answered and self.gone is None:
            name = next(iter(waiting))
            outcomes[name] = self._attempts(waiting.pop(name), keep)
        with ThreadPoolExecutor(self.settings.concurrency, thread_name_prefix="judge") as pool:
            futures = {pool.submit(self._attempts, question, keep): name for name, question in waiting.items()}
            try:
                for future in as_completed(futures):
                    outcomes[futures[future]] = future.result()
            except BaseException:  # an interrupted run, a full disk: nothing more is asked
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return outcomes

    def _attempts(self, question: Question, keep: Keep) -> Reply | Failure:
        failure = Failure(self.gone or "not asked")
        for attempt in range(1 + self.settings.retries):
            if self.gone is not None or self._stop.is_set():
                return Failure(self.gone or "the run was interrupted")
            try:
                reply = self.endpoint.ask(question)
            except Failure as caught:
                failure = caught
            else:
                keep(question, reply)
                self._count(None)
                return reply
            if not failure.passes or failure.wait_s > LONGEST_WAIT_S:
                break
            if attempt < self.settings.retries and not failure.alone:
                self._stop.wait(max(self._backoff(attempt), failure.wait_s))
        self._count(failure)
        return failure

    def _backoff(self, attempt: int) -> float:
        """Doubled with each attempt, with jitter so that questions do not come back together [s]."""
        return min(LONGEST_WAIT_S, self.settings.backoff_s * 2**attempt) * self._random.uniform(0.5, 1.0)

    def _count(self, failure: Failure | None) -> None:
        with self._lock:
            if failure is None or failure.alone:  # it answers, if not this question
                self._answered, self._lost = True, 0
                return
            self._lost += 1
            if not failure.passes or not self._answered or self._lost >= LOST_IN_A_ROW:
                self.gone = self.gone or failure.reason

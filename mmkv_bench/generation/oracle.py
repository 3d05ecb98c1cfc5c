"""Scores of methods that know the full cache's own answer: it is decoded first, on the borrowed cache.

This decode is separate from that of the cell `full`, so that collecting attention neither slows nor endangers that cell.
Its whole time is counted as the scorer's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch

from mmkv_bench import devices
from mmkv_bench.compression.listeners import AnswerAttention
from mmkv_bench.compression.session import Session
from mmkv_bench.generation.decode import decode
from mmkv_bench.generation.forks import borrow
from mmkv_bench.generation.prefill import Key, Prefilled, PrefillGroup, score_key
from mmkv_bench.generation.result import CellSpec


@torch.no_grad()
def read_answers(session: Session, group: PrefillGroup, cells: Sequence[CellSpec]) -> None:
    """Replace the scores of cells with `needs.answer` by scores that know the answer; one decode per protocol.

    A fault becomes the failure of these scores only. `prefilled.answer_steps` and `score_seconds` are filled.
    """
    prefilled = group.prefilled
    for protocol, members in _waiting(cells, prefilled).items():
        start, answer, failure = group.meter.now(), AnswerAttention(prefilled.length), None
        deadline = None if group.timeout_s is None else time.monotonic() + group.timeout_s
        session.answer = answer
        try:
            with borrow(prefilled, protocol) as cache:
                decoded = decode(group, cache, 1, protocol, deadline)[0]
            if decoded.error is not None:
                raise decoded.error
        except Exception as error:  # noqa: BLE001 - the status of the cells that wanted the answer, not of the others
            failure = error.with_traceback(None)
        finally:
            session.answer = None
        prefilled.answer_steps[protocol] = answer.steps
        seconds = group.meter.now() - start
        for key, cell in members.items():
            prefilled.score_seconds[key] += seconds
            if failure is not None:
                prefilled.failures[key] = failure
            else:
                _finish(prefilled, key, cell, answer)


def _waiting(cells: Sequence[CellSpec], prefilled: Prefilled) -> dict[str, dict[Key, CellSpec]]:
    """Return protocol -> score key -> a cell with that score, for scores that exist and need the answer."""
    waiting: dict[str, dict[Key, CellSpec]] = {}
    for cell in cells:
        with contextlib.suppress(Exception):  # a faulty part comes again when its cell is planned
            lengths = prefilled.lengths[cell.protocol]
            if not cell.evicts(lengths.reduced) or not cell.compressor.needs.answer:
                continue
            key = score_key(cell, lengths)
            if key in prefilled.scores and key not in prefilled.failures:
                waiting.setdefault(cell.protocol, {}).setdefault(key, cell)
    return waiting


def _finish(prefilled: Prefilled, key: Key, cell: CellSpec, answer: AnswerAttention) -> None:
    now = devices.at(prefilled.logits.device).now
    start = now()
    try:
        finished = cell.compressor.eviction.scorer.with_answer
        scores = prefilled.scores[key]
        prefilled.scores[key] = [finished(score, answer.mass(layer)) for layer, score in enumerate(scores)]
    except Exception as error:  # noqa: BLE001 - the method's own fault
        prefilled.failures[key] = error.with_traceback(None)
    prefilled.score_seconds[key] += now() - start

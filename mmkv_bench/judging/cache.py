"""Answers of judges by content: one JSON file per question, whoever asked it, so that scoring again costs nothing."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmkv_bench.errors import StoreError
from mmkv_bench.judging.question import Question

CHECKSUM = "sha256"
"""Key of the checksum of a file's other keys."""


def _checksum(record: Mapping[str, Any]) -> str:
    others = {name: value for name, value in record.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(others, sort_keys=True, default=dict).encode()).hexdigest()[:16]


class AnswerCache:
    """`<folder>/<first two digits>/<digest>.json`. Any number of processes may read and write; files are whole or absent.

    address: of the endpoint whose answers they are (`JudgeSettings.address`).
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = Path(folder).expanduser().absolute()  # scoring changes the working folder
        self.address = address

    def get(self, question: Question, model: str) -> str | None:
        """The kept answer; None when there is none, none that can be read, or one that is not what was kept (older files have no
        checksum)."""
        try:
            kept = json.loads(self._file(question, model).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if isinstance(kept, dict) and kept.get(CHECKSUM, "") not in ("", _checksum(kept)):
            return None
        answer = kept.get("answer") if isinstance(kept, dict) else None
        return answer if isinstance(answer, str) and question.readable(answer) else None

    def put(self, question: Question, model: str, answer: str, served: str | None) -> None:
        """Keep an answer, with the question it answers; `served` is the model the endpoint says it was.

        Raises StoreError when the folder cannot be written.
        """
        file = self._file(question, model)
        record: dict[str, Any] = {
            "model": model,
            "messages": list(question.messages),
            "temperature": question.temperature,
            "max_tokens": question.max_tokens,
            "answer": answer,
            "served_model": served,
        }
        record[CHECKSUM] = _checksum(record)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as staged:
                json.dump(record, staged, indent=1, sort_keys=True, default=dict)
            os.replace(name, file)
        except OSError as error:
            raise StoreError(
                f"the judge's answers cannot be kept in {self.folder} ({error.strerror}); give a folder that can be "
                "written: judge.cache=<folder>"
            ) from None

    def _file(self, question: Question, model: str) -> Path:
        digest = question.digest(model, self.address)
        return self.folder / digest[:2] / f"{digest}.json"

"""The questions of FAVOR-Bench, out of the released annotations.

`video_perspective.json` (what the benchmark's own script reads) is a list of videos,

    {"video_name": str, "questions": [{"question", "options": [str, ...], "correct_answer", "task_type"}, ...], ...}

and `question_perspective.json` a list of the same questions, each with `video_name` and `question_key`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.datasets.tasks.files import as_split, find, load_records, media_name
from mmkv_bench.errors import DataError

if TYPE_CHECKING:
    import datasets

# Action sequence, holistic action classification, single and multiple action detail, camera motion, non-subject motion.
TASK_TYPES = ("AS", "HAC", "SAD", "MAD", "CM", "NSM")
FIELDS = ("question", "options", "correct_answer", "task_type")
COLUMNS = {
    "sample_id": "string",
    "video": "string",
    "question": "string",
    "options": "string[]",
    "answer": "string",
    "task_type": "string",
}


def read_questions(folder: Path) -> dict[str, datasets.Dataset]:
    """One document a question. Raises DataError for files that are missing or not in the released schema."""
    file = find(folder, ("video_perspective.json", "question_perspective.json"), "the questions of FAVOR-Bench")
    nested = file.name == "video_perspective.json"
    rows = []
    for position, record in enumerate(load_records(file, ("video_name", *(("questions",) if nested else FIELDS)))):
        video = media_name(record["video_name"], file, position).removesuffix(".mp4")
        questions = record["questions"] if nested else [record]
        rows += _rows(video, questions, file, position)
    if not rows:
        raise DataError(f"{file} has no question; give the released file")
    return as_split(rows, COLUMNS, "test")


def _rows(video: str, questions: list[Mapping[str, Any]], file: Path, position: int) -> Iterator[dict[str, Any]]:
    for number, question in enumerate(questions, start=1):
        missing = [name for name in FIELDS if name not in question]
        problem = f"lacks {', '.join(missing)}" if missing else _problem(question)
        if problem:
            raise DataError(
                f"question {number} of video {position} ({video}) of {file} {problem}; give the released file"
            )
        yield {
            "sample_id": str(question.get("question_key") or f"{video}_{number}"),
            "video": f"videos/{video}.mp4",
            "question": question["question"],
            "options": question["options"],
            "answer": question["correct_answer"],
            "task_type": question["task_type"],
        }


def _problem(question: Mapping[str, Any]) -> str | None:
    if question["task_type"] not in TASK_TYPES:
        return f"has task_type {question['task_type']!r}, none of {', '.join(TASK_TYPES)}"
    if question["correct_answer"] not in question["options"]:
        return "has a correct_answer that is none of its options"
    return None

"""Questions to a judge, the digests under which answers are stored, and the form of answers that lmms-eval's scorers read.

A scorer gives 0 for an answer that it cannot read. So an answer must have the form that its metric's code reads. Otherwise the
question is repeated, and if that does not help, the sample is not judged. For tasks that are not named in this file, each
question counts for all metrics, and each answer that is not blank is readable.

Read in lmms-eval 0.7.3: tasks/mmvet/utils.py, tasks/videochatgpt/utils.py, tasks/worldqa/utils.py and worldqa_mc_evaluator.py,
tasks/hrbench/hrbench_evals.py.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmkv_bench.errors import MMKVError

Readable = Callable[[str], bool]


class JudgeError(MMKVError):
    """A question has no answer: no judge, a judge that fails or is unreadable, or not asked yet. Never a score."""


def not_blank(text: str) -> bool:
    return bool(text.strip())


@dataclass(frozen=True)
class Question:
    """A request to a judge, without the model's id and the endpoint's address.

    messages     OpenAI's chat messages: {"role", "content"}, content a text or a list of parts
    temperature  of the judge's sampling
    max_tokens   maximum length of the answer [tokens]
    readable     tells whether the scorer can read an answer; not part of the question's identity
    """

    messages: tuple[Mapping[str, Any], ...]
    temperature: float = 0.0
    max_tokens: int = 1024
    readable: Readable = field(default=not_blank, compare=False)

    @classmethod
    def of(
        cls,
        prompt: str | Sequence[Mapping[str, Any]],
        temperature: float = 0.0,
        max_tokens: int = 1024,
        readable: Readable = not_blank,
    ) -> Question:
        """Make a question from one user prompt or from chat messages. readable: whether an answer is usable."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        return cls(tuple(messages), float(temperature), int(max_tokens), readable)

    def digest(self, model: str, address: str) -> str:
        """Return the sha256 (hex) of the model's id, the endpoint's address, the messages, the temperature and
        max_tokens."""
        return _sha256([model, address, list(self.messages), self.temperature, self.max_tokens])

    def text(self, of: int | None = None) -> str:
        """Return the joined text of the first `of` messages; None: of all."""
        return "\n".join(part for message in self.messages[:of] for part in _content_texts(message.get("content")))


def prompts_digest(questions: Sequence[Question]) -> str:
    """Return the sha256 of the messages of several questions in order, independent of judge and answers."""
    return _sha256([list(question.messages) for question in questions])


def _content_texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [str(part.get("text", "")) for part in content or [] if isinstance(part, Mapping)]


def _sha256(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(canonical.encode()).hexdigest()


HIGHEST = 5  # maximum score of Video-ChatGPT's criteria


@dataclass(frozen=True)
class JudgedMetric:
    """A metric of a task whose scorer asks a judge.

    metric: its name; None means all metrics of the sample.
    mark: a text in the first message of this metric's questions only; "" for all questions of the task.
    readable: tells whether the metric's code can read an answer.
    """

    metric: str | None
    mark: str
    readable: Readable


def metric_of(judged: tuple[JudgedMetric, ...], question: Question) -> JudgedMetric | None:
    """Return the metric whose `mark` is in the question's first message; None without one.

    Later messages may contain a mark as part of a model's answer.
    """
    instructions = question.text(of=1)
    return next((metric for metric in judged if metric.mark in instructions), None)


def mark_of_one(text: str) -> bool:
    """Return True if an MM-Vet judge's reply starts with a number from 0 to 1."""
    return _number_within(text.split(" ", maxsplit=1)[0], 1.0)


def criterion_score(text: str) -> bool:
    """Return True if a Video-ChatGPT judge's reply is a Python dictionary whose `score` is a number from 0 to 5.

    An integer may also be text.
    """
    try:
        score = ast.literal_eval(text)["score"]
        return not isinstance(score, bool) and 0 <= (int(score) if isinstance(score, str) else score) <= HIGHEST
    except (ValueError, SyntaxError, LookupError, TypeError, MemoryError, RecursionError):
        return False


def points(text: str) -> bool:
    """Return True if the last line of a WorldQA judge's reply is a number from 0 to 1."""
    return _number_within(text.strip().split("\n")[-1], 1.0)


def option_letter(text: str) -> bool:
    """Return True if a judge's reply to a WorldQA question with choices is one letter from A to E (E: none of them)."""
    return re.fullmatch(r"[A-E]", text.strip(), re.IGNORECASE) is not None


def one_letter_among_words(text: str) -> bool:
    """Return True if an HR-Bench judge's reply has exactly one of the letters A to D as a word, or none of them and Z."""
    spaced_words = re.sub(r"[.()\[\],:;!*#{}]", " ", text).split()
    letters = {letter for letter in "ABCD" if letter in spaced_words}
    return len(letters) == 1 or (not letters and "Z" in spaced_words)


JUDGED: dict[str, tuple[JudgedMetric, ...]] = {
    "mmvet": (JudgedMetric("gpt_eval_score", "", mark_of_one),),
    "videochatgpt_gen": (
        JudgedMetric("gpt_eval_score_correctness", "evaluating the factual accuracy of", criterion_score),
        JudgedMetric("gpt_eval_score_detailed_orientation", "evaluating the detail orientation of", criterion_score),
        JudgedMetric("gpt_eval_score_context", "evaluating the contextual understanding of", criterion_score),
    ),
    "videochatgpt_temporal": (JudgedMetric("gpt_eval_score_temporal", "", criterion_score),),
    "videochatgpt_consistency": (JudgedMetric("gpt_eval_score_consistency", "", criterion_score),),
    "worldqa_gen": (JudgedMetric("gpt_eval", "", points),),
    "worldqa_mc": (JudgedMetric("gpt_eval", "", option_letter),),
    "hrbench4k": (JudgedMetric(None, "", one_letter_among_words),),
    "hrbench8k": (JudgedMetric(None, "", one_letter_among_words),),
}


def _number_within(word: str, highest: float) -> bool:
    try:
        return 0.0 <= float(word) <= highest
    except ValueError:
        return False


PAIRED = {"gpt_eval_score_consistency": "video_name"}
"""Metric to the field that is equal in both samples of a pair."""


def pairs(fields: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the pairs of documents, by number, that lmms-eval forms: each document with the next unpaired one of its
    video. A document without a partner is in no pair.

    fields: the video of each document in order.
    """
    first_doc_of_key: dict[Any, int] = {}
    pairs_of_docs = []
    for doc_id, video in enumerate(fields):
        if video in first_doc_of_key:
            pairs_of_docs.append((first_doc_of_key.pop(video), doc_id))
        else:
            first_doc_of_key[video] = doc_id
    return pairs_of_docs


def pair_score(first: Mapping[str, Any], second: Mapping[str, Any], aggregation: Callable[..., Any]) -> float:
    """Return the score of a pair of samples by the task's own aggregation, which may write files into the working
    folder."""
    values = [copy.deepcopy(dict(first)), copy.deepcopy(dict(second))]  # the aggregation changes its arguments
    return float(aggregation(values, args=argparse.Namespace(output_path=".")))

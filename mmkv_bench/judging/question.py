"""One question to a judge, and the digest under which its answer is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmkv_bench.errors import MMKVError

Readable = Callable[[str], bool]


class JudgeError(MMKVError):
    """A question has no answer: no judge, one that fails or cannot be read, or one not asked yet. Never a score."""


def not_blank(text: str) -> bool:
    """True where an answer says anything: the least that is asked of every answer."""
    return bool(text.strip())


@dataclass(frozen=True)
class Question:
    """The request to a judge without the model's id and the endpoint's address.

    messages     OpenAI's chat messages: {"role", "content"}, content a text or a list of parts
    temperature  of the judge's sampling
    max_tokens   longest answer [tokens]
    readable     whether an answer has the form that the scorer can read; no part of the question's identity
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
        """A question from one user prompt or from chat messages."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        return cls(tuple(messages), float(temperature), int(max_tokens), readable)

    def digest(self, model: str, address: str) -> str:
        """sha256 over the model's id, the endpoint's address (`JudgeSettings.address`), the messages, the temperature and
        max_tokens: equal questions, equal digests."""
        return _sha256([model, address, list(self.messages), self.temperature, self.max_tokens])

    def text(self, of: int | None = None) -> str:
        """The text of the first `of` messages, or of all."""
        return "\n".join(part for message in self.messages[:of] for part in _content_texts(message.get("content")))


def prompts_digest(questions: Sequence[Question]) -> str:
    """sha256 over the messages of several questions, in their order; whoever answers, and however."""
    return _sha256([list(question.messages) for question in questions])


def _content_texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [str(part.get("text", "")) for part in content or [] if isinstance(part, Mapping)]


def _sha256(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(canonical.encode()).hexdigest()

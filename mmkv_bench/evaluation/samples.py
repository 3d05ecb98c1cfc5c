"""Samples for asking and scoring: reference, request, answer, score. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL import Image


class SampleRef(NamedTuple):
    """Reference to a sample, without its content. doc_id: position in the dataset, from 0. cluster: its unit of
    statistics."""

    doc_id: int
    sample_id: str
    cluster: str
    kind: str | None  # pages: the question's task (lookup, walk3, ...); None for other datasets


@dataclass(frozen=True)
class DocumentQuestions:
    """All questions about a sample's document. A question is the text that follows the document in the prompt.

    name         of the document, unique in its dataset
    number       number of the sample's own question, from 0
    position     the document's index in the dataset, from 0
    texts        the questions; sample_ids: their samples
    paraphrases  each question in other words; empty if the dataset has none
    generic      a fixed instruction in place of a question; "" for none
    """

    name: str
    number: int
    position: int
    texts: tuple[str, ...]
    sample_ids: tuple[str, ...]
    paraphrases: tuple[str, ...]
    generic: str

    def asking(self, number: int) -> DocumentQuestions:
        """Return a copy in which question `number` is the sample's own."""
        return replace(self, number=number)

    @property
    def first(self) -> int:
        """Number of the question for which `query_first` compresses the document. It rotates with the document's position."""
        return self.position % len(self.texts)


@dataclass
class Request:
    """One question as lmms-eval asks it.

    messages     Hugging Face chat format: a list of {"role", "content": [{"type": "text", "text"} | {"type": "image"} |
                 {"type": "video"}]}; each placeholder stands for the next entry of `images` or `videos`
    images       RGB images in the order of their placeholders
    videos       in the order of their placeholders: a path, {"video": path, "start_time", "end_time"} in seconds with either
                 or both times, or frames; sampled when the prompt is encoded (generation/video_inputs.py)
    generation   max_new_tokens (int), until (list of stop strings), do_sample (False), and further keys of the task
    prompt_hash  sha256 over the messages' text, the pixels of the images and the content of video files; "" if they cannot be
                 read
    error        why the sample's images or videos cannot be read (messages and media are then empty), otherwise None
    reference    the dataset's reference answer, on which `ppl` is measured; None if there is none
    target       the reference answer for readers, even if nothing is measured on it; None if there is none
    context      the text behind which a protocol cuts the prompt if the prompt has no visual tokens; "" for none
    document     all questions about the sample's document if its dataset names them, otherwise None
    waiting      numbers of the document's questions that this loop will ask after this one
    files        the files of the images and videos if each has its own file, otherwise empty
    instruction  the beginning of the prompt that `cut_prompt: left` keeps; "" for none, or if the prompt is not cut so
    """

    dataset: str
    sample_id: str
    doc_id: int
    cluster: str
    kind: str | None
    messages: list[dict[str, Any]]
    images: list[Image.Image]
    videos: list[Any]
    generation: dict[str, Any]
    prompt_hash: str
    error: str | None = None
    reference: str | None = None
    instruction: str = ""
    target: str | None = None
    context: str = ""
    document: DocumentQuestions | None = None
    waiting: tuple[int, ...] = ()
    files: list[str] = field(default_factory=list)


class Answer(NamedTuple):
    """A stored answer: its text (None if there is none), the sample's status, and the answered prompt."""

    text: str | None
    status: str
    doc_id: int
    prompt_hash: str


class SampleScore(NamedTuple):
    """One metric of one sample. value is None if the sample's status is not `ok`.

    parts: the numbers from which a metric that is not a mean over samples is aggregated (see statistics/metric_kinds.py);
    those of an empty answer if the status is not `ok`; None for means.
    """

    sample_id: str
    cluster: str
    metric: str
    value: float | None
    status: str
    parts: tuple[float, ...] | None = None


class JudgedBy(NamedTuple):
    """The judge of a metric: the model's id, the hash of the prompts (None: unknown) and the temperature (None: several)."""

    model: str
    prompts: str | None
    temperature: float | None


@dataclass
class CellScores:
    """Scores of one cell on one dataset.

    samples    one entry per answered sample and metric, in the order of the dataset
    aggregate  metric -> lmms-eval's own aggregate, on its scale and with its guesses for unreadable answers; None unless every
               sample is ok
    reason     why `aggregate` is None; None if it is not
    unaggregated  metric that `aggregate` lacks -> the reason, such as a failed aggregation
    judged     metric -> its judge, for metrics with an answer of a judge
    not_judged metric -> the reason why some or all samples are not judged: their values and the aggregate are None
    """

    samples: list[SampleScore]
    aggregate: dict[str, float] | None
    reason: str | None
    unaggregated: dict[str, str] = field(default_factory=dict)
    judged: dict[str, JudgedBy] = field(default_factory=dict)
    not_judged: dict[str, str] = field(default_factory=dict)

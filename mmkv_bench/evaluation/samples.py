"""Samples as evaluation asks and scores them: reference, request, answer, score. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL import Image


class SampleRef(NamedTuple):
    """A sample, named without loading its images. doc_id is its position in the dataset, from 0."""

    doc_id: int
    sample_id: str
    cluster: str
    kind: str | None  # pages: the question's task (lookup, walk3, ...); None for other datasets


@dataclass(frozen=True)
class DocumentQuestions:
    """All questions about a sample's document, each as the text that follows the document in the prompt.

    name         of the document, one in its dataset
    number       the sample's own question, from 0
    position     the document's place in the dataset, from 0
    texts        one per question; sample_ids: of their samples
    paraphrases  each question in other words; empty where the dataset has none
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
        """Return the same for another question of the document."""
        return replace(self, number=number)

    @property
    def first(self) -> int:
        """Number of the question that `query_first` compresses for; documents take turns."""
        return self.position % len(self.texts)


@dataclass
class Request:
    """One question as lmms-eval asks it.

    messages     Hugging Face chat format: a list of {"role", "content": [{"type": "text", "text"} | {"type": "image"} |
                 {"type": "video"}]}; each placeholder stands for the next entry of `images` or `videos`
    images       RGB images in the order of their placeholders
    videos       in the order of their placeholders: a path, {"video": path, "start_time", "end_time"} in seconds with
                 either or both times, or frames; sampled where the prompt is encoded (generation/video_inputs.py)
    generation   max_new_tokens (int), until (list of stop strings), do_sample (False), and what the task adds
    prompt_hash  sha256 over the messages' text, the pixels of the images and the content of video files; "" when they
                 cannot be read
    error        why the sample's images or videos cannot be read; messages and media are empty then. None otherwise
    reference    the dataset's reference answer, which `ppl` is measured on; None where there is none
    target       the reference answer for people to read, also where nothing is measured on it; None where there is none
    context      text that a protocol which cuts cuts behind, where the prompt has no visual tokens; "" for none
    document     all questions about the sample's document, where its dataset names them; None otherwise
    files        what the images and videos were read from, where each has a file of its own; empty otherwise
    instruction  what the prompt's text begins with and `cut_prompt: left` keeps; "" for none, or where nothing is cut so
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
    files: list[str] = field(default_factory=list)


class Answer(NamedTuple):
    """A stored answer: its text (None when there is none), the sample's status and the prompt it answers."""

    text: str | None
    status: str
    doc_id: int
    prompt_hash: str


class SampleScore(NamedTuple):
    """One metric of one sample. value is None when the sample's status is not `ok`.

    parts: what a metric that is no mean over samples is aggregated from (see statistics/metric_kinds.py), of an empty answer when
    the status is not `ok`; None for means.
    """

    sample_id: str
    cluster: str
    metric: str
    value: float | None
    status: str
    parts: tuple[float, ...] | None = None


class JudgedBy(NamedTuple):
    """Who judged a metric: the model's id, the hash of the prompts (None: unknown) and the temperature (None: several)."""

    model: str
    prompts: str | None
    temperature: float | None


@dataclass
class CellScores:
    """Scores of one cell on one dataset.

    samples    one entry per answered sample and metric, in the order of the dataset
    aggregate  lmms-eval's own aggregates by metric name, on its own scales and with its own guesses for unreadable
               answers; None unless every sample is ok
    reason     why `aggregate` is None; None when it is not
    unaggregated  metric -> why `aggregate` lacks it though it is there
    unscored   metrics that exist only as an aggregate (corpus metrics), so that `samples` has none of them
    judged     metric -> its judge, for metrics with an answer of one
    not_judged metric -> why it is not judged, in all samples or in some: their values and its aggregate are None
    """

    samples: list[SampleScore]
    aggregate: dict[str, float] | None
    reason: str | None
    unscored: tuple[str, ...] = ()
    unaggregated: dict[str, str] = field(default_factory=dict)
    judged: dict[str, JudgedBy] = field(default_factory=dict)
    not_judged: dict[str, str] = field(default_factory=dict)

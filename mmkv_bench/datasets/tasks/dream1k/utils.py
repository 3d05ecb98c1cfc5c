"""What the YAML file of this folder calls."""

from __future__ import annotations

from mmkv_bench.datasets.tasks.dream1k import autodq
from mmkv_bench.datasets.tasks.dream1k.reading import read_videos
from mmkv_bench.datasets.tasks.files import media_file, video_then
from mmkv_bench.judging.client import JudgeError, ask


def read(folder, config):
    """One document a video; see `reading`."""
    return read_videos(folder)


def doc_to_messages(doc, lmms_eval_specific_kwargs=None):
    """The video, then the request to describe it."""
    return video_then(doc, doc_to_text(doc, lmms_eval_specific_kwargs))


def doc_to_visual(doc):
    """The video's file."""
    return [media_file(doc["video"])]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    """The request of the YAML, the same for all videos."""
    return (lmms_eval_specific_kwargs or {}).get("prompt", "Describe the video in detail.")


def process_results(doc, results):
    """AutoDQ of an answer, over all and under its category. Raises JudgeError: the sample is then not judged."""
    answer = results[0]
    events, reference = _each(lambda: _events(answer), lambda: doc["events"] or _events(doc["description"]))
    precision, recall = _each(lambda: _entailed(doc["description"], events), lambda: _entailed(answer, reference))
    scores = {
        "autodq_precision": precision,
        "autodq_recall": recall,
        "autodq_f1": {"score": autodq.f1(precision, recall), "parts": (precision, recall, 1.0)},
        "autodq_no_events": float(not events),
    }
    named = ("autodq_precision", "autodq_recall", "autodq_f1")
    return scores | {f"{name}_{doc['category']}": scores[name] for name in named}


def f1_of_means(items):
    """F1 of mean precision and mean recall, which the paper prints; not the mean of the samples' own F1."""
    return autodq.f1_of_means([item["parts"][:2] for item in items])


def _events(text):
    """The events of a text; of an empty one there are none to ask for."""
    if not text.strip():
        return []
    question = autodq.extract_question(text)
    reply = ask(question, readable=lambda reply: autodq.read_events(reply) is not None, example=autodq.EVENTS_EXAMPLE)
    return autodq.read_events(reply)


def _entailed(text, events):
    """The fraction of the events that the text entails; none of an empty one's."""
    if not text.strip() or not events:
        return 0.0
    reply = ask(
        autodq.relate_question(text, events),
        readable=lambda reply: autodq.read_relations(reply, len(events)) is not None,
    )
    return autodq.entailed(autodq.read_relations(reply, len(events)))


def _each(*questions):
    """All of them, before the first error: questions that do not depend on each other are asked in one round."""
    found, errors = [], []
    for question in questions:
        try:
            found.append(question())
        except JudgeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found

"""AutoDQ scores a video description by the events that it shares with the reference.

Source: Wang et al. 2024, arXiv 2407.00634, section 4.

A judge lists the events of a text, and decides whether another text entails an event, contradicts it or does neither.
Recall is the fraction of the reference's events that the description entails. Precision is the fraction of the
description's events that the reference entails. Both are averaged over videos; F1 is their harmonic mean.

The wording of the questions is this project's and judges differ, so absolute numbers compare with the paper's only roughly
(its judge is gpt-35-turbo-0125). Methods are compared with each other under the same judge and wording.

Differences from the released code (evaluate_dream_gpt.py of the authors' repository):
- The release lowers the case of both texts before asking. Here they are not changed.
- In the release a description without an event has precision 1, which would favour a model whose answers are ruined. Here
  the precision is 0, and `autodq_no_events` counts such answers; precision plus the mean of `autodq_no_events` is the
  release's precision.
- The release's overall precision and recall are means of the five categories' means. Here they are means over all videos,
  which is the same with 200 videos per category.
- The release drops a sample if no judge's reply can be read in ten attempts. Here the sample is not judged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

RELATIONS = ("entailed", "contradicted", "neither")
EVENTS_EXAMPLE = '["A man opens the door.", "The dog runs out."]'

EXTRACT = """\
Here is what somebody wrote about a short video:

<description>
{description}
</description>

List what happens in it as separate events, ten at most.
An event is one action, movement or change, told in one short sentence (up to ten words) with its subject. Name the subject \
instead of writing he, she, it or they. Split what can be told as two events. Leave out how things look, what does not \
move, what the camera does and cuts between shots. List nothing twice.
Reply with a JSON array of strings and nothing else, for example {example}. Reply with [] when nothing happens."""

RELATE = """\
Here is what somebody wrote about a short video:

<description>
{description}
</description>

And here are {count} events, numbered:

{events}

Decide for each event what follows from the description alone:
"entailed" - whoever believes the description knows that the event happens;
"contradicted" - the event disagrees with something in the description;
"neither" - the description leaves it open.
Reply with a JSON array of {count} strings, one of these three words for each event in their order, and nothing else."""


def extract_question(description: str) -> str:
    """Return the question that asks for the events of a text."""
    return EXTRACT.format(description=description.strip(), example=EVENTS_EXAMPLE)


def relate_question(description: str, events: Sequence[str]) -> str:
    """Return the question that asks how each event relates to a text."""
    numbered = "\n".join(f"{number}. {event}" for number, event in enumerate(events, start=1))
    return RELATE.format(description=description.strip(), count=len(events), events=numbered)


def read_events(reply: str) -> list[str] | None:
    """Return the events in a judge's reply; None if the reply has no list of sentences."""
    values = _json_array(reply)
    if values is None or not all(isinstance(value, str) and value.strip() for value in values):
        return None
    return list(dict.fromkeys(value.strip() for value in values))


def read_relations(reply: str, count: int) -> list[str] | None:
    """Return the relations in a judge's reply; None unless it has one of the three words for each of `count` events."""
    values = _json_array(reply)
    if values is None or len(values) != count:
        return None
    words = [value.strip().lower() if isinstance(value, str) else "" for value in values]
    return words if all(word in RELATIONS for word in words) else None


def entailed(relations: Sequence[str]) -> float:
    """Return the fraction of entailed events; 0 for no events."""
    return sum(relation == "entailed" for relation in relations) / len(relations) if relations else 0.0


def f1(precision: float, recall: float) -> float:
    """Return the harmonic mean of precision and recall; 0 if both are 0."""
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def f1_of_means(items: Sequence[tuple[float, float]]) -> float:
    """Return the dataset's F1, from the mean precision and mean recall of the samples' (precision, recall)."""
    count = max(len(items), 1)
    return f1(sum(precision for precision, _ in items) / count, sum(recall for _, recall in items) / count)


def _json_array(reply: str) -> list[Any] | None:
    """Return the JSON array in a reply, which may be in a code block or between sentences; None if there is none."""
    match = re.search(r"\[.*\]", reply, re.DOTALL)
    try:
        value = json.loads(match[0]) if match else None
    except ValueError:
        return None
    return value if isinstance(value, list) else None

"""AutoDQ: quality of a video description by the events that it shares with the reference (Wang et al. 2024, arXiv
2407.00634, section 4).

A judge takes the events out of a text, and says of each event whether another text entails it, contradicts it or does
neither. Recall is the fraction of the reference's events that the description entails; precision the fraction of the
description's events that the reference entails. Both are averaged over videos; F1 is their harmonic mean.

The questions are worded by us and judges differ, so absolute numbers compare with the paper's only roughly (its judge is
gpt-35-turbo-0125); methods are compared with each other under one judge and one wording.

Where the released code (evaluate_dream_gpt.py of the authors' repository) does otherwise:
- It lowers the case of both texts before asking. Here they stay as they are.
- A description without an event has precision 1 there, which would lift a model whose answers are ruined. Here it is 0, and
  `autodq_no_events` counts such answers; precision plus its mean is the released convention's precision.
- Its overall precision and recall are means over the five categories' means; with 200 videos each they are the means over
  all videos, which is what is given here.
- A sample whose judge cannot be read after ten attempts is left out there; here it is not judged.
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
    """Asks for the events of a text."""
    return EXTRACT.format(description=description.strip(), example=EVENTS_EXAMPLE)


def relate_question(description: str, events: Sequence[str]) -> str:
    """Asks how each event stands to a text."""
    numbered = "\n".join(f"{number}. {event}" for number, event in enumerate(events, start=1))
    return RELATE.format(description=description.strip(), count=len(events), events=numbered)


def read_events(reply: str) -> list[str] | None:
    """The events of a judge's reply; None when it has no list of sentences."""
    values = _json_array(reply)
    if values is None or not all(isinstance(value, str) and value.strip() for value in values):
        return None
    return list(dict.fromkeys(value.strip() for value in values))


def read_relations(reply: str, count: int) -> list[str] | None:
    """The relations of a judge's reply; None unless there is one of the three words for each of `count` events."""
    values = _json_array(reply)
    if values is None or len(values) != count:
        return None
    words = [value.strip().lower() if isinstance(value, str) else "" for value in values]
    return words if all(word in RELATIONS for word in words) else None


def entailed(relations: Sequence[str]) -> float:
    """The fraction of events that are entailed; 0 for none."""
    return sum(relation == "entailed" for relation in relations) / len(relations) if relations else 0.0


def f1(precision: float, recall: float) -> float:
    """Their harmonic mean; 0 when both are 0."""
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def f1_of_means(items: Sequence[tuple[float, float]]) -> float:
    """F1 of mean precision and mean recall over (precision, recall) of samples: the dataset's number."""
    count = max(len(items), 1)
    return f1(sum(precision for precision, _ in items) / count, sum(recall for _, recall in items) / count)


def _json_array(reply: str) -> list[Any] | None:
    """The one JSON array of a reply, which may stand in a code block or between sentences."""
    match = re.search(r"\[.*\]", reply, re.DOTALL)
    try:
        value = json.loads(match[0]) if match else None
    except ValueError:
        return None
    return value if isinstance(value, list) else None

"""The videos of DREAM-1K, out of the released annotations.

The hub dataset omni-research/DREAM-1K has json/metadata.json, a list of {"idx", "video_file", "description", "source",
"events"?, ...}; the repository of its authors has data/annotations/DREAM-1k.jsonl with {"idx", "dataset", "vid",
"text": {"prompt", "response"}, "extra_info": {"events", ...}}. Both can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.datasets.tasks.files import as_split, find, load_records, media_name
from mmkv_bench.errors import DataError

if TYPE_CHECKING:
    import datasets

COLUMNS = {
    "sample_id": "string",
    "video": "string",
    "description": "string",
    "events": "string[]",  # of the description, as the dataset has them; none: the judge extracts them
    "category": "string",
}
# what the source's name holds -> the category as the paper calls it
CATEGORIES = {
    "animation": "animation",
    "live": "live_action",
    "stock": "stock",
    "youtube": "youtube",
    "short": "tiktok",
    "tiktok": "tiktok",
}


def read_videos(folder: Path) -> dict[str, datasets.Dataset]:
    """One document a video: all of them as the split `test`, and each category's as a split of its name.

    Raises DataError for files that are missing or not in the released schema.
    """
    names = ("json/metadata.json", "metadata.json", "DREAM-1k.jsonl")
    file = find(folder, names, "the annotations of DREAM-1K")
    of_hub = file.suffix == ".json"
    fields = ("idx", "video_file", "description", "source") if of_hub else ("idx", "dataset", "text", "vid")
    rows = []
    for position, record in enumerate(load_records(file, fields)):
        try:
            rows.append((_of_hub if of_hub else _of_repository)(record))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"sample {position} of {file} is not in the schema of DREAM-1K: {error}; give the released file"
            ) from error
        media_name(rows[-1]["video"], file, position)
    categories = dict.fromkeys(row["category"] for row in rows)
    own = {name: [row for row in rows if row["category"] == name] for name in categories}
    return {name: as_split(part, COLUMNS, name)[name] for name, part in {"test": rows, **own}.items()}


def _of_hub(record: Mapping[str, Any]) -> dict[str, Any]:
    name = Path(str(record["video_file"])).name  # upstream: a folder of its own machines before it
    return _row(record["idx"], name, record["description"], record.get("events"), record["source"])


def _of_repository(record: Mapping[str, Any]) -> dict[str, Any]:
    events = (record.get("extra_info") or {}).get("events")
    return _row(record["idx"], f"{record['vid']}.mp4", record["text"]["response"], events, record["dataset"])


def _row(number: Any, video: str, description: str, events: Any, source: str) -> dict[str, Any]:
    events = [] if events is None else events
    if not isinstance(events, list) or not all(isinstance(event, str) for event in events):
        raise ValueError("events is no list of texts")
    if not str(description).strip():
        raise ValueError("the description is empty")
    return {
        "sample_id": str(number),
        "video": f"DREAM-1K_videos/{video}",
        "description": str(description),
        "events": events,
        "category": _category(source),
    }


def _category(source: str) -> str:
    found = {name for part, name in CATEGORIES.items() if part in str(source).lower().replace("-", "_")}
    if len(found) != 1:
        raise ValueError(f"{source!r} is none of its five sources")
    return found.pop()

"""Files that our own tasks read: annotations in JSON, text, and the media beside them.

A task's `metadata.read` gets the dataset's folder and makes its documents of the files that are released. Media are named in
the documents and not held in them: they lie below `media/` of the folder, which stands for $HF_HOME while a task runs, so
that documents and their fingerprint say nothing about where a machine keeps them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import DataError

if TYPE_CHECKING:
    import datasets
    from PIL import Image


def find(folder: Path, names: Sequence[str], what: str) -> Path:
    """The first of the files that is there; names are relative to the folder. Raises DataError when none is."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder} has no {' nor '.join(names)}, {what}; put it there")


def load_json(file: Path) -> Any:
    """What a JSON file holds, or the list of a JSON Lines file's values. Raises DataError naming file and line."""
    line = 0
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix != ".jsonl":
            return json.loads(text)
        values = []
        for line, row in enumerate(text.splitlines(), start=1):  # noqa: B007 - the message below names it
            if row.strip():
                values.append(json.loads(row))
        return values
    except (OSError, ValueError) as error:
        where = f"line {line} of {file}" if line else str(file)
        raise DataError(f"{where} is no JSON ({error}); copy or download the file again") from error


def load_records(file: Path, fields: Sequence[str]) -> list[Mapping[str, Any]]:
    """A JSON file's list of objects, each with the fields. Raises DataError that names the first without one."""
    records = load_json(file)
    if not isinstance(records, list) or not records:
        raise DataError(f"{file} is no list of samples; give the released file")
    for position, record in enumerate(records):
        missing = [name for name in fields if not isinstance(record, Mapping) or name not in record]
        if missing:
            raise DataError(f"sample {position} of {file} lacks {', '.join(missing)}; give the released file")
    return records


def as_split(rows: Sequence[Mapping[str, Any]], features: Mapping[str, str], split: str) -> dict[str, datasets.Dataset]:
    """Rows as the one split of a dataset.

    features: column -> `string`, `int32`, `float64`, or one of them with `[]` behind it for a list.
    """
    import datasets

    def kind(name: str) -> Any:
        value = datasets.Value(name.removesuffix("[]"))
        return datasets.List(value) if name.endswith("[]") else value

    schema = datasets.Features({name: kind(text) for name, text in features.items()})
    columns = {name: [row[name] for row in rows] for name in features}
    return {split: datasets.Dataset.from_dict(columns, features=schema)}


def media_name(name: Any, file: Path, position: int) -> str:
    """A medium's name as the annotations have it. Raises DataError for one that leaves the folder of the media."""
    text = str(name)
    if not text or Path(text).is_absolute() or ".." in Path(text).parts:
        raise DataError(f"sample {position} of {file} names {text!r}, which is no file below {file.parent / 'media'}")
    return text


def media_file(name: str) -> str:
    """Where a medium lies now."""
    return os.path.join(os.environ["HF_HOME"], name)


def video_then(doc: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """The chat message of a document with one video: the video, then the text."""
    content = [{"type": "video", "url": media_file(doc["video"])}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


def picture(name: str) -> Image.Image:
    """A medium that is an image, decoded. Raises DataError for one that is missing or damaged."""
    from PIL import Image

    try:
        with Image.open(media_file(name)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"image {media_file(name)} cannot be read ({error}); restore the file") from error

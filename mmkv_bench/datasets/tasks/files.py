"""Read the files of this project's tasks: annotations in JSON, texts, and media.

A task's `metadata.read` gets the dataset's folder and makes documents from the released files. A document names its media and
does not contain them. Media are in the folder's `media/`, which replaces $HF_HOME while a task runs. So documents and their
fingerprint do not depend on a machine's paths.
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
    """Return the first of the files `names` that exists; names are relative to the folder. Raises DataError if none exists."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder} has no {' nor '.join(names)}, {what}; put it there")


def load_json(file: Path) -> Any:
    """Return the content of a JSON file, or the list of values of a JSON Lines file. Raises DataError with file and line."""
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
        raise DataError(f"{where} is not JSON ({error}); copy or download the file again") from error


def load_records(file: Path, fields: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return a JSON file's list of objects. Raises DataError that names the first object without one of the fields."""
    records = load_json(file)
    if not isinstance(records, list) or not records:
        raise DataError(f"{file} is not a list of samples; give the released file")
    for position, record in enumerate(records):
        missing = [name for name in fields if not isinstance(record, Mapping) or name not in record]
        if missing:
            raise DataError(f"sample {position} of {file} lacks {', '.join(missing)}; give the released file")
    return records


def as_split(rows: Sequence[Mapping[str, Any]], features: Mapping[str, str], split: str) -> dict[str, datasets.Dataset]:
    """Return a dataset of one split with these rows.

    features: column -> `string`, `int32`, `float64`, or one of these with `[]` appended for a list.
    """
    import datasets

    def kind(name: str) -> Any:
        value = datasets.Value(name.removesuffix("[]"))
        return datasets.List(value) if name.endswith("[]") else value

    schema = datasets.Features({name: kind(text) for name, text in features.items()})
    columns = {name: [row[name] for row in rows] for name in features}
    return {split: datasets.Dataset.from_dict(columns, features=schema)}


def media_name(name: Any, file: Path, position: int) -> str:
    """Return a medium's name from the annotations. Raises DataError if the name points outside the media folder."""
    text = str(name)
    if not text or Path(text).is_absolute() or ".." in Path(text).parts:
        raise DataError(
            f"sample {position} of {file} names {text!r}, not a file below {file.parent / 'media'}; give the released file"
        )
    return text


def media_file(name: str) -> str:
    """Return a medium's path on this machine."""
    return os.path.join(os.environ["HF_HOME"], name)


def video_then(doc: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """Return the chat message of a document with one video: the video, then the text."""
    content = [{"type": "video", "url": media_file(doc["video"])}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


def picture(name: str) -> Image.Image:
    """Decode an image. Raises DataError for a missing or damaged file."""
    from PIL import Image

    try:
        with Image.open(media_file(name)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"image {media_file(name)} cannot be read ({error}); restore the file") from error

"""The released files of a MileBench sub-task as a dataset.

The release (hub dataset FreedomIntelligence/MileBench, six archives) has a folder for each sub-task:

    <Task>/<Task>.json   {"meta_data": {"task_instruction": [str, ...], "question_type": str, ...},
                          "data": [{"sample_id", "task_instruction_id", "response", "image_quantity_level",
                                    "task_instance": {"context", "images_path": [str, ...], "choice_list"?: [str, ...],
                                                      "combined_1_images"?: [str]}}, ...]}
    <Task>/images/       the pictures that `images_path` names

Pictures are copied, as the bytes they are, into an Arrow file in the cache of `datasets`, once for each state of the
files: memory stays small, and fingerprint and clusters follow what the pictures show and not where they lie. A picture
that is not there leaves a sample whose images cannot be read; the others are not affected.

Not read: the `-adv` files, and the pictures that join all images of a sample (combined_1_images).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.datasets.tasks.milebench.metrics import normalised
from mmkv_bench.datasets.tasks.milebench.subtasks import subtask
from mmkv_bench.errors import DataError
from mmkv_bench.file_state import state_of

if TYPE_CHECKING:
    import datasets

VERSION = 1  # of the rows; another one makes the cached files anew


def read(folder: Path, task: str) -> dict[str, datasets.Dataset]:
    """The sub-task's samples, in the order of the file, as the split `test`.

    Args:
        folder: the sub-task's folder, or the one of the release that has it.
        task: lmms-eval's name, `milebench_docvqa`.

    Returns:
        Rows with sample_id, task, instruction, context, choices (empty for open questions), response, image_count,
        image_quantity_level and images.

    Raises:
        DataError: files that are missing or not in the release's schema; it names the sample and the key.
    """
    import datasets

    file, images = _files(Path(folder), task)
    content = file.read_bytes()
    rows = _rows(content, file, task)
    text = datasets.Value("string")
    features = datasets.Features(
        dict.fromkeys(("sample_id", "task", "instruction", "context", "response", "image_quantity_level"), text)
        | {"choices": datasets.List(text), "image_count": datasets.Value("int32")}
        | {"images": datasets.List(datasets.Image())}
    )
    split = datasets.Dataset.from_generator(
        _with_images,
        features=features,
        gen_kwargs={"rows": tuple(rows), "folder": images},
        split=datasets.Split.TEST,
        fingerprint=_state(content, rows, images),
    )
    return {"test": split}


def _files(folder: Path, task: str) -> tuple[Path, Path]:
    """The annotation file and the folder of the pictures."""
    name = subtask(task).folder
    for place in (folder, folder / name):
        if (place / f"{name}.json").is_file():
            return place / f"{name}.json", place / "images"
    raise DataError(
        f"{folder} has neither {name}.json nor {name}/{name}.json, the file of {task}; unpack "
        f"MileBench_part{subtask(task).part}.tar.gz of the hub dataset FreedomIntelligence/MileBench and give the folder "
        f"{name}, or the one that has it"
    )


def _rows(content: bytes, file: Path, task: str) -> list[dict[str, Any]]:
    """The samples, with the names of their pictures as `images`."""
    try:
        found = json.loads(content)
        instructions, samples = found["meta_data"]["task_instruction"], found["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} is not a file of MileBench ({error!r}); it has to be JSON with meta_data.task_instruction and data"
        ) from error
    if not isinstance(samples, list) or not samples:
        raise DataError(f"{file} has no samples; data has to be a list of them")
    rows = []
    for position, sample in enumerate(samples):
        try:
            rows.append(_row(sample, instructions, task))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"sample {position} of {file} is not in the schema of MileBench: {type(error).__name__} {error}; give "
                "the released file"
            ) from error
    return rows


def _row(sample: Mapping[str, Any], instructions: Any, task: str) -> dict[str, Any]:
    key, instance = sample["task_instruction_id"], sample["task_instance"]
    names = [str(name) for name in instance["images_path"]]
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
        raise ValueError("images_path leaves the folder of the pictures")
    choices = [str(choice) for choice in instance.get("choice_list") or ()]
    response = str(sample["response"])
    if not normalised(response):
        raise ValueError("response has no word")
    if bool(choices) != (subtask(task).scorer == "choice"):
        raise ValueError(f"choice_list has {len(choices)} choices, and {task} is scored by {subtask(task).scorer}")
    if choices and normalised(response) not in map(normalised, choices):
        raise ValueError(f"response {response!r} is none of choice_list")
    return {
        "sample_id": str(sample["sample_id"]),
        "task": task,
        "instruction": str(instructions[str(key)] if isinstance(instructions, Mapping) else instructions[int(key)]),
        "context": str(instance["context"]),
        "choices": choices,
        "response": response,
        "image_count": len(names),
        "image_quantity_level": str(sample.get("image_quantity_level", "")),
        "images": names,
    }


def _with_images(rows: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {**row, "images": [_picture(folder / name) for name in row["images"]]}


def _picture(file: Path) -> dict[str, Any]:
    """Bytes of a picture; of one that is not there the place where it should be, so that decoding it fails."""
    return {"bytes": file.read_bytes(), "path": None} if file.is_file() else {"bytes": None, "path": str(file)}


def _state(content: bytes, rows: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Digest of what the files are now: the annotations' text, and the states of the pictures."""
    digest = hashlib.sha256(f"{VERSION} {folder}".encode() + content)
    for name in dict.fromkeys(name for row in rows for name in row["images"]):
        file = folder / name
        state = tuple(state_of(file)) if file.is_file() else None
        digest.update(f"{name} {state}".encode())
    return digest.hexdigest()[:32]

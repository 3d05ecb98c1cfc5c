"""Questions, references and images of samples, from the store's table `prompts`. Pages made by this package are drawn again.

Nothing is downloaded, and lmms-eval is not asked: missing parts are listed with the reason.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.datasets.drawn_pages import drawn
from mmkv_bench.errors import DataError
from mmkv_bench.report.folder import Folder

if TYPE_CHECKING:
    from PIL import Image

FRAMES = 4  # frames shown of a video
LONGEST = 672  # pixels of an image's longer side in the report
NO_TABLE = (
    "The rows have no question for this sample: they are older than the table `prompts`. Only embedded pages can be drawn "
    "again."
)
OTHER_PAGE = (
    "The page drawn now differs from the page that was answered: other versions of the drawing libraries are installed."
)


@dataclass
class Prompt:
    """Prompt of a sample. images: files below the report's folder. ratios: their width over height. missing: reason why something
    is not shown, or ""."""

    question: str | None = None
    reference: str | None = None
    images: list[str] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    missing: str = ""


def pictures_of(path: str) -> list[Image.Image]:
    """Return the image of a file, or evenly spaced frames of a video.

    Raises:
        OSError, ValueError, DataError: the file is missing, or is neither an image nor a video.
    """
    from PIL import Image, UnidentifiedImageError

    from mmkv_bench.models.video import sample_frames

    try:
        with Image.open(path) as image:
            return [image.convert("RGB")]
    except UnidentifiedImageError:
        return [Image.fromarray(frame) for frame in sample_frames(path, FRAMES).frames]


class Prompts:
    """The prompts of samples. Each is read once, and its images are written then.

    folder: folder of the images; None: write none. stored: prompt hash -> row of the table `prompts`.
    """

    def __init__(self, folder: Folder | None, stored: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder, self._stored, self._prompts = folder, stored, dict[tuple[str, str], Prompt]()

    def of(self, sample_id: str, prompt_hash: str | None) -> Prompt:
        """Return a sample's prompt. Images of datasets that this package draws are drawn again, and shown only if they equal the
        images that the model was asked about (by `prompt_hash`)."""
        key = sample_id, prompt_hash or ""
        if key not in self._prompts:
            self._prompts[key] = self._prompt(*key)
        return self._prompts[key]

    def _prompt(self, sample_id: str, prompt_hash: str) -> Prompt:
        row: Mapping[str, Any] = self._stored.get(prompt_hash, {})
        question, reference = row.get("question"), row.get("reference")
        page = drawn(sample_id, prompt_hash, question or "", reference or "")
        if page is not None and page.images:
            images = self._images(prompt_hash or sample_id, page.images)
            return Prompt(page.question or question, page.answer or reference, *images)
        return self._of_row(row) if row else Prompt(missing=NO_TABLE if page is None else OTHER_PAGE)

    def visual(self, prompt_hash: str | None) -> list[float] | None:
        """Return the positions of a prompt's visual tokens from the table `prompts`; None without any."""
        return self._stored.get(prompt_hash or "", {}).get("visual")

    def _of_row(self, row: Mapping[str, Any]) -> Prompt:
        images: list[Image.Image] = []
        unreadable, paths = [], row["images"] or ()
        for path in paths:
            try:
                images += pictures_of(path)
            except (OSError, ValueError, DataError):
                unreadable.append(Path(path).name)
        missing = [f"Images or videos that cannot be read now: {', '.join(unreadable)}."] if unreadable else []
        lacking = row["media"] - len(paths)
        if lacking > 0:
            missing.append(
                f"{lacking} of the sample's {row['media']} images or videos are in the dataset itself, not in files."
            )
        return Prompt(row["question"], row["reference"], *self._images(row["prompt_hash"], images), " ".join(missing))

    def _images(self, name: str, images: Sequence[Image.Image]) -> tuple[list[str], list[float]]:
        """Write images in the report's size. Return their paths relative to the report, and width / height of each."""
        paths: list[str] = []
        if self._folder is None:
            return paths, []
        for number, image in enumerate(images):
            small = image.copy()
            small.thumbnail((LONGEST, LONGEST))
            file = io.BytesIO()
            small.save(file, "WEBP", quality=60, method=2)
            path = f"{re.sub('[^A-Za-z0-9]', '_', name)[:40]}-{number}.webp"
            self._folder.write(f"images/{path}", file.getvalue())
            paths.append(f"images/{path}")
        return paths, [round(image.width / image.height, 4) for image in images]

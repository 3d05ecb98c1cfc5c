"""Clips for tests, made with PyAV: frame i is grey of one level, so that a frame tells which one it is."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

STEP = 6  # grey levels between two frames; lossy codecs move a level by a few
CODECS = {".mp4": "libx264", ".mkv": "libx264", ".webm": "libvpx-vp9", ".avi": "mpeg4", ".gif": "gif", ".ts": "libx264"}


def write_clip(
    path: Path,
    frames: int = 40,
    size: tuple[int, int] = (64, 48),
    fps: int = 10,
    codec: str | None = None,
    times: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
) -> Path:
    """A clip of `frames` frames of `size` (width, height); `times` are those of the frames in ms, for a variable rate."""
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec or CODECS[path.suffix], rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "rgb8" if path.suffix == ".gif" else "yuv420p"
        stream.bit_rate = 4_000_000  # plenty, so that grey levels stay apart
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), STEP * i % 256, np.uint8), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_sound(path: Path) -> Path:
    """A file with sound and no picture."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        samples.sample_rate = 16000
        container.mux(stream.encode(samples))
        container.mux(stream.encode())
    return path


def cut(path: Path, part: float, name: str | None = None) -> Path:
    """The first `part` of a file's bytes, as another file."""
    short = path.with_name(name or f"cut{path.suffix}")
    short.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    return short

"""Frames of a video, evenly spaced, decoded with PyAV.

The rule is the papers' and lmms-eval's: of the n frames that decode (within the span, where one is given) those at
`linspace(0, n - 1, count)`, rounded down; the first and the last are always among them. A video with fewer frames than
asked gives all of them, once each. Frames are as stored: no scaling, no display rotation.

n is what decodes, not what the header says: many containers say nothing (webm, gif) or something else. A video that ends
before its header says is refused, because its frames would be other ones than those of the whole video.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import DataError

if TYPE_CHECKING:
    import av
    import numpy as np

DEFAULT_FRAMES = 32
"""Frames taken of a video where model.frames does not say: what most of the papers take (some take 64)."""

COMPLETE = 0.9  # of the frames or seconds that the header announces; real files miss a few at their ends
MAX_BYTES = 8 << 30  # of the frames kept


@dataclass(frozen=True)
class Frames:
    """Sampled frames of one video.

    frames      uint8 [T, H, W, 3], RGB
    timestamps  seconds of each frame after the video's first one
    indices     position of each frame among all that decode, from 0
    total       frames that decode, within the span where one was given
    fps         frames per second of the source (of a variable frame rate the mean)
    """

    frames: np.ndarray
    timestamps: tuple[float, ...]
    indices: tuple[int, ...]
    total: int
    fps: float

    def __len__(self) -> int:
        return len(self.frames)


def evenly_spaced(total: int, count: int) -> list[int]:
    """Positions of `count` of `total` frames, both >= 1: all of them when there are not more."""
    import numpy as np

    return list(range(total)) if total <= count else np.linspace(0, total - 1, count, dtype=int).tolist()


def sample_frames(path: str | os.PathLike, count: int, start: float | None = None, end: float | None = None) -> Frames:
    """`count` >= 1 evenly spaced frames of a local file, of its seconds `start` to `end` where given.

    Any container and codec that PyAV reads. The file is decoded once when its header (or its number of packets) tells the
    number of frames that decode, else twice, and twice for a span; only the wanted frames are held.

    Raises:
        DataError: missing, empty, corrupt or truncated file, no video stream, no frame in the span, frames that change
            their size or would take more than 8 GiB. The message names the file without its folder.
    """
    import numpy as np

    name = os.path.basename(os.fspath(path))
    if not os.path.isfile(path):
        raise DataError(f"video {name} is not there; put it where the task expects it")
    if not os.path.getsize(path):
        raise DataError(f"video {name} is an empty file; restore it")
    expected = _announced(path, name) if start is None and end is None else 0
    wanted = evenly_spaced(expected, count) if expected else []
    frames, times, rate = _decode(path, name, wanted, end)
    total = len(times)
    if not expected or len(times) != expected:
        inside = [i for i, time in enumerate(times) if (start or 0) <= time and (end is None or time <= end)]
        if not inside:
            until = "its end" if end is None else f"{end} s"
            raise DataError(
                f"video {name} has no frame from {start or 0} s to {until}; its last one is at {times[-1]:.2f} s"
            )
        total = len(inside)
        wanted = [inside[i] for i in evenly_spaced(total, count)]
        frames, *_ = _decode(path, name, wanted, end)
    sizes = {frame.shape for frame in frames}
    if len(sizes) > 1:
        shown = " and ".join(f"{width}x{height}" for height, width, _ in sorted(sizes))
        raise DataError(f"video {name} changes its frame size ({shown}); make it of one size")
    return Frames(
        frames=np.stack(frames),
        timestamps=tuple(times[i] for i in wanted),
        indices=tuple(wanted),
        total=total,
        fps=(len(times) - 1) / times[-1] if times[-1] > 0 else rate or 1.0,  # of one frame no time passes
    )


@contextmanager
def _opened(path: str | os.PathLike, name: str) -> Iterator[tuple[Any, av.VideoStream]]:
    """The container and its first stream of moving pictures; what PyAV raises inside becomes a DataError."""
    import av
    from av.stream import Disposition

    try:
        # A playlist may name other files: only local ones are read. (`options=` would crash on streams found late.)
        safe = {"container_options": {"protocol_whitelist": "file"}, "metadata_errors": "replace"}
        with av.open(os.fspath(path), **safe) as container:
            streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
            if not streams:
                raise DataError(f"video {name} has no video stream; restore the file")
            if streams[0].codec_context is None:  # decoding would crash the process
                raise DataError(f"video {name} has a codec that PyAV does not know; restore the file or convert it")
            streams[0].thread_type = "AUTO"
            yield container, streams[0]
    except (av.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"video {name} cannot be decoded ({_reason(error)}); restore the file") from error


def _announced(path: str | os.PathLike, name: str) -> int:
    """Number of frames that the header tells, or else the number of packets, which is read without decoding: a guess."""
    with _opened(path, name) as (container, stream):
        return int(stream.frames or sum(packet.size > 0 for packet in container.demux(stream)))


def _decode(
    path: str | os.PathLike, name: str, wanted: Collection[int], end: float | None
) -> tuple[list[np.ndarray], list[float], float | None]:
    """Decode up to second `end`: the wanted frames, the time of every frame, and the rate that the stream tells."""
    frames, times, wanted = [], [], set(wanted)
    with _opened(path, name) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate
        first, last = None, None
        for index, frame in enumerate(container.decode(stream)):
            time = frame.time if frame.time is not None else index / float(rate or 1)
            first = time if first is None else first
            if end is not None and time - first > end:
                break
            times.append(time - first)
            last = frame
            if index in wanted:
                if len(wanted) * frame.width * frame.height * 3 > MAX_BYTES:
                    raise DataError(
                        f"video {name} has frames of {frame.width}x{frame.height}: {len(wanted)} of them need more than "
                        f"{MAX_BYTES >> 30} GiB; lower model.frames or scale the file down"
                    )
                frames.append(frame.to_ndarray(format="rgb24"))
        else:
            if last is not None:
                shown = float(last.duration * last.time_base) if last.duration else 1 / float(rate or 1)
                _check_complete(container, stream, times, shown, name)
    if not times:
        raise DataError(f"video {name} has no frame that decodes; restore the file")
    return frames, times, float(rate) if rate else None


def _check_complete(container: Any, stream: av.VideoStream, times: list[float], last: float, name: str) -> None:
    """Compare what decoded with what the header announces: frames, or seconds where nothing else could fill them.

    A container that announces neither (gif, transport streams, raw streams) passes whatever there is.
    """
    import av

    announced: float = stream.frames
    decoded: float = len(times)
    unit = "frames"
    if not announced and len(container.streams) == 1 and container.duration:
        announced, decoded, unit = container.duration / av.time_base, times[-1] + last, "seconds"
    if announced and decoded < COMPLETE * announced:
        raise DataError(
            f"video {name} is truncated or corrupt: {decoded:.4g} of {announced:.4g} {unit} decode; restore the file"
        )


def _reason(error: Exception) -> str:
    """The error's reason without the path that PyAV adds."""
    return getattr(error, "strerror", None) or str(error).splitlines()[0]

"""Sample evenly spaced frames of a video, decoded with PyAV.

As in the papers and lmms-eval, frames at `linspace(0, n - 1, count)`, rounded down, are sampled from the n frames that decode.
A video with at most `count` frames gives each frame once. Frames are not scaled or rotated. Headers often state a wrong number
of frames or none, so decoded frames are counted. Truncated videos are refused.
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
"""Default of model.frames, the number of frames sampled from a video; most papers take 32."""

COMPLETE = 0.9
"""Smallest fraction of the frames or seconds stated by the header that must decode."""
MAX_BYTES = 8 << 30  # limit of the sampled frames


@dataclass(frozen=True)
class Frames:
    """Sampled frames of one video.

    frames      uint8 [T, H, W, 3], RGB
    timestamps  seconds of each frame after the video's first one
    indices     position of each frame among all that decode, from 0
    total       number of frames that decode, within the span if one was given
    fps         frames per second of the source (the mean of a variable frame rate)
    """

    frames: np.ndarray
    timestamps: tuple[float, ...]
    indices: tuple[int, ...]
    total: int
    fps: float

    def __len__(self) -> int:
        return len(self.frames)


def evenly_spaced(total: int, count: int) -> list[int]:
    """Return evenly spaced positions of `count` of `total` frames, both >= 1; all positions if `total` <= `count`."""
    import numpy as np

    return list(range(total)) if total <= count else np.linspace(0, total - 1, count, dtype=int).tolist()


def sample_frames(path: str | os.PathLike, count: int, start: float | None = None, end: float | None = None) -> Frames:
    """Sample `count` >= 1 evenly spaced frames of a local video file, between seconds `start` and `end` if given.

    Raises DataError: a missing, empty, corrupt or truncated file, no video stream, no frame in the span, frames of changing
    size, or frames of more than 8 GiB.
    """
    import numpy as np

    name = os.path.basename(os.fspath(path))
    if not os.path.isfile(path):
        raise DataError(f"video {name} is missing; put it into the folder that the task's YAML names")
    if not os.path.getsize(path):
        raise DataError(f"video {name} is an empty file; restore it")
    expected = _announced(path, name) if start is None and end is None else 0
    wanted_frames = evenly_spaced(expected, count) if expected else []
    frames, times, rate = _decode(path, name, wanted_frames, end)
    total = len(times)
    if not expected or len(times) != expected:
        frames_in_span = [i for i, time in enumerate(times) if (start or 0) <= time and (end is None or time <= end)]
        if not frames_in_span:
            end_text = "its end" if end is None else f"{end} s"
            raise DataError(
                f"video {name} has no frame from {start or 0} s to {end_text}; its last frame is at {times[-1]:.2f} s; give "
                "another span"
            )
        total = len(frames_in_span)
        wanted_frames = [frames_in_span[i] for i in evenly_spaced(total, count)]
        frames, *_ = _decode(path, name, wanted_frames, end)
    sizes = {frame.shape for frame in frames}
    if len(sizes) > 1:
        size_texts = " and ".join(f"{width}x{height}" for height, width, _ in sorted(sizes))
        raise DataError(f"video {name} changes its frame size ({size_texts}); convert it to one size")
    return Frames(
        frames=np.stack(frames),
        timestamps=tuple(times[i] for i in wanted_frames),
        indices=tuple(wanted_frames),
        total=total,
        fps=(len(times) - 1) / times[-1] if times[-1] > 0 else rate or 1.0,  # a single frame has no duration
    )


@contextmanager
def _opened(path: str | os.PathLike, name: str) -> Iterator[tuple[Any, av.VideoStream]]:
    """Yield the container and its first video stream. An error of PyAV in the `with` block becomes a DataError."""
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
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]  # without the path that PyAV adds
        raise DataError(f"video {name} cannot be decoded ({reason}); restore the file") from error


def _announced(path: str | os.PathLike, name: str) -> int:
    """Return the number of frames that the header states, or else the number of packets."""
    with _opened(path, name) as (container, stream):
        return int(stream.frames or sum(packet.size > 0 for packet in container.demux(stream)))


def _decode(
    path: str | os.PathLike, name: str, wanted: Collection[int], end: float | None
) -> tuple[list[np.ndarray], list[float], float | None]:
    """Decode a video up to second `end`.

    Return the frames with indices in `wanted`, the time of every frame in seconds, and the frame rate (None if unknown).
    """
    frames, times, wanted = [], [], set(wanted)
    with _opened(path, name) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate
        first_time, last_frame = None, None
        for index, frame in enumerate(container.decode(stream)):
            time = frame.time if frame.time is not None else index / float(rate or 1)
            first_time = time if first_time is None else first_time
            if end is not None and time - first_time > end:
                break
            times.append(time - first_time)
            last_frame = frame
            if index in wanted:
                if len(wanted) * frame.width * frame.height * 3 > MAX_BYTES:
                    raise DataError(
                        f"video {name} has frames of {frame.width}x{frame.height}, and {len(wanted)} frames need more than "
                        f"{MAX_BYTES >> 30} GiB; lower model.frames or scale the file down"
                    )
                frames.append(frame.to_ndarray(format="rgb24"))
        else:
            if last_frame is not None:
                frame_seconds = (
                    float(last_frame.duration * last_frame.time_base) if last_frame.duration else 1 / float(rate or 1)
                )
                _check_complete(container, stream, times, frame_seconds, name)
    if not times:
        raise DataError(f"video {name} has no frame that can be decoded; restore the file")
    return frames, times, float(rate) if rate else None


def _check_complete(container: Any, stream: av.VideoStream, times: list[float], last: float, name: str) -> None:
    """Raise DataError for a truncated video: fewer frames decode than `COMPLETE` times the number that the header states.

    If the header states no number of frames and the video is the file's only stream, durations are compared.

    times: seconds of each decoded frame. last: duration of the last frame in seconds.
    """
    import av

    announced: float = stream.frames
    decoded, unit = float(len(times)), "frames"
    if not announced and len(container.streams) == 1 and container.duration:
        announced, decoded, unit = container.duration / av.time_base, times[-1] + last, "seconds"
    if announced and decoded < COMPLETE * announced:
        raise DataError(
            f"video {name} is truncated or corrupt: {decoded:.4g} of {announced:.4g} {unit} decode; restore the file"
        )

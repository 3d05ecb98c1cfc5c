"""Convert videos to the frames and keyword arguments that a processor takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmkv_bench.errors import DataError, UnsupportedError
from mmkv_bench.families.registry import family_of_processor
from mmkv_bench.models.video import Frames, evenly_spaced, sample_frames

READY_FPS = 2.0
"""Assumed frame rate of a list of images, as in qwen-vl-utils."""


def frames_of(video: Any, count: int) -> Frames:
    """Return at most `count` frames of one video of a request.

    Args:
        video: a path; or {"video": path, "start_time": s, "end_time": s} with one or both times; or frames: a `Frames` object, a
            list of images or arrays [H, W, 3], or one array [T, H, W, 3]. Frames are sampled evenly; a `Frames` object is
            returned unchanged.

    Raises:
        DataError: see `sample_frames`; no frames, or frames of different sizes.
        UnsupportedError: start or end time of a video without a file.
    """
    start = end = None
    if isinstance(video, dict):
        start, end, video = video.get("start_time"), video.get("end_time"), video["video"]
    if isinstance(video, str | os.PathLike):
        return sample_frames(video, count, start, end)
    if start is not None or end is not None:
        raise UnsupportedError(
            "start_time and end_time need a video file, because ready frames have no times; give a file, or only "
            "the frames to use"
        )
    if isinstance(video, Frames):
        return video
    pictures = [_array(picture) for picture in video]
    sizes = {picture.shape for picture in pictures}
    if len(sizes) != 1 or next(iter(sizes))[2:] != (3,):
        raise DataError(
            f"ready frames of a video must be RGB images of one size, but {len(pictures)} of sizes "
            f"{sorted(sizes)} were given; give frames of one size"
        )
    frame_indices = evenly_spaced(len(pictures), count)
    times = tuple(i / READY_FPS for i in frame_indices)
    return Frames(np.stack([pictures[i] for i in frame_indices]), times, tuple(frame_indices), len(pictures), READY_FPS)


def video_arguments(processor: Any, videos: Sequence[Frames], video_max_pixels: int | None = None) -> dict[str, Any]:
    """Return keyword arguments for a processor's call with videos: the frames, with true times.

    Qwen-VL computes times as frame index over frame rate. The indices passed here are time times rate, so times stay true if the
    frame rate varies.

    Args:
        video_max_pixels: largest number of pixels of one frame, for a processor that limits the pixels of a whole video
            (Qwen3-VL); None: the processor's limit.

    Raises:
        UnsupportedError: videos with different numbers of frames, for a processor that stacks them (LLaVA-OneVision,
            LLaVA-NeXT-Video, InternVL).
    """
    video_processor, model_family = processor.video_processor, family_of_processor(processor)
    counts = sorted({len(video) for video in videos})
    if len(counts) > 1 and (model_family is None or model_family.equal_videos):
        raise UnsupportedError(
            f"the videos of one prompt have {counts} frames, but {type(processor).__name__} takes videos of equal "
            f"length; write model.frames={counts[0]}"
        )
    if model_family is not None and model_family.repeats_last_frame:
        videos = [_at_least(video, video_processor.temporal_patch_size) for video in videos]
    arguments: dict[str, Any] = {
        "do_sample_frames": False,
        "input_data_format": "channels_first",
        "video_metadata": [_metadata(video) for video in videos],
    }
    if video_max_pixels is not None and model_family is not None and model_family.whole_video_limit:
        arguments["size"] = _whole_size(video_processor, max(map(len, videos)), video_max_pixels)
    pixels = [torch.from_numpy(video.frames).permute(0, 3, 1, 2) for video in videos]
    return {"videos": pixels, "videos_kwargs": arguments}  # separate, or the prompt's images would get them too


def _at_least(video: Frames, count: int) -> Frames:
    """Return the video with at least `count` frames; the last frame is repeated if necessary."""
    missing = count - len(video)
    if missing <= 0:
        return video
    return replace(
        video,
        frames=np.concatenate([video.frames, np.repeat(video.frames[-1:], missing, 0)]),
        timestamps=video.timestamps + video.timestamps[-1:] * missing,
        indices=video.indices + video.indices[-1:] * missing,
    )


def _metadata(video: Frames) -> dict[str, Any]:
    return {
        "total_num_frames": video.total,
        "fps": video.fps,
        "frames_indices": [time * video.fps for time in video.timestamps],
        "height": video.frames.shape[1],
        "width": video.frames.shape[2],
        "duration": video.total / video.fps,
    }


def _whole_size(part: Any, frames: int, video_max_pixels: int) -> dict[str, int]:
    """Return the pixel limits of a video processor (`part`) for all frames together. The processor counts frame pairs."""
    pairs = round(frames / part.temporal_patch_size) * part.temporal_patch_size
    pixels = video_max_pixels * max(1, min(frames, pairs))
    return {
        "shortest_edge": min(part.size["shortest_edge"], pixels),
        "longest_edge": min(part.size["longest_edge"], pixels),
    }


def _array(picture: Any) -> np.ndarray:
    convert = getattr(picture, "convert", None)  # a PIL image
    return np.asarray(convert("RGB") if convert else picture, dtype=np.uint8)

"""Frames of a video: the right ones of any container, memory for the wanted ones only, one sentence for a broken file."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc

import av
import numpy as np
import pytest

from mmkv_bench.errors import DataError
from mmkv_bench.models import video
from mmkv_bench.models.video import evenly_spaced, sample_frames
from tests.clips import STEP, cut, write_clip, write_sound
from tests.each import each


def shown(frames: np.ndarray) -> list[int]:
    """Which frame of the clip each of these is, told by its grey level."""
    return [round(float(frame.mean()) / STEP) for frame in frames]


@each(
    ("name", "codec"),
    [
        ("a.mp4", "libx264"),
        ("a.mp4", "libx265"),
        ("a.mp4", "libaom-av1"),
        ("a.mkv", "libx264"),
        ("a.mkv", "ffv1"),
        ("a.webm", "libvpx-vp9"),
        ("a.webm", "libvpx"),
        ("a.avi", "mpeg4"),
        ("a.gif", "gif"),
        ("a.ts", "libx264"),
    ],
)
def test_frames_are_the_evenly_spaced_ones_of_any_container_and_codec(tmp_path, name, codec):
    found = sample_frames(write_clip(tmp_path / name, codec=codec), 8)
    assert found.indices == (0, 5, 11, 16, 22, 27, 33, 39)
    assert found.timestamps == pytest.approx([0, 0.5, 1.1, 1.6, 2.2, 2.7, 3.3, 3.9])
    assert (found.total, found.fps) == (40, pytest.approx(10))
    assert found.frames.dtype == np.uint8 and found.frames.shape == (8, 48, 64, 3)
    if codec != "gif":  # its palette has 8 levels
        assert np.abs(np.array(shown(found.frames)) - found.indices).max() <= 0.5


def test_positions_are_those_of_numpys_linspace():
    assert evenly_spaced(100, 3) == [0, 49, 99]
    assert evenly_spaced(7, 7) == evenly_spaced(7, 9) == list(range(7))
    assert evenly_spaced(1, 5) == [0] and evenly_spaced(5, 1) == [0]


@each("name", ["few.mp4", "few.webm"])
def test_a_video_with_fewer_frames_than_asked_gives_each_of_them_once(tmp_path, name):
    found = sample_frames(write_clip(tmp_path / name, frames=5), 32)
    assert found.indices == (0, 1, 2, 3, 4) and len(found) == 5


def test_one_frame_is_a_video(tmp_path):
    found = sample_frames(write_clip(tmp_path / "one.mp4", frames=1), 32)
    assert (found.indices, found.timestamps, found.total) == ((0,), (0.0,), 1) and found.fps > 0


@each("name", ["vfr.mkv", "vfr.mp4"])
def test_a_variable_frame_rate_keeps_every_frames_own_time(tmp_path, name):
    times = [100 * i + (1000 if i >= 20 else 0) for i in range(40)]
    found = sample_frames(write_clip(tmp_path / name, times=times), 5)
    assert found.indices == (0, 9, 19, 29, 39)
    assert found.timestamps == pytest.approx([times[i] / 1000 for i in found.indices], abs=1e-3)
    assert found.fps == pytest.approx(39 / 4.9)


def test_a_header_that_counts_wrong_is_not_believed(tmp_path):
    """avi's header may say 44 where 40 frames are; the frames are those of the 40."""
    clip = write_clip(tmp_path / "a.avi")
    content = clip.read_bytes()
    for place in (content.index(b"avih") + 8 + 16, content.index(b"strh") + 8 + 32):
        content = content[:place] + (44).to_bytes(4, "little") + content[place + 4 :]
    clip.write_bytes(content)
    assert video._announced(clip, "a.avi") == 44
    assert sample_frames(clip, 8).indices == (0, 5, 11, 16, 22, 27, 33, 39)


@each("name", ["a.mp4", "a.mkv", "a.webm", "a.gif", "a.ts"])
def test_a_file_is_decoded_once_where_the_number_of_frames_can_be_known_before(tmp_path, monkeypatch, name):
    decodings = []
    decode = video._decode
    monkeypatch.setattr(video, "_decode", lambda *args: decodings.append(args) or decode(*args))
    assert sample_frames(write_clip(tmp_path / name), 8).total == 40
    assert len(decodings) == 1


def test_only_the_span_is_sampled(tmp_path):
    clip = write_clip(tmp_path / "a.mp4")
    found = sample_frames(clip, 4, start=1.0, end=2.05)
    assert found.indices == (10, 13, 16, 20)  # frames 10 to 20 lie in it
    assert shown(found.frames) == [10, 13, 16, 20]
    assert sample_frames(clip, 2, start=3.5).indices == (35, 39)
    assert sample_frames(clip, 9, end=0.35).indices == (0, 1, 2, 3)
    with pytest.raises(DataError, match=r"a\.mp4 has no frame from 99 s to its end; its last frame is at 3\.90 s"):
        sample_frames(clip, 4, start=99)


def test_only_wanted_frames_are_held(tmp_path):
    """Thousands of full frames would fill the memory: of 200 frames of 225 KiB, 4 are held (and once more stacked)."""
    clip = write_clip(tmp_path / "long.avi", frames=200, size=(320, 240))
    sample_frames(clip, 1)  # modules are imported
    tracemalloc.start()
    assert sample_frames(clip, 4).total == 200
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 320 * 240 * 3


def test_frames_that_no_memory_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "MAX_BYTES", 8 * 64 * 48 * 3)
    clip = write_clip(tmp_path / "a.mp4")
    assert len(sample_frames(clip, 8)) == 8
    with pytest.raises(
        DataError, match=r"a\.mp4 has frames of 64x48, and 9 frames need more than .* lower model\.frames"
    ):
        sample_frames(clip, 9)


@each("name", ["a.mp4", "front.mp4", "a.mkv", "a.webm", "a.avi"])
@each("part", [0.3, 0.6, 0.85])
def test_a_truncated_file_is_refused_by_its_name(tmp_path, name, part):
    options = {"movflags": "faststart"} if name == "front.mp4" else None  # header first: all but the frames is there
    short = cut(write_clip(tmp_path / name, options=options), part)
    with pytest.raises(DataError, match=r"^video cut\.\w+ (cannot be decoded|is truncated|has no)") as refused:
        sample_frames(short, 8)
    assert str(tmp_path) not in str(refused.value) and "\n" not in str(refused.value)


@each("name", ["a.mp4", "a.mkv", "a.webm", "a.avi", "a.ts", "a.gif"])
@each("seed", range(3))
def test_a_corrupt_file_is_read_or_refused_but_never_worse(tmp_path, name, seed):
    clip, draw = write_clip(tmp_path / name), random.Random(seed)
    content = bytearray(clip.read_bytes())
    for _ in range(len(content) // 20):
        content[draw.randrange(len(content) // 4, len(content))] = draw.randrange(256)
    clip.write_bytes(content)
    try:
        assert len(sample_frames(clip, 8)) == 8
    except DataError as error:
        assert str(error).startswith(f"video {name} ") and str(tmp_path) not in str(error)


def test_a_codec_that_nobody_knows_is_one_sentence_and_no_crash(tmp_path):
    clip = write_clip(tmp_path / "a.mp4")
    content = clip.read_bytes()
    header, table, entries = content.partition(b"stsd")  # the table that names the codec
    assert entries.count(b"avc1") == 1
    clip.write_bytes(header + table + entries.replace(b"avc1", b"zzzz"))
    code = f"from mmkv_bench.models.video import sample_frames; sample_frames({str(clip)!r}, 8)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "DataError: video a.mp4 has a codec that PyAV does not know" in ended.stderr


@each(
    ("name", "content", "why"),
    [
        ("text.mp4", b"hello " * 999, "cannot be decoded"),
        ("empty.mp4", b"", "is an empty file"),
        ("gone.mp4", None, "is missing"),
        ("folder.mp4", ..., "is missing"),
    ],
)
def test_what_is_no_video_is_one_sentence(tmp_path, name, content, why):
    path = tmp_path / name
    if content is ...:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"^video {name} {why}.*") as refused:
        sample_frames(path, 8)
    assert str(tmp_path) not in str(refused.value)


def test_sound_alone_has_no_frames(tmp_path):
    with pytest.raises(DataError, match=r"^video sound\.m4a has no video stream"):
        sample_frames(write_sound(tmp_path / "sound.m4a"), 8)


def test_a_size_that_changes_is_refused(tmp_path):
    first, second = write_clip(tmp_path / "1.ts"), write_clip(tmp_path / "2.ts", size=(32, 32))
    both = tmp_path / "both.ts"
    both.write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(DataError, match=r"both\.ts changes its frame size \(32x32 and 64x48\)"):
        sample_frames(both, 8)


def test_a_playlist_reaches_no_other_place(tmp_path):
    playlist = tmp_path / "list.m3u8"
    playlist.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n")
    with pytest.raises(DataError, match=r"^video list\.m3u8 cannot be decoded"):
        sample_frames(playlist, 8)


def test_the_clips_of_these_tests_are_what_they_say(tmp_path):
    """Containers without a frame count, and with one, are both among them."""
    counts = {}
    for name in ("a.mp4", "a.webm"):
        with av.open(str(write_clip(tmp_path / name))) as container:
            counts[name] = container.streams.video[0].frames
    assert counts == {"a.mp4": 40, "a.webm": 0}

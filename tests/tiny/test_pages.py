"""Promises of the pages: splits share no setting, samples depend on their arguments alone, answers stand on the page."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.tiny import glyphs, handwriting
from mmkv_bench.tiny.pages import COLOUR_BINS, SIZES, TASKS, draw_look, make_page, make_sample
from mmkv_bench.tiny.splits import SPLITS, generator, rendering_split
from mmkv_bench.tiny.vocabulary import PAGE_CHARACTERS
from tests.each import each

CELLS = list(itertools.product(TASKS, SIZES))


@pytest.mark.slow
def test_no_glyph_rendering_belongs_to_two_splits():
    seen: dict[glyphs.Rendering, str] = {}
    for split in SPLITS:
        for face in glyphs.faces_of(split):
            for character in PAGE_CHARACTERS:
                chosen = glyphs.renderings(character, face, split)
                assert chosen, f"{split} cannot draw {character!r} in {face}"
                for rendering in chosen:
                    assert seen.setdefault(rendering, split) == split
    whole_grid = len(PAGE_CHARACTERS) * len(glyphs.SIZES) * len(glyphs.DX) * len(glyphs.DY)
    assert len(seen) == whole_grid * (len(glyphs.FACES) + 1)
    assert glyphs.HELD_OUT_FACE not in glyphs.FACES


def test_a_bank_holds_only_renderings_of_its_split():
    bank = glyphs.bank("dev")
    for character, (number, face) in itertools.product("Ka7.", enumerate(bank.faces)):
        first, count = bank.start[ord(character), number], bank.count[ord(character), number]
        expected = [glyphs.draw(r) for r in glyphs.renderings(character, face, "dev")]
        np.testing.assert_array_equal(bank.cells[first : first + count], expected)


def test_the_share_of_bitmaps_seen_in_training_is_what_looking_at_each_finds():
    """Settings of one split each may draw the same pixels, and mostly do: the card says how many."""

    def cells(split: str) -> np.ndarray:
        faces = glyphs.faces_of(split)
        return np.stack([glyphs.draw(r) for face in faces for c in ".k" for r in glyphs.renderings(c, face, split)])

    train = cells("train")
    for split, low, high in (("test", 0.5, 0.95), ("test_typeface", 0.0, 0.5), ("train", 1.0, 1.0)):
        own = cells(split)
        found = [bool((train == cell).all((1, 2)).any()) for cell in own]
        assert glyphs.seen_in_training(own, train) == sum(found) / len(found)
        assert low <= sum(found) / len(found) <= high


def test_no_handwritten_scan_belongs_to_two_splits():
    parts = [set(handwriting.scan_indices(split)) for split in ("train", "dev", "test")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 1797
    assert all(len(part) > 100 for part in parts)


def test_no_colour_level_belongs_to_two_splits():
    for split in SPLITS:
        bins = COLOUR_BINS[rendering_split(split)]
        for index in range(50):
            look = draw_look(split, generator("colour test", split, index))
            assert all(level % 5 in bins for level in (*look.ink, *look.paper))
    used = [residue for bins in COLOUR_BINS.values() for residue in bins]
    assert len(used) == len(set(used))


def _pixels(sample):
    return [np.asarray(image) for image in sample.images]


def test_a_sample_depends_on_its_arguments_alone():
    first = {cell: make_sample(*cell, "dev", 3) for cell in CELLS}
    np.random.seed(1)
    for cell in reversed(CELLS):
        make_sample(*cell, "dev", 4)
        again = make_sample(*cell, "dev", 3)
        assert (again.question, again.answer, again.sample_id) == (
            first[cell].question,
            first[cell].answer,
            first[cell].sample_id,
        )
        for a, b in zip(_pixels(first[cell]), _pixels(again), strict=True):
            np.testing.assert_array_equal(a, b)


def test_samples_of_other_indices_splits_and_sizes_differ():
    variants = [make_sample("lookup", "small", split, index) for split in SPLITS for index in range(5)]
    assert len({sample.sample_id for sample in variants}) == len(variants)
    assert len({_pixels(sample)[0].tobytes() for sample in variants}) == len(variants)


def test_this_sample_is_the_one_every_machine_makes():
    sample = make_sample("walk3", "small", "test", 0)
    assert (sample.question, sample.answer) == ("K>", "757t538s219.")
    document, _, _ = make_page("walk3", "small", "test", 0)
    assert "".join(map(chr, document.grids[0][12])) == "     K757t T538s"


def _entries_on(grids: np.ndarray) -> dict[str, str]:
    """Every key on the pages with the four characters right of it, found by looking at every cell."""
    found: dict[str, str] = {}
    for grid in grids:
        for row in grid:
            text = "".join(map(chr, row))
            for column, character in enumerate(text):
                if character.isupper():
                    assert character not in found, "a key stands on the page twice"
                    found[character] = text[column + 1 : column + 5]
    return found


def _expected(task: str, question: str, entries: dict[str, str]) -> str:
    key, kind = question
    if kind == "?":
        return entries[key][:3]
    pieces = []
    while True:
        pieces.append(entries[key] if kind == ">" else entries[key][3])
        if entries[key][3] == ".":
            return "".join(pieces)
        key = entries[key][3].upper()


@pytest.mark.full
@each(("task", "size"), CELLS)
def test_the_answer_stands_on_the_page(task, size):
    mark = {"walk3": ">", "chain3": "*"}.get(task.split("_")[-1], "?")
    for index in range(15):
        document, turn, _ = make_page(task, size, "test", index)
        assert turn.question[1] == mark
        assert turn.answer == _expected(task, turn.question, _entries_on(document.grids))
        if mark == ">":
            assert len(turn.answer) == 12
        if mark == "*":
            assert len(turn.answer) == 3


@each(("task", "size"), CELLS)
def test_images_have_the_size_and_number_of_the_task(task, size):
    sample = make_sample(task, size, "test", 1)
    side = SIZES[size] * glyphs.CELL
    many = task.startswith(("mi_", "redundant_"))
    assert [image.size for image in sample.images] == [(side // 2, side // 2)] * 4 if many else [(side, side)]
    assert sample.task == task


def test_redundant_frames_repeat_the_content_in_other_renderings():
    document, _, images = make_page("redundant_walk3", "small", "test", 0)
    assert len(document.grids) == 1
    assert len({image.tobytes() for image in images}) == 4
    assert (document.grids == ord(" ")).mean() > 0.5


def test_handwritten_digits_are_scans_and_other_characters_are_not():
    document, _, images = make_page("handwritten", "small", "test", 0)
    printed = {cell.tobytes() for cell in glyphs.bank("test").cells}
    scans = {cell.tobytes() for cell in handwriting.scan_bank("test").cells}
    assert not printed & scans
    # Without noise and colour the cells can be recognised exactly.
    from mmkv_bench.tiny.pages import Look, render

    look = Look(0, np.array([0, 0, 0]), np.array([255, 255, 255]), 0)
    page = 255 - render(document.grids[0], "test", look, True, generator("handwriting test"))[..., 0]
    for (row, column), code in np.ndenumerate(document.grids[0]):
        cell = page[row * 28 : row * 28 + 28, column * 28 : column * 28 + 28].tobytes()
        assert cell in (scans if chr(code).isdigit() else printed)


@each(
    ("arguments", "words"),
    [
        (("lokup", "small", "test", 0), "did you mean 'lookup'"),
        (("lookup", "medium", "test", 0), "allowed: large, small"),
        (("lookup", "small", "valid", 0), "train"),
        (("lookup", "small", "test", -1), "negative"),
    ],
)
def test_a_sample_that_does_not_exist_is_refused_with_what_is_allowed(arguments, words):
    with pytest.raises(ConfigError, match=words):
        make_sample(*arguments)

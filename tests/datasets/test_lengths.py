"""English at three lengths: stretches of documentation behind those of other projects, and two codes in prose."""

from __future__ import annotations

import hashlib

from mmkv_bench.config.files import content
from mmkv_bench.datasets.tasks.documentation import utils as documentation
from mmkv_bench.datasets.tasks.lengths import utils


def rows(kind: str, length: str) -> list[dict]:
    return list(utils.read(None, {"task": f"lengths_{kind}_{length}"})["test"])


def test_documents_are_the_same_on_every_machine_and_grow_with_the_length():
    digests = {}
    for kind in ("documentation", "needles"):
        sizes = []
        for length in utils.PROSE:
            made = rows(kind, length)
            assert len(made) == len({row["document"] for row in made}) == 40
            sizes.append(sum(len(row["context"]) for row in made) / 40)
            assert content("dataset", f"lengths_{kind}_{length}")["about"]["samples"] == "40"
        assert 3.5 < sizes[1] / sizes[0] < 4.5 and 1.8 < sizes[2] / sizes[1] < 2.2
        texts = "".join(utils.doc_to_text(row) for row in made)
        digests[kind] = hashlib.sha256(texts.encode()).hexdigest()[:16]
    assert digests == {"documentation": "205f3dcba8faed83", "needles": "0e0c7630f4f2d17b"}


def test_what_goes_on_stands_last_behind_other_projects():
    plain = {row["document"]: row for row in documentation.read(None, {})["test"]}
    for row in rows("documentation", "8k"):
        whole = plain[row["document"]]
        assert row["context"].endswith("\n" + whole["context"]) and row["continuation"] == whole["continuation"]
        before = row["context"].removesuffix(whole["context"])
        others = [one for one in plain.values() if one["context"] in before]
        assert len(others) == 7 and row["project"] not in {one["project"] for one in others}
        assert all(one["continuation"] not in row["context"] for one in plain.values()), "no answer is given away"


def test_two_codes_are_asked_for_and_each_counts_half():
    for row in rows("needles", "2k"):
        first, second = row["answer"].split(" and ")
        assert first != second and row["question"].count("What is the code for") == 2
        assert row["context"].count("The code for the ") == 4 and f"is {first}." in row["context"]
        for answer, share in ((row["answer"], 1), (f"{second}, then {first}", 1), (f"It is {first}.", 0.5), ("?", 0)):
            assert utils.codes_given(row, [answer]) == {"codes_given": share}

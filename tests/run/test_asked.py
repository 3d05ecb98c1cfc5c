"""What a run writes beside its answers, for people who look at them: questions, references, and with keep=indices the choice."""

from __future__ import annotations

import numpy as np
import pytest

from mmkv_bench.run.generate import question_text
from mmkv_bench.store.response import digest_of_kept, unpack_kept
from mmkv_bench.store.store import Store
from mmkv_bench.tiny.pages import make_sample
from tests.run.setting import done


def test_a_question_is_its_messages_text_with_places_for_media():
    image, text = {"type": "image"}, {"type": "text", "text": "What is it?"}
    assert question_text([{"role": "user", "content": [image, text]}]) == "<image>\nWhat is it?"
    turns = [
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    ]
    assert question_text(turns) == "user: What is it?\n\nassistant: A cat."
    assert question_text([]) == ""


@pytest.mark.full
def test_rows_say_what_was_asked_and_which_entries_stay(tmp_path):
    done(
        tmp_path,
        "dataset=pages_multi_image",
        "method=[snapkv,adakv]",
        "budget=24",
        "protocol=[paper,strict]",
        "limit=2",
        "keep=indices",
    )
    store = Store(tmp_path)
    prompts = {row["sample_id"]: row for row in store.prompts().to_pylist()}
    rows = store.responses().to_pylist()
    protocols = {row["cell"]: row["protocol"] for row in store.cells().to_pylist()}
    assert {row["sample_id"] for row in rows} == set(prompts) and len(prompts) == 2
    for row in rows:
        bits = unpack_kept(row["kept_indices"])
        assert digest_of_kept(bits) == row["kept_digest"]
        refed = int(protocols[row["cell"]] == "strict")  # its last token is fed again
        assert (bits.sum(axis=-1) + refed).tolist() == row["kept"]
        assert prompts[row["sample_id"]]["prompt_hash"] == row["prompt_hash"]
    for name, row in prompts.items():
        task, size, split, index = name.rsplit("-", 3)
        page = make_sample(task, size, split, int(index))
        assert row["question"].endswith(page.question) and (row["reference"], row["media"]) == (page.answer, 4)
        visual = np.reshape(row["visual"], (-1, 6))
        assert len(visual) == next(one["visual_tokens"] for one in rows if one["sample_id"] == name)
        assert np.all(np.diff(visual[:, 0]) > 0) and set(visual[:, 1]) == {0, 1, 2, 3}


@pytest.mark.slow
def test_show_prints_the_whole_prompt_as_the_model_read_it(tmp_path, capsys):
    from mmkv_bench.cli.main import main

    done(tmp_path / "rows", "dataset=pages_lookup", "method=snapkv", "budget=16", "limit=1")
    row = Store(tmp_path / "rows").prompts().to_pylist()[0]
    capsys.readouterr()
    assert main(["show", str(tmp_path / "rows"), row["sample_id"], "--prompt"]) == 0
    shown = capsys.readouterr().out
    assert row["rendered"].count("<|image_pad|>") == row["media"] and row["rendered"].endswith("assistant\n")
    assert shown.rstrip().endswith(row["rendered"].rstrip())
    assert main(["show", str(tmp_path / "rows"), "--prompt"]) == 2
    assert "--prompt needs a sample" in capsys.readouterr().err

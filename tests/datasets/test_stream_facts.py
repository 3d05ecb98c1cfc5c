"""Promise: facts of stream_facts are as old as their names say, counted in a prompt of the embedded model."""

from __future__ import annotations

import torch

from mmkv_bench.config.schema import resolve_path
from mmkv_bench.datasets.tasks.streams import boards, utils
from mmkv_bench.tiny.splits import generator
from mmkv_bench.tiny.vocabulary import VISION_END


def test_ages_are_tokens_between_a_fact_and_the_end_of_the_stream():
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(resolve_path("pkg://mmkv_bench/tiny/weights"))
    for task, (count, ages) in boards.TASKS.items():
        rows = boards.rows(task, "dev")
        assert len(rows) == 8 * boards.COUNTS["dev"] and rows == boards.rows(task, "dev")
        pictures = utils.doc_to_visual(rows[0])
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": utils.doc_to_text(rows[0])}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        ids = processor(text=[text], images=pictures, return_tensors="pt")["input_ids"][0]
        cells = (ids == 5).nonzero()[:, 0].view(count, boards.SIDE, boards.SIDE)
        end = int((ids == VISION_END).nonzero()[-1]) + 1
        assert end >= 10 * boards.CAP
        for number in range(boards.COUNTS["dev"]):
            facts, _ = boards._facts(task, "dev", number)
            assert len({fact.key for fact in facts}) == 8 == len({(fact.board, fact.row) for fact in facts})
            for fact in facts:
                first, last = (int(cells[fact.board, fact.row, fact.column + place]) for place in (0, 4))
                assert end - last - 1 == fact.age(count)
                if fact.kind == "now":
                    assert end - first <= boards.CAP  # a cache of the newest CAP tokens holds it
                else:
                    assert last < end - boards.CAP
                    age = int(fact.kind.removeprefix("age_"))
                    assert age in ages and age * boards.CAP <= fact.age(count) < (age + 0.5) * boards.CAP
            asked = rows[8 * number : 8 * number + 8]
            assert sorted(row["kind"] for row in asked) == sorted([*["now"] * 4, *(f"age_{age}" for age in ages)])


def test_the_embedded_model_s_boards_show_their_facts_the_same_each_time():
    rows = boards.rows("stream_facts", "dev")
    first = [picture.tobytes() for picture in utils.doc_to_visual(rows[0])]
    boards.images.cache_clear()
    assert first == [picture.tobytes() for picture in utils.doc_to_visual(rows[3])]
    assert first != [picture.tobytes() for picture in utils.doc_to_visual(boards.rows("stream_facts", "test")[0])]
    right = utils.process_results(rows[0], [rows[0]["answer"]])
    assert right == {"exact_match": 1.0, f"exact_match_{rows[0]['kind']}": 1.0}
    assert set(utils.process_results(rows[0], ["x"]).values()) == {0.0}
    assert not torch.equal(
        *(torch.tensor(generator("streams", "stream_facts", s, 0).integers(9, size=9)) for s in ("dev", "test"))
    )

"""Promise: `cut_prompt` answers as plain `generate()` does on the longest text, without its middle, that the budget holds."""

from __future__ import annotations

import pytest
import torch

from mmkv_bench.config.compose import compose
from mmkv_bench.datasets.tasks.english.documents import document, prompt
from mmkv_bench.models.source import Source
from tests.run.setting import done, responses
from tests.run.test_pixels import _told

MODEL = [
    "model=llama_3_8b",
    "model.weights=random",
    "model.layers=2",
    "model.dtype=float32",
    *(f"model.shape.{key}={value}" for key, value in (("hidden_size", 64), ("intermediate_size", 96),
      ("num_attention_heads", 4), ("num_key_value_heads", 2))),
]  # fmt: skip
COMMAND = (
    "dataset=english_records",
    "method=[snapkv,cut_prompt]",
    "budget=[40%,5]",
    "limit=1",
    "stage=generate",
    *MODEL,
)


HEADS = 2 * 2  # of all layers


def by_hand(loaded, text: str, entries: int) -> list[torch.Tensor]:
    """The prompts of at most so many tokens that lack the middle of the text, by growing length."""
    tokenizer = loaded.tokenizer
    ids, prompts = tokenizer(text, add_special_tokens=False)["input_ids"], []
    for half in range(entries // 2 - 40, entries // 2 + 1):
        message = {"role": "user", "content": tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])}
        prompts.append(
            tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True, return_tensors="pt")
        )
    return [one["input_ids"] for one in prompts if one["input_ids"].shape[1] <= entries]


@pytest.mark.full
def test_the_longest_text_without_its_middle_that_the_budget_holds_is_answered(tmp_path):
    done(tmp_path, *COMMAND)
    rows = {(row["method"], row["budget"]): row for row in _told(tmp_path)}
    cut, whole, least = rows["cut_prompt", "0.4"], rows["full", ""], rows["cut_prompt", "5"]
    assert cut["context_tokens"] == whole["context_tokens"] and cut["bytes_full"] == whole["bytes_full"]
    loaded = Source.of(compose([*MODEL, "model.device=cpu"]).model).load()
    page = document("records", "test", 0)
    prompts = by_hand(loaded, prompt(page.context, page.questions[0][0]), cut["entries_asked"] // HEADS)
    length = cut["entries_resident"] // HEADS
    step = whole["prompt_tokens"] / 256  # between two sizes
    assert length <= prompts[-1].shape[1] <= length + step + 2
    (ids,) = (one for one in prompts if one.shape[1] == length)
    with torch.no_grad():
        answer = loaded.model.generate(ids, max_new_tokens=cut["n_tokens"], do_sample=False)[0, length:]
    assert answer.tolist() == list(cut["token_ids"])
    assert least["fallback"] == ["cut_prompt_over_budget"] and least["entries_resident"] < 60 * HEADS
    assert done(tmp_path, *COMMAND).generated == 0, "nothing is missing"
    assert len(responses(tmp_path)) == 5

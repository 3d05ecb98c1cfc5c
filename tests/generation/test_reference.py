"""Promise: a reference answer's tokens are those that follow the prompt in the rendered conversation; samples follow softmax."""

from __future__ import annotations

import math

import pytest
import torch
from omegaconf import ListConfig, OmegaConf

from mmkv_bench.config.files import content, options
from mmkv_bench.errors import DataError, UnsupportedError
from mmkv_bench.generation.decode import SEEDS, TEMPERATURE, Sampler
from mmkv_bench.generation.encode import reference_tokens
from mmkv_bench.models.processor import build_tokenizer, chat_template
from tests import cover
from tests.generation import common

ANSWER = "A cat.\nTwo dogs, and 3 birds"
IMAGE = {"type": "image"}


def question(*parts: dict) -> list[dict]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def with_processor() -> dict:
    """One model file per chat template."""
    nodes = {name: OmegaConf.create(content("model", name)) for name in options("model")}
    return {node.processor.template: node for node in nodes.values() if node.get("processor")}


def tokenizer_of(node):
    settings = OmegaConf.to_container(node.processor)
    text = node.shape.get("text_config") or node.shape
    template = chat_template(settings["template"])
    return build_tokenizer(text.vocab_size, settings["special_tokens"], settings.get("tokenizer", {}), template, 4096)


@pytest.mark.slow
@cover.few("template", sorted(with_processor()), first=8)
def test_tokens_of_a_reference_follow_the_prompt_and_leave_out_the_end_of_the_turn(template):
    tokenizer = tokenizer_of(with_processor()[template])
    messages = question(IMAGE, IMAGE) if with_processor()[template].processor.get("image") else question()
    tokens = reference_tokens(tokenizer, messages, f" {ANSWER} \n")
    assert tokenizer.decode(tokens).strip() == ANSWER
    turn = {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]}
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*messages, turn], tokenize=False)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole)]
    assert ids[1][: len(ids[0]) + len(tokens)] == [*ids[0], *tokens]
    behind = tokenizer.decode(ids[1][len(ids[0]) + len(tokens) :])
    ends = with_processor()[
        template
    ].shape.generation_config.eos_token_id  # Gemma ends turns with another token than texts
    assert behind.strip() in ("", *tokenizer.convert_ids_to_tokens(ends if isinstance(ends, ListConfig) else [ends]))


def test_a_reference_that_the_template_changes_or_moves_is_refused():
    tokenizer = common.tokenizer()
    turn = "{% for m in messages %}{{ m.role }}: {{ m.content[0].text }} {% endfor %}"
    changing = {
        turn.replace("{{ m.content", "{{ m.content[0].text | upper if m.role == 'assistant' else m.content"): "loses",
        turn.replace("messages", "messages | reverse"): "template does not render the reference",
        "{{ messages[0].content[0].text }}": "loses the text of assistant turns",
        turn + "{% if add_generation_prompt %}bot: {% endif %}": "template does not render the reference",
        turn: "ends the turn",
    }
    for text, why in changing.items():
        tokenizer.chat_template = text
        with pytest.raises((DataError, UnsupportedError), match=why):
            reference_tokens(tokenizer, question(), "cat")
    with pytest.raises(DataError, match="empty"):
        reference_tokens(tokenizer, question(), " \n")


def test_a_reference_that_melts_into_the_prompt_is_refused():
    """The tokenizer of the zoo takes two letters a token: an odd prompt shares one with the answer."""
    tokenizer = common.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content[0].text }}{% if m.role == 'user' %}abc{% endif %}{% endfor %}"
    )
    even = len(question()[0]["content"][0]["text"]) % 2 == 0
    tokenizer.chat_template = tokenizer.chat_template.replace("abc", "abc" if even else "ab")
    with pytest.raises(DataError, match="joins the end of the prompt"):
        reference_tokens(tokenizer, question(), "dd")
    tokenizer.chat_template = tokenizer.chat_template.replace("abc" if even else "ab", "abcd" if even else "abc")
    assert tokenizer.decode(reference_tokens(tokenizer, question(), "efgh")) == "efgh"


@pytest.mark.slow
def test_samples_follow_the_tempered_distribution():
    logits = torch.tensor([[0.1, 0.5, -0.2, 0.45, 0.0]])
    weights = [math.exp(value / TEMPERATURE) for value in logits[0].tolist()]
    expected = [weight / sum(weights) for weight in weights]
    sampler, counts = Sampler(SEEDS[0], "data/1"), [0] * 5
    for _ in range(20_000):
        counts[int(sampler(logits))] += 1
    for count, share in zip(counts, expected, strict=True):
        assert count / 20_000 == pytest.approx(share, abs=0.015)  # over four standard deviations


def test_a_stream_of_samples_is_its_seeds_and_its_samples_own():
    logits = torch.linspace(0, 0.3, 50)[None]

    def drawn(seed: int, identity: str, precision=torch.float32) -> list[int]:
        sampler = Sampler(seed, identity)
        return [int(sampler(logits.to(precision))) for _ in range(12)]

    assert drawn(0, "data/1") == drawn(0, "data/1") == drawn(0, "data/1", torch.float64)
    assert len({tuple(drawn(seed, name)) for seed in SEEDS for name in ("data/1", "data/2")}) == 4
    certain = torch.tensor([[-40.0, 40.0, -40.0]])
    assert {int(Sampler(seed, "data/1")(certain)) for seed in SEEDS} == {1}

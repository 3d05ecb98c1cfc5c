"""What a compressor meets inside the embedded model: sinks, entropy and visual share of attention, per layer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mmkv_bench.tiny.pages import Sample, make_sample
from mmkv_bench.tiny.vocabulary import IMAGE_PAD
from tools.train_tiny.answering import encode, load

NAMES = (
    "first_token_mass",
    "first_four_mass",
    "entropy_nats",
    "entropy_of_uniform",
    "visual_share_question",
    "visual_share_answer",
    "visual_share_of_slots",
    "largest_activation",
)


def layer_statistics(folder: Path, samples: Iterable[Sample]) -> list[dict[str, float]]:
    """Means over samples, heads and queries, one dict per layer, of attention over the prompt and the true answer.

    first_token_mass, first_four_mass: attention on the first 1 and 4 positions, from queries in the second half;
    entropy_nats: entropy of those queries' rows, entropy_of_uniform: log of how many positions they see;
    visual_share_question, visual_share_answer: attention on visual tokens from the text after the last image and from
    the answer's positions (teacher-forced); visual_share_of_slots: what even attention would give at the last query;
    largest_activation: largest magnitude in the layer's output over its median magnitude.
    """
    import torch

    model, processor = load(folder, attention="eager")
    totals: list[dict[str, list[float]]] = []
    for sample in samples:
        inputs = dict(encode(processor, [sample]))
        prompt = inputs["input_ids"]
        answer = processor.tokenizer(sample.answer, return_tensors="pt")["input_ids"]
        inputs["input_ids"] = torch.cat([prompt, answer], 1)
        for name in ("attention_mask", "mm_token_type_ids"):
            fill = torch.full_like(answer, int(name == "attention_mask"))
            inputs[name] = torch.cat([inputs[name], fill.to(inputs[name].dtype)], 1)
        with torch.no_grad():
            result = model(**inputs, output_attentions=True, output_hidden_states=True, use_cache=False)
        visual = inputs["input_ids"][0] == IMAGE_PAD
        length, asked = len(visual), int(visual.nonzero().max()) + 1
        half, last = length // 2, prompt.shape[1] - 1
        totals = totals or [{name: [] for name in NAMES} for _ in result.attentions]
        for layer, (weights, states) in enumerate(zip(result.attentions, result.hidden_states[1:], strict=True)):
            rows = weights[0].double()  # (heads, queries, keys)
            late = rows[:, half:]
            magnitude = states[0].abs()
            values = (
                late[..., 0].mean(),
                late[..., :4].sum(-1).mean(),
                torch.special.entr(late).sum(-1).mean(),
                torch.arange(half + 1, length + 1).double().log().mean(),
                rows[:, asked : last + 1][..., visual].sum(-1).mean(),
                rows[:, last:][..., visual].sum(-1).mean(),
                visual[: last + 1].double().mean(),
                magnitude.max() / magnitude.median(),
            )
            for name, value in zip(NAMES, values, strict=True):
                totals[layer][name].append(float(value))
    return [{name: sum(values) / len(values) for name, values in layer.items()} for layer in totals]


def report(folder: Path, count: int, split: str = "test") -> dict[str, list[dict[str, float]]]:
    """layer_statistics on `count` pages each of lookup and walk3, small and large."""
    cells = [(task, size) for task in ("lookup", "walk3") for size in ("small", "large")]
    return {
        f"{task}/{size}": layer_statistics(folder, (make_sample(task, size, split, index) for index in range(count)))
        for task, size in cells
    }

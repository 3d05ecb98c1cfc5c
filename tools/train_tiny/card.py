"""The model card of the embedded model, written from measurements: card.json and README.md in the model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmkv_bench.tiny.pages import ENTRIES, FRAMES, REDUNDANT_ENTRIES, SIZES

HEADER = """---
library_name: transformers
pipeline_tag: image-text-to-text
---
# A tiny Qwen2.5-VL that reads synthetic pages

A stock `Qwen2_5_VLForConditionalGeneration` of {parameters:.2f} M parameters, trained from random weights on one CPU
core. It exists so that KV-cache compressors can be run end to end, with real answers, without downloading anything.
Text: 4 layers, hidden 128, 4 query and 2 KV heads of 32, vocabulary of single characters. Vision: one block, one
28 x 28 px glyph cell per visual token.

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained(folder)
processor = AutoProcessor.from_pretrained(folder)
```

## Questions

A page is a grid of characters with entries such as `K384q`: a key, three digits, and a link to another key (`.` ends
a chain). `K?` asks for the digits (lookup), `K>` for the rest of the chain (walk3, `384q592m107.`), `K*` for its links
(chain3, `qm.`). `mi_*`: the page is cut into {frames} images. handwritten: all digits are scans (UCI, via
scikit-learn). `redundant_*`: {frames} frames of one sparse page, drawn anew each. small is {small} x {small} cells with
{entries_small} entries, large {large} x {large} with {entries_large} (cut and redundant pages: four images of half the
side; redundant ones carry {redundant_small} and {redundant_large} entries).
"""

TRAINING = """
## Training

`python -m tools.train_tiny.train --out DIR --seed 0` repeats it ({vision} vision steps, then {language} language
steps, about 40 minutes on one core of an AMD EPYC):

1. The vision tower alone learns to read characters, printed and handwritten, through the tied output head.
2. The language model learns on cached outputs of the resting tower, with pages that grow as it masters them, while an
   auxiliary loss on layer-{auxiliary} outputs (its head is not shipped) teaches where the next character is to be read.
3. The last {real} steps train everything together on rendered pages of all kinds.

AdamW, learning rate {rate}, betas (0.9, 0.98), weight decay 0.02, gradient clip 1, cosine decay.

## Splits

Every combination of character, typeface, size and offset, every colour level, every handwritten scan and every page seed
belongs to one split. That keeps pages, colours and scans of the test split out of training, and not the shapes of its
printed glyphs: hinting moves outlines to whole pixels, so that neighbouring sizes and offsets are drawn alike. Of the glyph
bitmaps (coverage, before colour and noise) {seen_test:.0%} of test and {seen_dev:.0%} of dev are pixel for pixel one of
training's. Test scores say that new pages are read, and little about new shapes of letters. The rows marked
`test_typeface` do: their typeface (DejaVu Serif Bold) was never trained on, and {seen_typeface:.0%} of its bitmaps occur in
training (strokes such as - and =); handwritten digits do too, whose scans are of one split each.
"""

LIMITS = """
## What numbers from this model do not show

- Rankings of compressors on it are no evidence about models of billions of parameters. They show that each compressor
  does what it says it does.
- One glyph is one visual token, so a plain page has no redundancy: methods that merge neighbours, transform to
  frequencies or weigh modalities have nothing to win there, and a method that keeps a recent window must lose.
  The `redundant_*` pages store each fact four times for that reason.
- The auxiliary loss sharpens attention towards the cell to be read; natural models attend more diffusely.
- There is no natural text and no natural image. That a matrix in this model has low rank says nothing about others.
- Prompts have about a dozen text tokens: an observation window of 32 queries is mostly page cells.
- Every figure has its own n and interval; at n = 300 an accuracy in the middle is known to about 0.06.
"""


def scores_table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of full-cache scores; a threshold that is missed is marked as such."""
    lines = [
        "| task | size | split | exact match | 95% interval | n | characters right | threshold |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["interval_95"]
        threshold = "none"
        if row["threshold"] is not None:
            met = "met" if row["exact_match"] >= row["threshold"] else "**missed**"
            threshold = f"{row['threshold']:.2f} {met}"
        lines.append(
            f"| {row['task']} | {row['size']} | {row['split']} | {row['exact_match']:.3f} | {low:.3f} to {high:.3f} "
            f"| {row['n']} | {row['characters_right']:.4f} | {threshold} |"
        )
    return "\n".join(lines)


def attention_table(report: dict[str, list[dict[str, float]]]) -> str:
    """Markdown table of attention statistics per layer."""
    lines = [
        (
            "| pages | layer | mass on first token | on first four | entropy (even attention) | visual share, question "
            "| visual share, answer (share of slots) | largest activation / median |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for pages, layers in report.items():
        for number, layer in enumerate(layers):
            lines.append(
                f"| {pages} | {number} | {layer['first_token_mass']:.3f} | {layer['first_four_mass']:.3f} "
                f"| {layer['entropy_nats']:.2f} ({layer['entropy_of_uniform']:.2f}) "
                f"| {layer['visual_share_question']:.2f} "
                f"| {layer['visual_share_answer']:.2f} ({layer['visual_share_of_slots']:.2f}) "
                f"| {layer['largest_activation']:.0f} |"
            )
    return "\n".join(lines)


def attention_text(report: dict[str, list[dict[str, float]]]) -> str:
    """What the statistics say, next to what is known of large models."""
    layers = [layer for group in report.values() for layer in group]
    sink = max(layer["first_token_mass"] for layer in layers)
    peak = max(layer["largest_activation"] for layer in layers)
    groups = zip(*report.values(), strict=True)
    shares = [sum(layer["visual_share_answer"] for layer in group) / len(report) for group in groups]
    return (
        "Large language models put much of their attention on the first token in most layers (attention sinks, Xiao et "
        "al. 2024; often more than half of it) and have activations a thousand times the median or more (Sun et al. "
        f"2024). Here no layer puts more than {sink:.3f} on the first token, and the largest activation is {peak:.0f} "
        "times the median: that is all there is for a method that protects the first tokens. Deep layers of large "
        "vision-language models attend little to visual tokens while answering; here the share is "
        f"{', '.join(f'{share:.2f}' for share in shares)} from the first layer to the last: the page itself is read "
        "where that share is high, and evicting what is to be read there loses the answer."
    )


def readme(card: dict[str, Any]) -> str:
    """The model card's text: a function of card.json's content and the training plan alone."""
    from tools.train_tiny.model import AUXILIARY_LAYER
    from tools.train_tiny.trainer import Plan

    plan, missed = Plan(), card["thresholds_missed"]
    verdict = f"Thresholds missed: {', '.join(missed)}." if missed else "Every threshold is met."
    text = HEADER.format(
        parameters=card["parameters"] / 1e6,
        frames=FRAMES,
        **SIZES,
        entries_small=ENTRIES["small"],
        entries_large=ENTRIES["large"],
        redundant_small=REDUNDANT_ENTRIES["small"],
        redundant_large=REDUNDANT_ENTRIES["large"],
    )
    text += TRAINING.format(
        vision=plan.vision,
        language=plan.language,
        real=plan.real,
        rate=plan.rate,
        auxiliary=AUXILIARY_LAYER,
        seen_test=card["seen_in_training"]["test"],
        seen_dev=card["seen_in_training"]["dev"],
        seen_typeface=card["seen_in_training"]["test_typeface"],
    )
    return text + (
        "\n## Full-cache scores\n\nExact match of greedy answers through the stock processor and `generate`, float32, "
        f"Wilson intervals. {verdict}\n\n{scores_table(card['scores'])}\n\n## What a compressor meets inside\n\n"
        f"Means over {card['attention_samples']} test pages per row, eager attention over the prompt and the true "
        "answer; mass and entropy from the queries of the second half, entropy in nats.\n\n"
        f"{attention_table(card['attention'])}\n\n{attention_text(card['attention'])}\n{LIMITS}"
    )


def write_card(folder: Path, rows: list[dict[str, Any]], attention_samples: int) -> list[Path]:
    """Measure attention, then write folder/card.json and folder/README.md; returns both paths."""
    from mmkv_bench.tiny.glyphs import bank, seen_in_training
    from tools.train_tiny.answering import load
    from tools.train_tiny.attention_report import report

    card = {
        "parameters": sum(parameter.numel() for parameter in load(folder)[0].parameters()),
        "scores": rows,
        "seen_in_training": {
            split: seen_in_training(bank(split).cells[1:], bank("train").cells[1:])  # cell 0 is the blank
            for split in ("dev", "test", "test_typeface")
        },
        "thresholds_missed": [
            f"{row['task']} {row['size']}" for row in rows if (row["threshold"] or 0) > row["exact_match"]
        ],
        "attention_samples": attention_samples,
        "attention": report(folder, attention_samples),
    }
    paths = [folder / "card.json", folder / "README.md"]
    paths[0].write_text(json.dumps(card, indent=1) + "\n")
    paths[1].write_text(readme(card))
    return paths

"""The README's first picture: one page with its question, and how many heads of three methods keep each of its cells.

`python tools/kept_picture.py` writes docs/images/kept.png. One glyph of a page is one visual token.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmkv_bench import attach
from mmkv_bench.tiny.pages import make_sample

METHODS, BUDGET, PAGE, CELLS = ("snapkv", "keydiff", "mmshift"), 96, 4, 24
OUT = Path(__file__).parents[1] / "docs" / "images" / "kept.png"


def main() -> None:
    folder = files("mmkv_bench") / "tiny" / "weights"
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    page = make_sample("walk3", "large", "test", PAGE)
    content = [{"type": "image", "image": page.images[0]}, {"type": "text", "text": page.question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    places = np.flatnonzero(inputs["input_ids"][0].numpy() == model.config.image_token_id)
    text = model.config.text_config
    heads = text.num_hidden_layers * text.num_key_value_heads
    colours = ScalarMappable(Normalize(0, heads), "cividis")
    assert len(places) == CELLS**2, "one visual token a cell, row by row"
    figure, axes = plt.subplots(1, 1 + len(METHODS), figsize=(13, 4), layout="constrained")
    axes[0].imshow(page.images[0])
    axes[0].set_title(f"question: {page.question}\nanswer: {page.answer}", fontsize=11)
    for panel, method in zip(axes[1:], METHODS, strict=True):
        with attach(model, method, BUDGET) as session:
            tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
            kept = session.kept()
        answer = processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        counts = np.bincount(np.concatenate([layer[layer >= 0].numpy() for layer in kept]), minlength=places[-1] + 1)
        panel.imshow(counts[places].reshape(CELLS, CELLS), norm=colours.norm, cmap=colours.cmap)
        word = "right" if answer == page.answer else "wrong"
        on_page = counts[places].sum() / heads
        panel.set_title(f"{method}: {answer} ({word})\n{on_page:.0f} of {BUDGET} entries on the page", fontsize=11)
    figure.colorbar(colours, ax=axes[1:], label=f"of {heads} KV heads, how many keep the cell", shrink=0.85)
    for panel in axes:
        panel.set_xticks([])
        panel.set_yticks([])
    figure.savefig(OUT, dpi=90)


if __name__ == "__main__":
    main()

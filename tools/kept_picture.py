"""Draw the README's first picture: a page for the reader, and how many KV heads keep each patch under three methods.

`python -m tools.kept_picture` writes docs/images/kept.png; run `mmkv-bench fetch model reader` before. The page is a
development page.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmkv_bench import attach
from mmkv_bench.config.schema import resolve_path
from mmkv_bench.reader.trials import pictures, trial

METHODS, BUDGET = ("snapkv", "keydiff", "mmshift"), "20%"
TASK, SPLIT, PAGE = "value", "dev", 4
OUT = Path(__file__).parents[1] / "docs" / "images" / "kept.png"


def main() -> None:
    folder = resolve_path("fetched://reader/pages")
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    model.eval()
    ((question, answer),) = trial(TASK, SPLIT, PAGE).turns
    (page,) = [Image.fromarray(one) for one in pictures(TASK, SPLIT, PAGE)]
    content = [{"type": "image", "image": page}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    places = np.flatnonzero(inputs["input_ids"][0].numpy() == model.config.image_token_id)
    side, length = round(len(places) ** 0.5), inputs["input_ids"].shape[1]
    assert side**2 == len(places), "one visual token a patch, row by row"
    text = model.config.text_config
    heads = text.num_hidden_layers * text.num_key_value_heads
    colours = ScalarMappable(Normalize(0, heads), "cividis")
    figure, axes = plt.subplots(1, 1 + len(METHODS), figsize=(13, 4), layout="constrained")
    axes[0].imshow(page)
    axes[0].set_title(f"{fill(question, 32)}\nanswer: {answer}", fontsize=11)
    for panel, method in zip(axes[1:], METHODS, strict=True):
        with attach(model, method, BUDGET) as session, torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
            kept = session.kept()
        given = processor.decode(tokens[0, length:], skip_special_tokens=True).strip()
        counts = np.bincount(np.concatenate([layer[layer >= 0].numpy() for layer in kept]), minlength=length)
        panel.imshow(counts[places].reshape(side, side), norm=colours.norm, cmap=colours.cmap)
        word = "right" if given == answer else "wrong"
        on_page, in_all = counts[places].sum() / heads, counts.sum() / heads
        panel.set_title(f"{method}: {given} ({word})\n{on_page:.0f} of {in_all:.0f} entries on the page", fontsize=11)
    figure.colorbar(colours, ax=axes[1:], label=f"of {heads} KV heads, how many keep the patch", shrink=0.85)
    for panel in axes:
        panel.set_xticks([])
        panel.set_yticks([])
    figure.savefig(OUT, dpi=90)


if __name__ == "__main__":
    main()

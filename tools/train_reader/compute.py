"""Losses and measures of the reader: glyphs of patches, and answers at their positions alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mmkv_bench.reader.render import CHARACTERS, FIRST_COLUMN, FIRST_ROW, SIGN
from mmkv_bench.reader.tokenizer_and_processor import IMAGE_ID

BLANK_WEIGHT = 0.25  # of a blank patch; about 70 of 100 are
SHARPNESS = 16.0  # logit of a patch that is exactly its sign's embedding, against one at the mean of all signs


class Reader(nn.Module):
    """A reader with what training adds: targets of patches, and a probe for the first column and row of a glyph."""

    signs: torch.Tensor
    centred: torch.Tensor
    model: Any

    def __init__(self, model: Any, words: Any, kind: str = "cpu"):
        super().__init__()
        self.kind = kind
        self.model = model
        table = model.get_input_embeddings().weight.detach().float()
        signs = table[[*words(" ", add_special_tokens=False).input_ids, *character_ids(words)]].clone()
        self.register_buffer("signs", signs, persistent=False)  # (1 + signs, width); row 0 is a space, for blank
        self.register_buffer("centred", signs - signs.mean(0), persistent=False)
        self.scale = SHARPNESS / float(self.centred.square().sum(1).mean())
        self.probe = nn.Linear(signs.shape[1], 2)

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return what the connector gives (pictures, patches, width), in bfloat16 products on a GPU, for uint8 pictures."""
        inputs = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        half = self.kind == "cuda" and self.training
        with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
            states = self.model.model.vision_model(pixel_values=inputs).last_hidden_state
            return self.model.model.connector(states)

    def patch_loss(self, features: torch.Tensor, labels: torch.Tensor, anchor: float) -> dict[str, torch.Tensor]:
        """Return the losses of patches, and the share of glyphs' patches that are read right.

        Args:
            anchor: weight of the distance to the sign's embedding; the cross entropy alone leaves the length free.
        """
        flat = features.flatten(0, 1).float()
        marks = labels.flatten().long()
        sign = marks & SIGN
        inked = (sign > 0).float()
        weight = inked + BLANK_WEIGHT * (1 - inked)
        total = weight.sum()
        logits = flat @ self.centred.T * self.scale
        entropy = (functional.cross_entropy(logits, sign, reduction="none") * weight).sum() / total
        flags = torch.stack([(marks & FIRST_COLUMN) > 0, (marks & FIRST_ROW) > 0], 1).float()
        where = functional.binary_cross_entropy_with_logits(self.probe(flat), flags, reduction="none").mean(1)
        where = (where * inked).sum() / inked.sum().clamp(min=1)
        far = ((flat - self.signs[sign]).square().sum(1) * weight).sum() / total / self.signs.square().sum(1).mean()
        right = (logits.argmax(1) == sign).float()
        return {
            "patches": entropy + 0.3 * where + anchor * far,
            "entropy": entropy.detach(),
            "where": where.detach(),
            "far": far.detach(),
            "read": ((right * inked).sum() / inked.sum().clamp(min=1)).detach(),
            "blank": ((right * (1 - inked)).sum() / (1 - inked).sum()).detach(),
        }

    def answer_logits(self, batch: dict[str, Any], features: torch.Tensor | None) -> torch.Tensor:
        """Return the logits (answer tokens, vocabulary) of a batch."""
        core = self.model.model
        states = core.text_model.get_input_embeddings()(batch["ids"])
        if features is not None:
            mask = (batch["ids"] == IMAGE_ID)[..., None].expand_as(states)
            states = states.masked_scatter(mask, features.to(states.dtype))
        hidden = core.text_model(inputs_embeds=states, use_cache=False).last_hidden_state
        return self.model.lm_head(hidden.flatten(0, 1)[batch["places"]]).float()

    def losses(self, batch: dict[str, Any], patch_weight: float) -> dict[str, torch.Tensor]:
        """Return the loss of a batch of chats with its parts: mean over answer tokens, and the patches' at its weight."""
        features = self.features(batch["pixels"]) if "pixels" in batch else None
        logits = self.answer_logits(batch, features)
        answer = functional.cross_entropy(logits, batch["targets"])
        parts = {"answer": answer.detach(), "exact": exact(logits, batch).float().mean()}
        loss = answer
        if features is not None:
            patches = self.patch_loss(features, batch["labels"], 0.0)
            loss = loss + patch_weight * patches["patches"]
            parts |= {"entropy": patches["entropy"], "read": patches["read"]}
        return parts | {"loss": loss}


def exact(logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Return, for each answer of a batch, whether the likeliest token is right at all of its positions."""
    wrong = (logits.argmax(1) != batch["targets"]).long()
    count = int(batch["answers"][-1]) + 1
    return torch.zeros(count, dtype=torch.long, device=logits.device).index_add_(0, batch["answers"], wrong) == 0


def moved(batch: dict[str, Any], device: str) -> dict[str, Any]:
    """Return a batch with its tensors on a device."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def halves(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a batch of chats as two, by rows; for a GPU whose memory is too small."""
    rows, length = batch["ids"].shape
    made = []
    for low, high in ((0, rows // 2), (rows // 2, rows)):
        inside = (batch["places"] >= low * length) & (batch["places"] < high * length)
        part = {"kind": batch["kind"], "ids": batch["ids"][low:high], "places": batch["places"][inside] - low * length}
        part |= {"targets": batch["targets"][inside], "answers": batch["answers"][inside] - batch["answers"][inside][0]}
        if "pixels" in batch:
            each = len(batch["pixels"]) // rows
            part |= {name: batch[name][low * each : high * each] for name in ("pixels", "labels")}
        made.append(part)
    return made


@torch.no_grad()
def evaluate(reader: Reader, batches: Iterable[dict[str, Any]], device: str, deadline: Any = None) -> dict[str, Any]:
    """Return exact match by task and form with numbers of samples, answer lengths, and what the tower reads.

    Args:
        deadline: function that says True when no further batch may be computed.
    """
    right: dict[str, list[int]] = defaultdict(list)
    read, blank = [], []
    lengths: dict[str, list] = defaultdict(list)
    reader.eval()
    for batch in batches:
        task, form, batch = batch["task"], batch["form"], moved(batch, device)
        features = reader.features(batch["pixels"]) if "pixels" in batch else None
        hits = exact(reader.answer_logits(batch, features), batch).tolist()
        if features is not None:
            found = reader.patch_loss(features, batch["labels"], 0.0)
            read.append(float(found["read"]))
            blank.append(float(found["blank"]))
        right[task] += hits
        right[f"{task}.{form}"] += hits
        lengths[task] += torch.bincount(batch["answers"]).tolist()
        if deadline is not None and deadline():
            break
    reader.train()
    mean = lambda values: round(sum(values) / len(values), 4) if values else None  # noqa: E731
    return {
        "exact": {name: mean(hits) for name, hits in sorted(right.items())},
        "n": {name: len(hits) for name, hits in sorted(right.items())},
        "tokens": {name: mean(values) for name, values in sorted(lengths.items())},
        "glyph_patches": mean(read),
        "blank_patches": mean(blank),
    }


def character_ids(words: Any) -> list[int]:
    """Return the tokens of the signs on pages, each of one token, in the order of `render.CHARACTERS`."""
    ids = [words(sign, add_special_tokens=False).input_ids for sign in CHARACTERS]
    assert all(len(one) == 1 for one in ids)
    return [one[0] for one in ids]

"""One training run as an object: losses, optimiser, curriculum and checkpoints.

Everything random in step t comes from generators seeded by (seed, t), and nothing depends on the clock: a resumed run
is bit-identical to an uninterrupted one on the same machine and thread count.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from mmkv_bench.errors import ConfigError
from mmkv_bench.tiny import splits
from mmkv_bench.tiny.vocabulary import ID, IMAGE_PAD, VOCAB_SIZE
from tools.train_tiny import vision
from tools.train_tiny.batches import PHASES, POOL_ROWS, Batch, draw_batch, reading_page
from tools.train_tiny.model import AUXILIARY_LAYER, HIDDEN, make_model
from tools.train_tiny.sequences import SOURCES

POOL_SIZE = 768  # tower outputs kept per pool row
READING_SHAPE = (16, 8)  # cells of a vision-step page
READING_PAGES = 4  # per vision step
AUXILIARY_WEIGHTS = (0.5, 0.25, 0.25, 0.15, 0.1)  # by curriculum phase
VISION_WEIGHT = 0.1
# Holds the tower's outputs to the scale of the other states, or the layers can hardly write to an image cell's stream.
SCALE_WEIGHT = 0.005
ADVANCE_AT = 0.95  # mean token accuracy over the last ADVANCE_WINDOW batches of the phase's own pages
ADVANCE_WINDOW = 30


@dataclass(frozen=True)
class Plan:
    """Lengths in steps: the vision tower alone, then the language model, whose last `real` steps read real images.

    deadlines: language step by which a phase starts even if the one before is not mastered.
    """

    vision: int = 3000
    language: int = 5000
    real: int = 1300
    warmup: int = 100
    rate: float = 2e-3
    pool_pages: int = 240
    deadlines: tuple[int, ...] = (0, 640, 1280, 1920, 2688)

    @property
    def steps(self) -> int:
        return self.vision + self.language


@dataclass
class Progress:
    """Where a run stands; all of it is stored in a checkpoint."""

    step: int = 0
    phase: int = 0
    phase_step: int = 0
    accuracies: list[float] = field(default_factory=list)  # of the phase's own batches, the last ADVANCE_WINDOW


class Trainer:
    """Trains the embedded model from random weights; `step()` until `done`."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.seed, self.plan, self.progress = seed, plan or Plan(), Progress()
        self.model = make_model(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        self.auxiliary = torch.nn.Parameter(torch.randn(SOURCES, HIDDEN, generator=generator) * 0.04)
        self.pool: torch.Tensor | None = None
        self._new_optimizer()

    @property
    def done(self) -> bool:
        return self.progress.step >= self.plan.steps

    def step(self) -> dict[str, float]:
        """One optimiser step; returns the numbers to show."""
        number = self.progress.step
        if number < self.plan.vision:
            shown = self._vision_step(number)
        else:
            if number == self.plan.vision:
                self._new_optimizer()  # moments of the vision stage do not fit the language stage
            shown = self._language_step(number - self.plan.vision)
        self.progress.step += 1
        return shown

    # ---- stage 1: the vision tower reads characters through the tied output head

    def _vision_step(self, number: int) -> dict[str, float]:
        rng = splits.generator("train", "vision", self.seed, number)
        pages = [reading_page(rng, *READING_SHAPE) for _ in range(READING_PAGES)]
        outputs = self._encode([page for page, _ in pages], *READING_SHAPE)
        rows = torch.from_numpy(np.concatenate([rows for _, rows in pages]))
        targets = torch.where(rows < VOCAB_SIZE, rows, rows - VOCAB_SIZE + ID["0"])
        # The tied embedding rests here: trained along, its rows grow so much that the language model learns slowly.
        logits = F.linear(outputs, self.model.lm_head.weight.detach())
        weights = torch.where(targets == ID[" "], 0.2, 1.0)
        loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
        loss = loss + SCALE_WEIGHT * outputs.pow(2).mean()
        share = number / self.plan.vision
        rate = self.plan.rate * min(1.0, (number + 1) / 30) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
        self._update(loss, rate)
        right = (logits.argmax(-1) == targets).float()
        hand, glyph = rows >= VOCAB_SIZE, (rows < VOCAB_SIZE) & (rows != ID[" "])
        scans = right[hand].mean().item() if hand.any() else float("nan")
        return {
            "loss": loss.item(),
            "glyphs": right[glyph].mean().item(),
            "scans": scans,
            "square": outputs.detach().pow(2).mean().item(),
        }

    def _encode(self, pages: list[np.ndarray], rows: int, columns: int) -> torch.Tensor:
        windows = torch.cat([vision.to_windows(page) for page in pages])
        return vision.to_cells(vision.encode(self.model.model.visual, windows), rows, columns)

    @torch.no_grad()
    def _fill_pool(self) -> torch.Tensor:
        """(POOL_ROWS, POOL_SIZE, hidden): outputs of the trained tower for training renderings of every character."""
        rng = splits.generator("train", "pool", self.seed)
        found: list[list[torch.Tensor]] = [[] for _ in range(POOL_ROWS)]
        for _ in range(self.plan.pool_pages):
            page, rows = reading_page(rng, 16, 16)
            outputs = self._encode([page], 16, 16)
            for row in np.unique(rows):
                found[row].append(outputs[torch.from_numpy(rows == row)])
        pool = torch.zeros(POOL_ROWS, POOL_SIZE, HIDDEN)
        for row, parts in enumerate(found):
            if parts:
                outputs = torch.cat(parts)
                pool[row] = outputs[torch.from_numpy(rng.integers(0, len(outputs), POOL_SIZE))]
        return pool

    # ---- stage 2: the language model, on cached tower outputs and at last on real images

    def _language_step(self, number: int) -> dict[str, float]:
        self._advance(number)
        real = number >= self.plan.language - self.plan.real
        batch = draw_batch(self.seed, number, self.progress.phase, real)
        draws = torch.Generator().manual_seed(splits.digest("language", self.seed, number) % 2**63)
        if real:
            outputs = self._encode(batch.pages, batch.rows, batch.columns)
        else:
            if self.pool is None:  # the tower rests in these steps, so a resumed run fills the same pool
                self.pool = self._fill_pool()
            rows = torch.from_numpy(batch.pool_rows)
            outputs = self.pool[rows, torch.randint(0, POOL_SIZE, rows.shape, generator=draws)]
        loss, numbers = self._losses(batch, outputs, draws)
        share = number / self.plan.language
        cosine = 0.5 * (1 + math.cos(math.pi * max(0.0, (share - 0.3) / 0.7)))
        rate = self.plan.rate * min(1.0, (number + 1) / self.plan.warmup) * (0.03 + 0.97 * cosine)
        self._update(loss, rate)
        if batch.phase == self.progress.phase:
            self.progress.accuracies = ([*self.progress.accuracies, numbers["accuracy"]])[-ADVANCE_WINDOW:]
        self.progress.phase_step += 1
        return {"phase": self.progress.phase, "drawn": batch.phase, "real": real, **numbers, "rate": rate}

    def _advance(self, number: int) -> None:
        at = self.progress
        if at.phase + 1 == len(PHASES):
            return
        mastered = len(at.accuracies) == ADVANCE_WINDOW and float(np.mean(at.accuracies)) > ADVANCE_AT
        late = number >= self.plan.deadlines[at.phase + 1]
        if mastered or late:
            self.progress = Progress(at.step, at.phase + 1)

    def _losses(
        self, batch: Batch, outputs: torch.Tensor, draws: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, float]]:
        ids, labels = torch.from_numpy(batch.ids), torch.from_numpy(batch.labels)[:, 1:]
        image = ids == IMAGE_PAD
        text_model = self.model.model.language_model
        embeddings = text_model.embed_tokens(ids).masked_scatter(image[..., None], outputs)
        result = text_model(
            inputs_embeds=embeddings,
            position_ids=torch.from_numpy(batch.positions),
            use_cache=False,
            output_hidden_states=True,
        )
        asked = labels >= 0
        logits = self.model.lm_head(result.last_hidden_state[:, :-1][asked])
        answer = F.cross_entropy(logits, labels[asked])
        # Keeps the output head reading the tower's outputs, or it drifts away from a tower at rest.
        some = torch.randint(0, len(outputs), (1024,), generator=draws)
        reading = F.cross_entropy(self.model.lm_head(outputs[some]), torch.from_numpy(batch.cells)[some])
        reading = reading + SCALE_WEIGHT * outputs[some].pow(2).mean()
        middle = result.hidden_states[AUXILIARY_LAYER]
        middle = middle * torch.rsqrt(middle.pow(2).mean(-1, keepdim=True) + 1e-6)
        cells = torch.from_numpy(batch.cell_sources)
        chosen = (cells > 0) | (torch.rand(cells.shape, generator=draws) < 0.1)
        places = F.cross_entropy(middle[image][chosen] @ self.auxiliary.T, cells[chosen])
        sources = torch.from_numpy(batch.sources)
        next_place = F.cross_entropy(middle[sources >= 0] @ self.auxiliary.T, sources[sources >= 0])
        weight = AUXILIARY_WEIGHTS[self.progress.phase]
        loss = answer + VISION_WEIGHT * reading + weight * (places + next_place)
        right = logits.argmax(-1) == labels[asked]
        rows = torch.ones_like(asked).masked_scatter(asked, right)
        return loss, {
            "loss": answer.item(),
            "places": places.item(),
            "next": next_place.item(),
            "accuracy": right.float().mean().item(),
            "exact": rows.all(1).float().mean().item(),
        }

    # ---- optimiser and checkpoints

    def _new_optimizer(self) -> None:
        parameters = list(self.model.parameters())
        decayed = [self.auxiliary] + [parameter for parameter in parameters if parameter.ndim > 1]
        groups = [
            {"params": decayed, "weight_decay": 0.02},
            {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.plan.rate, betas=(0.9, 0.98))

    def _update(self, loss: torch.Tensor, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*self.model.parameters(), self.auxiliary], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> Path:
        """Write folder/checkpoint-<step> (weights, optimiser, progress) and remove older ones; returns its path."""
        final = folder / f"checkpoint-{self.progress.step:06d}"
        partial = folder / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        weights = {name: tensor for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"}
        save_file({**weights, "auxiliary": self.auxiliary.detach()}, partial / "model.safetensors")
        torch.save(self.optimizer.state_dict(), partial / "optimizer.pt")
        state = {"seed": self.seed, "plan": asdict(self.plan), "progress": asdict(self.progress)}
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        for old in folder.glob("checkpoint-*"):
            if old != final:
                shutil.rmtree(old)
        return final

    def load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the same seed and plan; raises ConfigError otherwise."""
        state = json.loads((checkpoint / "state.json").read_text())
        mine = json.loads(json.dumps({"seed": self.seed, "plan": asdict(self.plan)}))
        theirs = {"seed": state["seed"], "plan": state["plan"]}
        if theirs != mine:
            raise ConfigError(f"{checkpoint} was made with {theirs}, this run asks for {mine}; use another --out")
        weights = load_file(checkpoint / "model.safetensors")
        self.auxiliary.data.copy_(weights.pop("auxiliary"))
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ConfigError(f"{checkpoint} does not hold this model: missing {missing}, unexpected {unexpected}")
        self.optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
        self.progress = Progress(**state["progress"])

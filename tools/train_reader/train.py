"""Train the reader within a time on one GPU (or a CPU, slowly); resumable, by seed.

python -m tools.train_reader.train --pack <folder> --fonts <folder> --out <folder> [--seconds 420] [--seed 1] [--device cuda]
    [--workers 15]

Phase 1 teaches tower and connector to map each patch to the embedding of its glyph's token. Phase 2 adds the language model's
LoRA and learns the answers. Both follow the clock: rates fall as time passes, and evaluation and saving end within `--seconds`.
Out gets tower.safetensors and the adapter (float16), log.jsonl, and state.pt, from which the same command goes on.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from mmkv_bench import devices
from mmkv_bench.reader.model import blank_reader, tower_weights
from tools.train_reader.compute import Reader, evaluate, halves, moved
from tools.train_reader.journal import BEGIN, Clock, Journal
from tools.train_reader.lora import add_lora, pairs
from tools.train_reader.pack import read_pack
from tools.train_reader.samples import MIX, Chats, Pages, Source, Trials, loader
from tools.train_reader.start import prepare_tower
from tools.train_reader.weights import load_reader, save_adapter, save_tower


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pack", type=Path, required=True, help="folder that tools.train_reader.pack wrote")
    parser.add_argument("--fonts", required=True, help="folder of training's typefaces")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="checkpoint to go on from, where it is not <out>/state.pt")
    parser.add_argument("--start-from", type=Path, help="folder of an earlier reader, whose weights begin phase 2")
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default=devices.kind_of("auto"))
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 1))
    parser.add_argument("--pages", type=int, default=64, help="pictures of 448 px in a batch of phase 1, about")
    parser.add_argument("--tokens", type=int, default=40000, help="tokens in a batch of phase 2, about")
    parser.add_argument("--kinds", nargs="+", default=list(MIX), help="forms that phase 2 learns from")
    parser.add_argument("--first", type=float, default=0.22, help="share of the time for phase 1")
    parser.add_argument("--last", type=float, default=0.14, help="share of the time for the final evaluation")
    parser.add_argument(
        "--rates", type=float, nargs=3, default=(2e-3, 5e-4, 2e-3), help="tower, tower in phase 2, LoRA"
    )
    parser.add_argument("--patch-weight", type=float, default=0.2)
    parser.add_argument(
        "--trials", type=int, nargs=2, default=(200, 500), help="samples a task while training, at the end"
    )
    parser.add_argument("--looks", type=int, default=2, help="evaluations on dev in phase 2")
    parser.add_argument(
        "--stop-after", type=float, help="leave after so many seconds, as if stopped (to test resuming)"
    )
    return parser.parse_args()


def rate(progress: float, step: int, warm: int) -> float:
    """Return the factor of the learning rate: a warm-up by steps, a cosine by time down to 0.03."""
    return min(1.0, (step + 1) / warm) * (0.03 + 0.97 * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


def main() -> None:
    """Train, save, evaluate."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    clock, device = Clock(args.seconds), args.device
    journal = Journal(args.out / "log.jsonl", clock, device)
    source = Source(args.pack, args.fonts, args.seed, args.tokens, tuple(args.kinds))
    base = read_pack(args.pack)
    reader, layers = build(args, source, base)
    tower = [*tower_weights(reader.model).values(), *reader.probe.parameters()]
    lora = [value for layer in layers.values() for value in (layer.down, layer.up)]
    optimizer = torch.optim.AdamW(
        [{"params": tower, "weight_decay": 0.01}, {"params": lora, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.98),
        fused=device == "cuda",
    )
    place = args.state or args.out / "state.pt"
    done: dict[str, Any] = {"first": 0, "second": 0, "looks": 0, "began": None}
    if args.start_from:
        done["first"] = -1
    if place.exists():
        saved = torch.load(place, weights_only=True, map_location=device)
        done, clock.earlier = saved["done"], saved["seconds"]
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for value, kept in zip([*tower, *lora], saved["weights"], strict=True):
                value.copy_(kept)
    name = devices.at(device).name()
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(args).items()
        if key not in ("pack", "fonts", "out", "state")
    }
    journal.line(event="begin", device_name=name, torch=torch.__version__, done=done, settings=settings)

    def keep() -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "done": done,
            "seconds": clock.now(),
            "optimizer": optimizer.state_dict(),
            "weights": [v.detach() for v in (*tower, *lora)],
        }
        torch.save(state, place.with_suffix(".part"))
        place.with_suffix(".part").replace(place)
        save_tower(reader.model, args.out)
        save_adapter(pairs(layers), args.out)

    def stopped() -> bool:
        return args.stop_after is not None and time.perf_counter() - BEGIN > args.stop_after

    end_first = 0.0 if args.start_from else args.first * args.seconds
    end_second = args.seconds * (1 - args.last)
    if done["first"] >= 0 and clock.now() < end_first and not done["second"]:
        first_phase(reader, optimizer, tower, source, args, done, clock, journal, end_first, stopped)
        keep()
    if not stopped():
        done["began"] = done["began"] or clock.now()
        second_phase(reader, optimizer, tower, lora, source, args, done, clock, journal, end_second, stopped, keep)
        keep()
    if not stopped():
        final(args, source, base, journal, clock, reader)


def build(args: argparse.Namespace, source: Source, base: Any) -> tuple[Reader, dict[str, Any]]:
    """Return the reader on its device, and its LoRA layers by name."""
    words = source.words()
    model = blank_reader(base)
    prepare_tower(model, args.seed)
    reader = Reader(model, words, args.device)
    layers = add_lora(model, torch.bfloat16 if args.device == "cuda" else torch.float32)
    if args.start_from:
        from safetensors.torch import load_file

        kept, adapter = (
            load_file(args.start_from / "tower.safetensors"),
            load_file(args.start_from / "adapter_model.safetensors"),
        )
        with torch.no_grad():
            for name, value in tower_weights(model).items():
                value.copy_(kept[name])
            for name, layer in layers.items():
                layer.down.copy_(adapter[f"base_model.model.{name}.lora_A.weight"])
                layer.up.copy_(adapter[f"base_model.model.{name}.lora_B.weight"])
    return reader.to(args.device).train(), layers


def first_phase(reader, optimizer, tower, source, args, done, clock, journal, end, stopped) -> None:
    """Teach the tower glyphs until `end` seconds."""
    begin, shown = clock.now() if not done["first"] else 0.0, clock.now()
    batches = iter(loader(Pages(source, args.pages), args.workers, done["first"]))
    while clock.now() < end and not stopped():
        asked = time.perf_counter()
        batch = moved(next(batches), args.device)
        journal.wait += time.perf_counter() - asked
        factor = rate((clock.now() - begin) / (end - begin), done["first"], 60)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = args.rates[0] * factor, 0.0
        journal.span()
        parts = reader.patch_loss(reader.features(batch["pixels"]), batch["labels"], 0.1)
        parts["patches"].backward()
        torch.nn.utils.clip_grad_norm_(tower, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        journal.span()
        journal.add(parts)
        done["first"] += 1
        journal.steps, journal.samples = journal.steps + 1, journal.samples + len(batch["pixels"])
        if clock.now() - shown > 8 or done["first"] in (1, 20):
            shown = clock.now()
            journal.write(phase=1, step=done["first"], factor=round(factor, 3))
    journal.write(phase=1, step=done["first"], event="end of phase 1")


def second_phase(reader, optimizer, tower, lora, source, args, done, clock, journal, end, stopped, keep) -> None:
    """Learn answers until `end` seconds, with looks at dev in between."""
    shown = kept = clock.now()
    batches = iter(loader(Chats(source), args.workers, done["second"]))
    span = end - done["began"]
    while clock.now() < end and not stopped():
        asked = time.perf_counter()
        batch = moved(next(batches), args.device)
        journal.wait += time.perf_counter() - asked
        progress = (clock.now() - done["began"]) / span
        factor = rate(progress, done["second"], 40)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = (
            args.rates[1] * factor,
            args.rates[2] * factor,
        )
        journal.span()
        backward(reader, optimizer, batch, args.patch_weight, journal)
        norm = torch.nn.utils.clip_grad_norm_(lora, 1.0)
        torch.nn.utils.clip_grad_norm_(tower, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        journal.span()
        journal.add({"norm": norm})
        done["second"] += 1
        journal.steps, journal.samples = journal.steps + 1, journal.samples + len(batch["ids"])
        journal.answers += int(batch["answers"].max()) + 1 if args.device == "cpu" else 0
        if clock.now() - shown > 8 or done["second"] in (1, 5, 20):
            shown = clock.now()
            counters = journal.device.memory
            memory = round(counters.peak().allocated / 1e9, 1) if counters else None
            journal.write(phase=2, step=done["second"], factor=round(factor, 3), peak_gb=memory)
        if clock.now() - kept > 60:
            keep()
            kept = clock.now()
        if done["looks"] < args.looks and progress > (done["looks"] + 1) / (args.looks + 1):
            done["looks"] += 1
            journal.write(phase=2, step=done["second"], factor=round(factor, 3))
            trials = Trials(source, "dev", args.trials[0])
            begin = clock.now()
            measured = evaluate(reader, loader(trials, args.workers), args.device, lambda: clock.now() > end)
            journal.line(
                event="look", split="dev", step=done["second"], seconds=round(clock.now() - begin, 1), **measured
            )
            journal.clear()
    journal.write(phase=2, step=done["second"], event="end of phase 2")


def backward(reader, optimizer, batch: dict[str, Any], patch_weight: float, journal: Journal) -> None:
    """Add a batch's gradients; in two halves where it does not fit the GPU's memory."""
    try:
        parts = reader.losses(batch, patch_weight)
        parts["loss"].backward()
        journal.add(parts, batch["kind"])
    except torch.OutOfMemoryError:
        optimizer.zero_grad(set_to_none=True)
        parts = None
        journal.device.release()
        for half in halves(batch):
            parts = reader.losses(half, patch_weight)
            (parts["loss"] / 2).backward()
            journal.add(parts, batch["kind"])
        journal.line(event="out of memory: halved", kind=batch["kind"], shape=list(batch["ids"].shape))


def final(args, source, base, journal, clock, reader) -> None:
    """Evaluate what was saved, loaded as users do, in float32, on dev and test; stop when the time is over."""
    device = args.device
    reader.model = None
    fresh = Reader(load_reader(args.out, base), source.words(), device).to(device)
    files = ("tower.safetensors", "adapter_model.safetensors", "adapter_config.json")
    journal.line(event="saved", bytes={name: (args.out / name).stat().st_size for name in files})
    for share, split in ((0.5, "test"), (1.0, "dev")):
        begin = clock.now()
        until = begin + share * (args.seconds - 2 - begin)
        batches = loader(Trials(source, split, args.trials[1]), args.workers)
        measured = evaluate(fresh, batches, device, lambda until=until: clock.now() > until)
        journal.line(event="final", split=split, seconds=round(clock.now() - begin, 1), **measured)
    journal.line(
        event="end", note="glyph_patches: share of patches with ink whose sign the tower reads; float32 weights"
    )


if __name__ == "__main__":
    main()

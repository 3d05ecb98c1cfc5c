"""Train a LoRA that makes a small language model read the English tasks, on text, answers alone; resumable, by seed.

python -m tools.train_adapter.train <model folder> <gguf file> <out> [--documents 400] [--seed 1]

Documents of half the size come first, those of the tasks' size (`1k`) in the last two fifths. A step is two documents, of the
tasks in turn. All questions of a document share its tokens: a block mask hides them from each other, and each begins at the
position after the document.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch.nn import functional

from mmkv_bench.datasets.tasks.english.documents import TASKS, document, prompt

QUESTIONS = {"records": 8, "needles": 4, "passages": 4}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def example(tokenizer, task: str, number: int, size: str, split: str = "train"):
    """Return ids, positions, block mask and labels of a document with its questions; -100 where nothing is learnt."""
    page = document(task, split, number, size)
    mark = "\x00"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt(page.context, mark)}], tokenize=False, add_generation_prompt=True
    )
    shared, tail = text.split(mark)
    encode = lambda part: tokenizer(part, add_special_tokens=False).input_ids  # noqa: E731
    # the boundary of tokens is the one of the whole prompt: the common beginning of two prompts
    whole = [encode(shared + question + tail) for question, _ in page.questions[: QUESTIONS[task]]]
    common = next(place for place in range(len(whole[0])) if any(ids[place] != whole[0][place] for ids in whole))
    ids, positions, block, labels = list(whole[0][:common]), list(range(common)), [0] * common, [-100] * common
    for group, (one, (_, answer)) in enumerate(zip(whole, page.questions, strict=False), 1):
        question, reply = one[common:], [*encode(answer), tokenizer.eos_token_id]
        ids += question + reply
        positions += range(common, common + len(question) + len(reply))
        block += [group] * (len(question) + len(reply))
        labels += [-100] * len(question) + reply
    return torch.tensor(ids), torch.tensor(positions), torch.tensor(block), torch.tensor(labels)


def loss_of(model, tokenizer, task: str, number: int, size: str):
    """Mean cross entropy of the answers' tokens of one training document."""
    ids, positions, block, labels = example(tokenizer, task, number, size)
    order = torch.arange(len(ids))
    mask = (order[:, None] >= order[None]) & ((block[None] == 0) | (block[:, None] == block[None]))
    hidden = model.base_model.model.model(
        input_ids=ids[None], position_ids=positions[None], attention_mask=mask[None, None], use_cache=False
    ).last_hidden_state[0]
    places = torch.nonzero(labels[1:] != -100)[:, 0]
    logits = model.base_model.model.lm_head(hidden[places])
    return functional.cross_entropy(logits.float(), labels[1:][places])


def write(model, folder: Path) -> None:
    """Write the adapter in float16, with sorted targets and without the place of its base, as it is committed."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file({name: value.half() for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    settings = json.loads(config.read_text())
    settings |= {"base_model_name_or_path": None, "target_modules": sorted(settings["target_modules"])}
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Train, write the adapter and a line per step; continue where an interrupted training stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("gguf")
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--per-step", type=int, default=2)
    args = parser.parse_args()
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.folder, gguf_file=args.gguf)
    base = AutoModelForCausalLM.from_pretrained(args.folder, gguf_file=args.gguf, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, lora_dropout=0.0, task_type="CAUSAL_LM")
    )
    model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.rate, weight_decay=0.0)
    steps = args.documents // args.per_step
    args.out.mkdir(parents=True, exist_ok=True)
    state, done = args.out / "state.pt", 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        done = saved["steps"]
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for weight, value in zip(weights, saved["weights"], strict=True):
                weight.copy_(value)
    tasks = list(TASKS)
    for step in range(done, steps):
        begin = time.process_time()
        warm = min(1.0, (step + 1) / 10)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        losses = {}
        for number in range(step * args.per_step, (step + 1) * args.per_step):
            task = tasks[number % len(tasks)]
            loss = loss_of(model, tokenizer, task, number, "half" if number < 0.6 * args.documents else "1k")
            (loss / args.per_step).backward()
            losses[task] = round(float(loss), 4)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        line = {"step": step, "losses": losses, "cpu_s": round(time.process_time() - begin, 1)}
        with (args.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        if step % 20 == 19 or step == steps - 1:
            torch.save(
                {"steps": step + 1, "optimizer": optimizer.state_dict(), "weights": [w.detach() for w in weights]},
                state,
            )
            write(model, args.out / "adapter")


if __name__ == "__main__":
    main()

"""Pack SmolLM2's GGUF file for training: the same quantised weights under transformers' names, in small files.

python -m tools.train_reader.pack <gguf file> <out>

A GGUF file takes 12 s to parse and has one size; a machine with a GPU is paid by the second, and what it is sent may be limited.
Out gets files of weights below 17 MB, tokenizer.json (with the reader's tokens) and config.json. Checked against transformers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

PART = 16_000_000
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def stock_name(name: str) -> str:
    """Return transformers' name of a tensor of the GGUF file."""
    if name.startswith("blk."):
        _, number, part, _ = name.split(".")
        return f"model.layers.{number}.{LAYER[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def main() -> None:
    """Write the pack; rows are put in transformers' order, which is found by comparing them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from mmkv_bench.reader.tokenizer_and_processor import tokenizer

    args.out.mkdir(parents=True, exist_ok=True)
    base = AutoModelForCausalLM.from_pretrained(str(args.gguf.parent), gguf_file=args.gguf.name, dtype=torch.float32)
    weights, size = base.state_dict(), 0
    parts: list[dict[str, torch.Tensor]] = [{}]
    for tensor in GGUFReader(args.gguf).tensors:
        name, raw = stock_name(tensor.name), np.array(tensor.data)
        expected, values = weights[name].numpy(), dequantize(raw, tensor.tensor_type)
        if not np.array_equal(values, expected):
            rows = {row.tobytes(): place for place, row in enumerate(values)}
            raw = raw[[rows[row.tobytes()] for row in expected]]
            assert np.array_equal(dequantize(raw, tensor.tensor_type), expected), name
        for place, piece in enumerate(np.array_split(raw, max(1, -(-raw.nbytes // (PART // 2))))):
            if size + piece.nbytes > PART:
                parts, size = [*parts, {}], 0
            parts[-1][f"{name}|{tensor.tensor_type.name}|{place}"] = torch.from_numpy(np.ascontiguousarray(piece))
            size += piece.nbytes
    for number, part in enumerate(parts):
        save_file(part, args.out / f"base-{number:02d}.safetensors")
    (args.out / "config.json").write_text(json.dumps(base.config.to_dict(), indent=1, default=str) + "\n")
    (args.out / "tokenizer.json").write_text(tokenizer(args.gguf).backend_tokenizer.to_str())
    same = all(torch.equal(value, weights[name]) for name, value in read_pack(args.out)[1].items())
    print(
        f"{len(parts)} parts, {sum(f.stat().st_size for f in args.out.iterdir()) / 1e6:.1f} MB, weights equal: {same}"
    )


def read_pack(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the configuration and the weights (float32, by transformers' names) of a pack."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize
    from safetensors import safe_open

    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in sorted(folder.glob("base-*.safetensors")):
        with safe_open(file, "pt") as archive:
            for key in archive.keys():  # noqa: SIM118 - no mapping
                name, kind, place = key.split("|")
                data = dequantize(archive.get_tensor(key).numpy(), GGMLQuantizationType[kind])
                pieces.setdefault(name, []).append((int(place), torch.from_numpy(np.array(data))))
    weights = {
        name: torch.cat([piece for _, piece in sorted(found, key=lambda one: one[0])]) for name, found in pieces.items()
    }
    return json.loads((folder / "config.json").read_text()), weights


if __name__ == "__main__":
    main()

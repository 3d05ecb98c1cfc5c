"""Round the four-bit weights of a GGUF file again, in blocks with other borders, and write the weights as a folder.

    python -m tools.requantise fetched://smollm2_135m_q4_1/SmolLM2-135M-Instruct.Q4_1.gguf folder

A result that changes with these weights depends on the file's rounding and not on the model. Blocks of 32 weights begin
16 columns later; gguf's Q4_1 rounds and dequantises. Other tensors (norms, the embedding in eight bits) do not change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

OFFSET = 16  # columns; half of a Q4_1 block


def rounded(weight):
    """Return a `[out, in]` float32 array after one round trip through Q4_1 with blocks shifted by `OFFSET` columns."""
    import numpy as np
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import dequantize, quantize

    shifted = np.ascontiguousarray(np.roll(weight, -OFFSET, axis=1))
    return np.roll(dequantize(quantize(shifted, Kind.Q4_1), Kind.Q4_1), OFFSET, axis=1)


def main() -> None:
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from mmkv_bench.config.schema import resolve_path
    from mmkv_bench.models.gguf import tensor_types

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=resolve_path, help="GGUF file with Q4_1 tensors, a path as in model.path")
    parser.add_argument("folder", type=Path, help="where the model goes, as safetensors in float32")
    given = parser.parse_args()
    file = Path(given.file)
    tensor_types(file)  # refuses what is no GGUF file of a text model
    place, here = str(file.parent), {"gguf_file": file.name, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(place, dtype="float32", **here)
    changes = []
    for layer in model.get_decoder().layers:
        for weight in (one for one in layer.parameters() if one.ndim == 2):
            before = weight.detach().numpy().copy()
            weight.data.copy_(weight.data.new_tensor(rounded(before)))
            changes.append(float(((weight.detach().numpy() - before) ** 2).mean() / (before**2).mean()))
    given.folder.mkdir(parents=True, exist_ok=True)
    tensors = model.state_dict()
    del tensors["lm_head.weight"]  # tied to the embedding
    state = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(state, given.folder / "model.safetensors", metadata={"format": "pt"})
    config = AutoConfig.from_pretrained(place, **here)
    config.architectures, config.dtype = [type(model).__name__], "float32"
    config.save_pretrained(given.folder)
    AutoTokenizer.from_pretrained(place, **here).save_pretrained(given.folder)
    mean = (sum(changes) / len(changes)) ** 0.5
    print(f"{len(changes)} matrices rounded again, by {mean:.1%} of their size (root mean square) -> {given.folder}")


if __name__ == "__main__":
    main()

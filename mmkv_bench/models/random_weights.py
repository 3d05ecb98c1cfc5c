"""Build a model of a checkpoint's true shape with random weights, to test speed, memory and code without a download.

A weight is computed from an integer hash of the parameter's name, the entry's index and `SEED`, so weights are the same on
every device. A lower precision has the rounded float32 values.

The scales make a random model's cache behave like a trained model's: activations stay finite, each query attends to few keys
(so eviction changes the logits), and answers depend on the prompt.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.families.facts import model_facts, text_model

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

SEED = 0
SCHEME = 1
"""Version of the rules in this file; part of a random model's fingerprint."""

QUERY_KEY_GAIN = 1.8
"""Standard deviation of the text model's queries and keys; the deviation of a score q k / sqrt(head_dim) is the square."""
SMALL = 0.02
"""Standard deviation of embeddings and of parameters without inputs; small compared with the layers' outputs, so that a model
with tied embeddings does not just repeat the last token."""

_CHUNK = 1 << 22
_MASK_24 = (1 << 24) - 1


def build(
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    device_map: Any = None,
    generation: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Build the model of a transformers config. Each weight is computed on its final device.

    Args:
        config: transformers config of the whole model.
        device: device of all weights, unless `device_map` (accelerate's) spreads them.
        generation: keys of generation_config.json, such as the ids that end an answer.

    Raises:
        ConfigError: the device map puts weights on disk, or has no device for some weights.
    """
    from accelerate import dispatch_model, init_empty_weights
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    classes = AutoModelForImageTextToText if model_facts(config).multimodal else AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):  # buffers (RoPE frequencies) are computed, weights take no memory
        model = classes.from_config(copy.deepcopy(config), dtype=dtype)
    model.tie_weights()
    device_by_module = _places(device_map, model, dtype)
    _fill(model, lambda name: device if device_by_module is None else _place(device_by_module, name))
    if device_by_module is None:
        model = model.to(device)
    else:
        model = dispatch_model(model, device_by_module)
    model.generation_config = GenerationConfig(**dict(generation or {}), do_sample=False)
    return model.eval()


def values(name: str, count: int, device: torch.device, start: int = 0) -> Tensor:
    """Return `count` float32 entries of a parameter's random values, from entry `start` on.

    Entries are uniform on [-sqrt(3), sqrt(3)), so their standard deviation is 1. An entry is a 32-bit integer hash of its index,
    keyed by the parameter's `name` and `SEED`.
    """
    import torch

    first_key, second_key = _keys(name)
    x = torch.arange(start, start + count, dtype=torch.int32, device=device)
    x = _mix(x.add_(first_key)).bitwise_xor_(second_key)
    x = _mix(x)
    fraction = (x >> 8).bitwise_and_(_MASK_24).to(torch.float32).div_(1 << 24)
    return fraction.mul_(2 * math.sqrt(3)).sub_(math.sqrt(3))


def _mix(x: Tensor) -> Tensor:
    """Hash int32 values in place, bijectively. Multiplications wrap around."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def _keys(name: str) -> tuple[int, int]:
    digest = hashlib.sha256(f"{SEED}/{name}".encode()).digest()
    first_key, second_key = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    return first_key, second_key


def _fill(model: nn.Module, device_of: Any) -> None:
    """Replace every parameter by one with random values on `device_of(name)`. Tied parameters stay tied."""
    import torch

    text_module_ids = {id(module) for module in text_model(model).modules()}
    parameters_by_id: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for key, old_parameter in list(module._parameters.items()):
            if old_parameter is None:
                continue
            if id(old_parameter) not in parameters_by_id:
                name = f"{prefix}.{key}" if prefix else key
                new_parameter = torch.empty(old_parameter.shape, dtype=old_parameter.dtype, device=device_of(name))
                _set(new_parameter, name, *_rule(module, prefix, key, old_parameter, id(module) in text_module_ids))
                parameters_by_id[id(old_parameter)] = torch.nn.Parameter(new_parameter, requires_grad=False)
            module._parameters[key] = parameters_by_id[id(old_parameter)]


def _rule(module: nn.Module, prefix: str, key: str, parameter: Tensor, in_text: bool) -> tuple[float, float]:
    """Return mean and standard deviation of a parameter's random entries.

    prefix, key: name of `module` in the model, and of the parameter in `module`. in_text: `module` belongs to the text model.
    """
    import torch

    module_name = prefix.rpartition(".")[2]
    if "Norm" in type(module).__name__:
        # Normalised queries and keys (Qwen3) take their scale from the norm that follows the projection.
        return (
            QUERY_KEY_GAIN if in_text and module_name in ("q_norm", "k_norm") else 1.0 if key == "weight" else 0.0
        ), 0.0
    if key == "bias":
        return 0.0, 0.0
    if isinstance(module, torch.nn.Embedding) or key != "weight" or parameter.ndim < 2:
        scale = getattr(getattr(module, "config", None), "layer_scale_init_value", None)
        return (float(scale), 0.0) if key.startswith("lambda") and scale else (0.0, SMALL)
    gain = QUERY_KEY_GAIN if in_text and module_name in ("q_proj", "k_proj") else 1.0
    return 0.0, gain / math.sqrt(parameter[0].numel())


def _set(parameter: Tensor, name: str, mean: float, deviation: float) -> None:
    if not deviation:
        parameter.fill_(mean)
        return
    flat_view = parameter.view(-1)
    for start in range(0, flat_view.numel(), _CHUNK):
        chunk = flat_view[start : start + _CHUNK]
        chunk.copy_(values(name, chunk.numel(), parameter.device, start).mul_(deviation).add_(mean))


def _places(device_map: Any, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Any] | None:
    """Return accelerate's device map as module name -> device, with `auto` and similar names resolved; None without a map."""
    if device_map is None:
        return None
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if isinstance(device_map, str) and device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        unsplit = list(getattr(model, "_no_split_modules", None) or [])
        memory_by_device = None
        if device_map != "sequential":
            memory_by_device = get_balanced_memory(
                model, dtype=dtype, no_split_module_classes=unsplit, low_zero=device_map == "balanced_low_0"
            )
        device_map = infer_auto_device_map(
            model, max_memory=memory_by_device, no_split_module_classes=unsplit, dtype=dtype
        )
    elif isinstance(device_map, Mapping):
        device_map = {str(name): place for name, place in device_map.items()}
    else:
        device_map = {"": device_map}
    if "disk" in device_map.values():
        raise ConfigError(
            "model.device_map puts weights on disk, which random weights do not support; use more devices, "
            "model.dtype=bfloat16, or model.layers=<n>"
        )
    return device_map


def _place(places: Mapping[str, Any], name: str) -> Any:
    """Return the device of a parameter's innermost module in the map; raise ConfigError if the map has no such module."""
    while name not in places:
        if not name:
            raise ConfigError("model.device_map has no device for some weights; name every module, or write auto")
        name = name.rpartition(".")[0]
    return places[name]

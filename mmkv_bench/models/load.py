"""Load a model from a folder or the hub with AutoProcessor and AutoModel, as any user would; safetensors only."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench import devices
from mmkv_bench.devices.requirements import check_meant
from mmkv_bench.errors import ConfigError, GenerationTimeout, MMKVError, UnsupportedError, out_of_memory
from mmkv_bench.families.facts import ModelFacts, model_facts, text_model
from mmkv_bench.families.registry import apply_limits, families, family
from mmkv_bench.models import files, gguf
from mmkv_bench.models.adapter import merged
from mmkv_bench.models.chat_template import Template, check_media
from mmkv_bench.models.files import cached_folder
from mmkv_bench.signals import time_limit

if TYPE_CHECKING:
    import torch
    from torch import nn


TEMPLATE_S = 20.0


@dataclass
class LoadedModel:
    """A model in eval mode with everything needed to prompt it.

    `processor` is the tokenizer for text models. `device` is the device of the inputs. `prompt_format` is the chat template's
    rendering of one user message `chat_template.PROBE`.
    """

    name: str
    model: nn.Module
    processor: Any
    tokenizer: Any
    family: ModelFacts
    device: torch.device
    dtype: str
    prompt_format: str | None = None


def load_config(path: str, revision: str | None = None) -> Any:
    """Return the transformers config of a folder or hub id.

    Raises:
        ConfigError: the folder or repository does not exist, or the config cannot be read.
        UnsupportedError: the family, backbone or layer type is not supported, or the weights need a class that transformers
            does not have.
    """
    try:
        config = _auto_config(path, revision)
    except MMKVError:
        raise
    except Exception as error:  # a config may say anything, and libraries raise what they like
        if out_of_memory(error):  # no fault of the folder
            raise
        raise ConfigError(files.sentence(path, revision, error)) from error
    model_facts(config)
    # A checkpoint may have the model_type of a text model although its repository's code adds a vision tower (LLaVA-NeXT's does).
    # Loaded as that text model it would silently ignore images.
    import transformers

    classes = list(getattr(config, "architectures", None) or [])
    if (
        classes
        and family(config.model_type).classes_version is None
        and not any(hasattr(transformers, name) for name in classes)
    ):
        raise UnsupportedError(
            f"{path} has weights for {classes[0]}, a class that transformers does not have, and code of repositories is "
            "never run; give a checkpoint in Hugging Face format (for LLaVA: one of llava-hf; `python -m "
            "tools.llava_video_weights` of this project's repository converts a folder of LLaVA-Video; see docs/models.md)"
        )
    return config


def load_model(
    name: str,
    path: str,
    *,
    revision: str | None = None,
    adapter: str | None = None,
    tokenizer: str | None = None,
    dtype: str = "auto",
    attention: str = "sdpa",
    device: str = "auto",
    device_map: Any = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    video_max_pixels: int | None = None,
    frames: int | None = None,
    template: str | None = None,
) -> LoadedModel:
    """Load weights and processor.

    Args:
        path: local folder, GGUF file or hub id.
        adapter: folder of a LoRA adapter (see `models.adapter`).
        tokenizer: folder of a text model's tokenizer, if it is not in `path`.
        template: text of a chat template that replaces a text model's.
        dtype: float32, bfloat16, float16, or auto for the checkpoint's dtype.
        attention: implementation to wrap (`stock`); the vision tower keeps transformers' default.
        device: auto, cpu or cuda.
        device_map: device map of accelerate, instead of `device`.
        min_pixels, max_pixels, video_max_pixels, frames: see `families.registry.apply_limits`.

    Raises:
        ConfigError, UnsupportedError: see `load_config`; also no CUDA device, weights without safetensors, or a limit that
            the family's processor does not have.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    config = load_config(path, revision)
    where = device_of(device)
    multimodal = model_facts(config).multimodal
    if template is not None and multimodal:
        raise UnsupportedError(
            f"{name}: model.template is for text models only, but this model takes images; leave it out"
        )
    folder, file = gguf.location(path)
    common = {"revision": revision, "trust_remote_code": False, **file}
    try:
        if tokenizer is None:
            processor = (AutoProcessor if multimodal else AutoTokenizer).from_pretrained(folder, **common)
        else:
            processor = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False, local_files_only=True)
        if template is not None:
            processor.chat_template = template
        apply_limits(processor, min_pixels, max_pixels, video_max_pixels, frames)
        loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
        model = loader.from_pretrained(
            folder,
            **common,
            **({"config": config} if file else {}),
            use_safetensors=None if file else True,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map=device_map,
            disable_mmap=not file and where.type == "cpu" and _fits(path, revision),  # dequantised weights are copies
        )
        model = model if adapter is None else merged(model, adapter)
    except (MMKVError, MemoryError):
        raise
    except ImportError as error:  # a package that one family's processor needs; the message names it
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from error
    except Exception as error:  # a config may say anything, and libraries raise what they like
        if out_of_memory(error):  # no fault of the folder
            raise
        raise ConfigError(files.sentence(path, revision, error)) from error
    if device_map is None:
        model = model.to(where)
    return set_up(name, model, processor, config, attention, where, device_map)


def set_up(
    name: str, model: Any, processor: Any, config: Any, attention: str, where: torch.device, device_map: Any
) -> LoadedModel:
    """Prepare a model and its processor for prompts: eval mode, and the wrapped attention in the text layers.

    Raises:
        UnsupportedError: the chat template does not render prompts correctly; see `chat_template.Template.of`.
    """
    model = model.eval()
    alone = model.config is text_model(model).config
    model.set_attn_implementation(stock(attention) if alone else {"text_config": stock(attention)})
    tokenizer = getattr(processor, "tokenizer", processor)
    try:
        with time_limit(TEMPLATE_S, "the chat template"):
            template = Template.of(processor)
            check_media(name, processor)
    except GenerationTimeout as error:
        raise UnsupportedError(
            f"{name}: the chat template does not render a message of one word within {TEMPLATE_S:g} seconds; put the "
            "publisher's template (chat_template.jinja) into the model's folder"
        ) from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from error
    if device_map is not None:
        where = model.get_input_embeddings().weight.device
    family = model_facts(config, tokenizer)
    dtype = str(model.dtype).removeprefix("torch.")
    return LoadedModel(name, model, processor, tokenizer, family, where, dtype, template.probe)


def _fits(path: str, revision: str | None) -> bool:
    """Tell whether the weights and one more shard fit into free memory, so that the weights can be read instead of memory-mapped.

    Mapped weights would change with their file.
    """
    import psutil

    folder = Path(path) if Path(path).is_dir() else cached_folder(path, revision)
    sizes = [file.stat().st_size for file in folder.rglob("*.safetensors")] if folder else []
    return bool(sizes) and sum(sizes) + max(sizes) < psutil.virtual_memory().available


def stock(attention: str) -> str:
    """Return the transformers attention to use outside a compression session. Inside, the session runs the requested attention.

    For flash-attn this is sdpa, because transformers would look for its own kernels.
    """
    return "sdpa" if attention == "flash_attention_2" else attention


def device_of(setting: str) -> torch.device:
    """Return the device that `model.device` names; auto is cuda if the machine has a CUDA device.

    Raises:
        ConfigError: the setting is cuda, but the machine has no CUDA device; see also `check_meant`.
    """
    check_meant(setting)
    kind = devices.kind_of(setting)
    if setting == "cuda" and kind != setting:
        raise ConfigError("model.device=cuda, but this machine has no CUDA device; allowed: cpu, auto")
    return devices.KINDS[kind].here()


def _auto_config(path: str, revision: str | None) -> Any:
    from transformers import AutoConfig

    if gguf.is_gguf(path):
        gguf.tensor_types(Path(path))
        return AutoConfig.for_model(**copy.deepcopy(gguf.config_values(Path(path))))
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except ValueError as error:
        ours = [one for one in families().values() if one.classes_version is not None]
        named = [one for one in ours if one.model_type in str(error)]  # the error names the unknown model_type
        if not named:
            raise
    named[0].register_classes()
    return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)


SMALL = 50_000_000
"""Number of parameters below which a model on a CPU gets one thread."""


def quiet_libraries() -> None:
    """Reduce the logging of the Hugging Face libraries, whether they are imported already or later."""
    for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("TRANSFORMERS_VERBOSITY", "error")):
        os.environ.setdefault(name, value)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry; we report the last error
    if "transformers" in sys.modules:
        quiet_transformers()


def quiet_transformers() -> None:
    """Import transformers and reduce its logging."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def threads_for(loaded: LoadedModel, setting: int | None) -> int:
    """Return the number of threads of a run: `model.threads` if set, else `OMP_NUM_THREADS` if set, else torch's default.

    Without these settings, a small model on a CPU gets one thread.
    """
    import torch

    if setting is not None:
        return setting
    decided = "OMP_NUM_THREADS" in os.environ or devices.at(loaded.device).kind != "cpu"
    small = sum(parameter.numel() for parameter in loaded.model.parameters()) < SMALL
    return 1 if small and not decided else torch.get_num_threads()


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Set torch's number of threads inside the block, and restore it afterwards for a caller in Python."""
    import torch

    earlier = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(earlier)

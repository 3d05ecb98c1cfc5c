"""Load a model from a folder, a GGUF file or the hub, with transformers' Auto classes; pickled weights are never loaded."""

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
from mmkv_bench.config.schema import resolve_path
from mmkv_bench.devices.requirements import check_meant
from mmkv_bench.errors import ConfigError, GenerationTimeout, MMKVError, UnsupportedError, out_of_memory
from mmkv_bench.families.facts import ModelFacts, model_facts, text_model
from mmkv_bench.families.registry import apply_limits, families, family
from mmkv_bench.models import files, gguf
from mmkv_bench.models.chat_template import Template, check_media
from mmkv_bench.models.files import cached_folder
from mmkv_bench.models.processor import chat_template
from mmkv_bench.models.video import DEFAULT_FRAMES
from mmkv_bench.signals import time_limit

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mmkv_bench.config.schema import Model


TEMPLATE_S = 20.0


@dataclass
class LoadedModel:
    """A model in eval mode with its processor and facts.

    Attributes:
        processor: the tokenizer if the model takes only text.
        device: device of the inputs.
        prompt_format: the chat template's rendering of one user message `chat_template.PROBE`.
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
    with _explained(path, revision):
        config = _auto_config(path, revision)
    model_facts(config)
    # A checkpoint may state a text model's model_type although its repository's code adds a vision tower (LLaVA-NeXT's does).
    # Loaded as the text model, the checkpoint would silently ignore images.
    import transformers

    classes = list(getattr(config, "architectures", None) or [])
    has_unknown_class = classes and not any(hasattr(transformers, name) for name in classes)
    if has_unknown_class and family(config.model_type).classes_version is None:
        raise UnsupportedError(
            f"{path} has weights for {classes[0]}, a class that transformers does not have, and code of repositories is "
            "never run; give a checkpoint in Hugging Face format (for LLaVA: one of llava-hf; `python -m "
            "tools.llava_video_weights` of this project's repository converts a folder of LLaVA-Video; see docs/models.md)"
        )
    return config


def load_model(settings: Model, path: str, revision: str | None = None) -> LoadedModel:
    """Load a model's weights and processor.

    Args:
        settings: the run's `model` node.
        path: local folder, GGUF file or hub id.
        revision: commit of a hub id.

    Raises:
        ConfigError, UnsupportedError: see `load_config`, `device_of` and `set_up`; or the weights cannot be loaded, or the
            processor lacks a limit that is set.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    config = load_config(path, revision)
    placement = device_of(settings.device)
    multimodal = model_facts(config).multimodal
    if settings.template and multimodal:
        raise UnsupportedError(
            f"{settings.name}: model.template is for text models only, but this model takes images; leave it out"
        )
    folder, gguf_argument = (
        (str(Path(path).parent), {"gguf_file": Path(path).name}) if files.is_gguf(path) else (path, {})
    )
    common = {"revision": revision, "trust_remote_code": False, **gguf_argument}
    with _explained(path, revision, settings.name):
        if settings.tokenizer:
            tokenizer_path = resolve_path(settings.tokenizer)
            processor = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False, local_files_only=True)
        else:
            processor = (AutoProcessor if multimodal else AutoTokenizer).from_pretrained(folder, **common)
        if settings.template:
            processor.chat_template = chat_template(settings.template)
        limit(processor, settings)
        loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
        model = loader.from_pretrained(
            folder,
            **common,
            **({"config": config} if gguf_argument else {}),
            use_safetensors=None if gguf_argument else True,
            dtype=settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype),
            device_map=settings.device_map,
            disable_mmap=not gguf_argument
            and placement.type == "cpu"
            and _fits(path, revision),  # dequantised weights are copies
        )
        model = _merged(model, settings.adapter) if settings.adapter else model
    if settings.device_map is None:
        model = model.to(placement)
    return set_up(settings, model, processor, config, placement)


def limit(processor: Any, settings: Model) -> None:
    """Set a processor's pixel limits to those of a run's `model` node. Raises the errors of `apply_limits`."""
    frames = settings.frames or DEFAULT_FRAMES
    apply_limits(processor, settings.min_pixels, settings.max_pixels, settings.video_max_pixels, frames)


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def adapter_files(setting: str) -> list[Path]:
    """Return the files of a LoRA adapter, as PEFT writes them. Raises ConfigError: a file is missing.

    setting: `model.adapter`, a local folder or `pkg://package/folder`.
    """
    folder = Path(resolve_path(setting))
    missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"model.adapter={setting} has no {' and no '.join(missing)}; give the folder that PEFT's save_pretrained wrote"
        )
    return [folder / name for name in ADAPTER_FILES]


def _merged(model: nn.Module, setting: str) -> Any:
    """Return the model with a LoRA adapter (`model.adapter`) added to the weights; raise ConfigError if they do not fit."""
    from peft import PeftModel

    folder = adapter_files(setting)[0].parent
    try:
        return PeftModel.from_pretrained(model, str(folder), local_files_only=True).merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.adapter={setting} does not fit this model ({reason}); give an adapter trained on this model"
        ) from error


def set_up(settings: Model, model: Any, processor: Any, config: Any, where: torch.device) -> LoadedModel:
    """Prepare a loaded model and its processor for prompts: eval mode, attention of the text layers, chat template.

    where: device of the inputs. Raises UnsupportedError: the chat template does not render prompts correctly.
    """
    model, name = model.eval(), settings.name
    set_attention(model, settings.attention)
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
    if settings.device_map is not None:
        where = model.get_input_embeddings().weight.device
    family = model_facts(config, tokenizer)
    dtype = str(model.dtype).removeprefix("torch.")
    return LoadedModel(name, model, processor, tokenizer, family, where, dtype, template.probe)


def _fits(path: str, revision: str | None) -> bool:
    """Tell whether free memory holds the weights and one more shard. Weights are then read instead of memory-mapped.

    Memory-mapped weights would change with their file.
    """
    import psutil

    folder = Path(path) if Path(path).is_dir() else cached_folder(path, revision)
    sizes = [file.stat().st_size for file in folder.rglob("*.safetensors")] if folder else []
    return bool(sizes) and sum(sizes) + max(sizes) < psutil.virtual_memory().available


@contextmanager
def _explained(path: str, revision: str | None, name: str | None = None) -> Iterator[None]:
    """In the `with` block, turn any error of a library, except for lack of memory, into a ConfigError.

    name: the model's name if the processor may need a package that is not installed; otherwise None.
    """
    try:
        yield
    except (MMKVError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, ImportError) and name is not None:  # its message names the package
            raise ConfigError(f"{name}: {' '.join(str(error).split())}") from error
        if out_of_memory(error):  # no fault of the folder
            raise
        raise ConfigError(files.sentence(path, revision, error)) from error


def set_attention(model: Any, attention: str) -> None:
    """Set the attention of a model's text layers, for use outside of a compression session.

    attention: the run's setting. With `flash_attention_2` the layers get sdpa, because transformers would look for kernels.
    """
    stock = "sdpa" if attention == "flash_attention_2" else attention
    is_text_model = model.config is text_model(model).config
    model.set_attn_implementation(stock if is_text_model else {"text_config": stock})


def device_of(setting: str) -> torch.device:
    """Return the torch device of the setting `model.device`; `auto` is cuda if the machine has a CUDA device.

    Raises ConfigError: the setting is cuda without a CUDA device; see also `check_meant`.
    """
    check_meant(setting)
    kind = devices.kind_of(setting)
    if setting == "cuda" and kind != setting:
        raise ConfigError("model.device=cuda, but this machine has no CUDA device; allowed: cpu, auto")
    return devices.KINDS[kind].here()


def _auto_config(path: str, revision: str | None) -> Any:
    from transformers import AutoConfig

    if files.is_gguf(path):
        gguf.tensor_types(Path(path))
        return AutoConfig.for_model(**copy.deepcopy(gguf.config_values(Path(path))))
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except ValueError as error:
        own_families = [one for one in families().values() if one.classes_version is not None]
        named = [one for one in own_families if one.model_type in str(error)]  # the error names the unknown model_type
        if not named:
            raise
    named[0].register_classes()
    return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)


SMALL = 50_000_000
"""Number of parameters below which a model on a CPU gets one thread."""


def quiet_libraries() -> None:
    """Reduce the logging of the Hugging Face libraries, imported or not."""
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
    """Return the number of CPU threads of a run: `setting` (`model.threads`) if given, else torch's number.

    Without `setting`, a small model on a CPU gets one thread unless `OMP_NUM_THREADS` is set.
    """
    import torch

    if setting is not None:
        return setting
    keeps_default = "OMP_NUM_THREADS" in os.environ or devices.at(loaded.device).kind != "cpu"
    is_small_model = sum(parameter.numel() for parameter in loaded.model.parameters()) < SMALL
    return 1 if is_small_model and not keeps_default else torch.get_num_threads()


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """In the `with` block, let torch use this number of threads; restore the previous number afterwards."""
    import torch

    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous_threads)

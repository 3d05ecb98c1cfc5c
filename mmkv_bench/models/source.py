"""Where a model's weights come from: the hub, a folder or GGUF file, or a random generator (`model.weights=random`)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.files import content, options
from mmkv_bench.config.schema import FETCHED_SCHEME, resolve_path
from mmkv_bench.errors import ConfigError
from mmkv_bench.families.facts import read, stated, text_config
from mmkv_bench.families.registry import family
from mmkv_bench.file_state import digest_of
from mmkv_bench.models.files import cached_folder, folder_fingerprint, hub_fingerprint, hub_folder, is_gguf, model_files
from mmkv_bench.models.gguf import check_tokenizer, config_values, tensor_types
from mmkv_bench.models.load import (
    LoadedModel,
    adapter_files,
    device_of,
    limit,
    load_config,
    load_model,
    quiet_transformers,
    set_up,
)
from mmkv_bench.models.processor import build_processor, chat_template
from mmkv_bench.models.shape import GENERATION, config_of, plain, values_of

if TYPE_CHECKING:
    import torch

HUB, FOLDER, RANDOM = "hub", "folder", "random"
PLAIN = "plain"  # the only value of model.template
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")  # keys that differ between a family's checkpoints


@dataclass(frozen=True)
class Source:
    """A model of a run and the source of its weights.

    Attributes:
        kind: `hub`, `folder` or `random`, as in the rows' column `weights`.
        path: hub id, local folder or GGUF file; None for random weights.
        settings: the run's `model` node.
    """

    kind: str
    path: str | None
    settings: Any

    @classmethod
    def of(cls, model: Any) -> Source:
        """Return the source that a run's `model` node describes, without loading anything.

        Raises ConfigError: the settings are incomplete or contradict each other, the template is unknown, or a folder, GGUF file
        or tokenizer.json is missing.
        """
        source = cls._from_weights(model)
        gguf = source.path is not None and is_gguf(source.path)
        if model.tokenizer is not None and not gguf:
            raise ConfigError(
                f"model.tokenizer={model.tokenizer} is for GGUF files, because other checkpoints contain a tokenizer; leave it "
                "out"
            )
        if model.tokenizer is not None and not (Path(resolve_path(model.tokenizer)) / "tokenizer.json").is_file():
            raise ConfigError(
                f"model.tokenizer={model.tokenizer} has no tokenizer.json; give the folder of a tokenizer"
            )
        if model.template not in (None, PLAIN) or (model.template and source.kind == RANDOM):
            raise ConfigError(
                f"model.template={model.template} is not allowed; allowed: {PLAIN}, only for a text model with trained "
                "weights; leave model.template out, or give such weights"
            )
        if model.revision is not None and source.kind != HUB:
            raise ConfigError(
                f"model.revision={model.revision} is a commit of a hub repository, but these weights are "
                f"{'random' if source.kind == RANDOM else 'in a folder'}; leave model.revision out"
            )
        return source

    @classmethod
    def _from_weights(cls, model: Any) -> Source:
        weights = model.weights
        if weights == RANDOM:
            if not model.shape or not model.processor:
                raise ConfigError(
                    f"model={model.name} has no shape, so its weights cannot be random; allowed: "
                    f"{', '.join(shaped())}; choose one of these models, or trained weights"
                )
            if model.adapter is not None:
                raise ConfigError(
                    f"model.adapter={model.adapter} needs trained weights, but model.weights=random; leave out one of the two"
                )
            return cls(RANDOM, None, model)
        if model.layers is not None:
            raise ConfigError(
                f"model.layers={model.layers} needs random weights, because a checkpoint without some layers is another model; "
                "write model.weights=random, or leave model.layers out"
            )
        if weights != HUB:
            folder = resolve_path(str(weights))
            if not Path(folder).is_dir() and not is_gguf(folder):
                raise ConfigError(
                    f"model.weights={weights} is not a folder; allowed: hub, random, the folder of a checkpoint, or "
                    "a GGUF file"
                )
            return cls(FOLDER, folder, model)
        if not model.path:
            raise ConfigError(
                f"model={model.name} needs model.path; allowed: a local folder or a hub id (org/name); "
                "write model.path=<folder or id>, or model=tiny for the embedded model"
            )
        path = resolve_path(model.path)
        if model.path.startswith(FETCHED_SCHEME) and not Path(path).exists():
            raise ConfigError(
                f"the weights of model={model.name} are not in {path}; `mmkv-bench fetch model "
                f"{model.path.removeprefix(FETCHED_SCHEME).partition('/')[0]}` fetches them"
            )
        return cls(FOLDER if Path(path).is_dir() or is_gguf(path) else HUB, path, model)

    @property
    def place(self) -> str:
        """`path` of a source without random weights."""
        assert self.path is not None, "only random weights have no path"
        return self.path

    @property
    def gguf_file(self) -> str | None:
        """Name of a GGUF file with its tensor types, `model.gguf (Q4_1 210, F32 61)`; None for other weights."""
        if self.path is None or not is_gguf(self.path):
            return None
        return f"{Path(self.path).name} ({tensor_types(Path(self.path))})"

    @property
    def _folder(self) -> Path:
        return Path(self.place) if self.kind == FOLDER else hub_folder(self.place, self.settings.revision)

    @cached_property
    def commit(self) -> str | None:
        """Commit of a hub id, at which all files are read; None for folders and random weights."""
        return hub_folder(self.place, self.settings.revision).name if self.kind == HUB else None

    @cached_property
    def hf_config(self) -> Any:
        """The transformers config, read from the files or built from the shape at the first access.

        Raises:
            ConfigError: the files are missing, have another architecture than the model's file in conf/model, or have fewer
                layers than requested.
            UnsupportedError: the architecture belongs to no supported family.
        """
        if self.kind == RANDOM:
            return config_of(self.settings.shape, self.settings.layers)
        self._check_tokenizer()
        config = load_config(self.place, self.commit)
        self._require_same(config)
        return config

    def _check_tokenizer(self) -> None:
        if is_gguf(self.place) and self.settings.tokenizer is None:
            check_tokenizer(Path(self.place))

    def _require_same(self, config: Any) -> None:
        """Raise ConfigError if the config describes another checkpoint, because that checkpoint's rows would be stored under this
        model's name."""
        expected = (self.settings.shape or {}).get("model_type")
        if expected is None:
            return
        if config.model_type != expected:
            raise ConfigError(
                f"model={self.settings.name} is a {expected} model, but {self.path} has a {config.model_type} model; give "
                f"the folder or hub id of a {expected} checkpoint, or model=hf model.path={self.path}"
            )
        shape = text_config(stated(values_of(self.settings.shape)) or config_of(self.settings.shape, None))
        actual = text_config(config)
        differing = [name for name in _SIZES if getattr(shape, name) != getattr(actual, name)]
        if differing:
            sizes = ", ".join(f"{name} {getattr(actual, name)} for {getattr(shape, name)}" for name in differing)
            raise ConfigError(
                f"{self.path} is not {self.settings.name}: it has {sizes}; give the checkpoint of {self.settings.name}, or "
                f"model=hf model.path={self.path}"
            )

    @cached_property
    def described(self) -> Any:
        """A config for `model_facts`, made without importing transformers if the files state enough. Errors as `hf_config`."""
        if self.kind == RANDOM:
            return self._stated_shape() or self.hf_config
        if is_gguf(self.place):
            self._check_tokenizer()
            try:
                config = stated(config_values(Path(self.place)))
            except Exception:  # noqa: BLE001 - `hf_config` then raises a readable error for such a file
                config = None
        else:
            config = read(self._folder)
        if config is None:
            return self.hf_config
        self._require_same(config)
        return config

    def _stated_shape(self) -> Any:
        return stated(values_of(self.settings.shape, self.settings.layers))

    def described_here(self) -> Any:
        """Return `described` if it is available without a connection, otherwise None. Raises the errors of `described`.

        For a hub id, it is the config in the hub's cache, or else the shape in conf/model.
        """
        if self.kind != HUB:
            return self.described
        folder = cached_folder(self.place, self.settings.revision)
        return (read(folder) if folder else None) or (self._stated_shape() if self.settings.shape else None)

    def outlined(self) -> tuple[Any, str | None, str | None]:
        """Return (`described_here`, fingerprint, commit); each is None if unknown without a connection. Errors as `described`."""
        if self.kind != HUB:
            return self.described, *self.fingerprint()
        folder = cached_folder(self.place, self.settings.revision)
        identity = (
            (self._add_adapter(hub_fingerprint(self.place, folder.name)), folder.name) if folder else (None, None)
        )
        return self.described_here(), *identity

    def fingerprint(self) -> tuple[str, str | None]:
        """Return the model's fingerprint (16 hex digits), as in rows and calibrations, and the commit of a hub id or None.

        The fingerprint of random weights is a checksum of the shape, the number of layers, the processor settings with the chat
        template, and the versions of the rules for weights and processors, of model classes and of transformers. The precision
        is a separate column of the rows. Adapter, tokenizer and template enter the fingerprint of other weights.
        """
        if self.commit is not None:
            return self._add_adapter(hub_fingerprint(self.place, self.commit)), self.commit
        return self._add_adapter(
            folder_fingerprint(self.place) if self.kind == FOLDER else self._shape_fingerprint()
        ), None

    def _add_adapter(self, weights: str) -> str:
        """Return the fingerprint `weights` combined with those of adapter, tokenizer and template, if the settings name any."""
        adapter_files = self._extra_files()
        if adapter_files:
            files = digest_of((file.name, file) for file in adapter_files)
            weights = hashlib.sha256(f"{weights} {files}".encode()).hexdigest()[:16]
        if self.settings.template:
            weights = hashlib.sha256(f"{weights} {chat_template(PLAIN)}".encode()).hexdigest()[:16]
        return weights

    def _extra_files(self) -> list[Path]:
        """Return the files of the adapter and of the tokenizer that the settings name."""
        settings = self.settings
        named = adapter_files(settings.adapter) if settings.adapter else []
        if settings.tokenizer:
            named += sorted(
                file for file in Path(resolve_path(settings.tokenizer)).iterdir() if file.suffix in (".json", ".jinja")
            )
        return named

    def _shape_fingerprint(self) -> str:
        from mmkv_bench.models import processor, random_weights

        rule_versions = [random_weights.SCHEME, random_weights.SEED, processor.SCHEME]
        classes = family(self.settings.shape["model_type"]).classes_version
        identity_fields = {
            "shape": plain(self.settings.shape),
            "layers": self.settings.layers,
            "processor": plain(self.settings.processor),
            "template": processor.chat_template(self.settings.processor["template"]),
            "rules": rule_versions if classes is None else [*rule_versions, classes],
            "transformers": version("transformers"),
        }
        return hashlib.sha256(json.dumps(identity_fields, sort_keys=True).encode()).hexdigest()[:16]

    def confirm(self, fingerprint: str) -> None:
        """Raise ConfigError if a file of the model, adapter or tokenizer has changed since `fingerprint` was computed."""
        if (self.kind == FOLDER or self._extra_files()) and self.fingerprint()[0] != fingerprint:
            raise ConfigError(
                f"the files of model {self.settings.name} in {self.path} changed while this run loaded them, so nobody knows "
                "which version answered; nothing was written; run again when the files no longer change"
            )

    def files(self) -> list[Path]:
        """Return the files from which the model is read, sorted; [] for random weights."""
        if self.kind == RANDOM:
            return []
        return [*model_files(self._folder), *self._extra_files()]

    def load(self) -> LoadedModel:
        """Load the model in eval mode and the processor, on the device and in the precision of the settings.

        Raises ConfigError, UnsupportedError: the model cannot be loaded, or the processor lacks a limit that is set.
        """
        quiet_transformers()
        model = self.settings
        if self.kind != RANDOM:
            self._check_tokenizer()
            return load_model(model, self.place, self.commit)
        from mmkv_bench.models import random_weights

        config = self.hf_config
        target_device = device_of(model.device)
        processor = build_processor(config, model.processor)
        limit(processor, model)
        built = random_weights.build(
            config,
            dtype=_dtype(model.dtype, config),
            device=target_device,
            device_map=model.device_map,
            generation=plain(model.shape.get(GENERATION) or {}),
        )
        return set_up(model, built, processor, config, target_device)


def shaped() -> tuple[str, ...]:
    """Return the names of the models whose file in conf/model states the model's shape."""
    return tuple(name for name in options("model") if content("model", name).get("shape"))


def _dtype(setting: str, config: Any) -> torch.dtype:
    import torch

    if setting != "auto":
        return getattr(torch, setting)
    declared = getattr(config, "dtype", None)
    if declared is None:
        raise ConfigError("the shape has no dtype; set model.dtype=bfloat16 (or another)")
    return getattr(torch, str(declared).removeprefix("torch."))

"""Source of a model: `model.weights=hub`, a folder, or `random` (the shape alone, nothing is downloaded)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.checksums import digest_of
from mmkv_bench.config.files import options
from mmkv_bench.config.schema import FETCHED_SCHEME, resolve_path
from mmkv_bench.errors import ConfigError
from mmkv_bench.families.facts import read, stated, text_config
from mmkv_bench.families.registry import apply_limits, family
from mmkv_bench.models import adapter
from mmkv_bench.models.files import (
    cached_folder,
    folder_fingerprint,
    hub_fingerprint,
    hub_folder,
    model_files,
)
from mmkv_bench.models.gguf import check_tokenizer, config_values, is_gguf, tensor_types
from mmkv_bench.models.load import LoadedModel, device_of, load_config, load_model, quiet_transformers, set_up
from mmkv_bench.models.processor import chat_template
from mmkv_bench.models.shape import GENERATION, config_of, plain, values_of
from mmkv_bench.models.video import DEFAULT_FRAMES

if TYPE_CHECKING:
    import torch

HUB, FOLDER, RANDOM = "hub", "folder", "random"
PLAIN = "plain"  # the one template that a setting names
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")  # that tell a family's checkpoints apart


@dataclass(frozen=True)
class Source:
    """One model of a run and its origin.

    Attributes:
        kind: `hub`, `folder` or `random`, the column `weights` of the rows.
        path: hub id, local folder or GGUF file; None for random weights.
        settings: the run's `model` node.
    """

    kind: str
    path: str | None
    settings: Any

    @classmethod
    def of(cls, model: Any) -> Source:
        """Read the `model` node of a configuration. Nothing is loaded.

        Raises:
            ConfigError: weights that are no word and no folder, `layers` without random weights, random weights of a
                model without a shape, a model without path, a revision of anything but a hub repository.
        """
        source = cls._located(model)
        if model.tokenizer is not None:
            source._check_named_tokenizer()
        if model.template not in (None, PLAIN) or (model.template and source.kind == RANDOM):
            raise ConfigError(
                f"model.template={model.template}: allowed: {PLAIN}, with the weights of a text model; give that, or leave it out"
            )
        if model.revision is not None and source.kind != HUB:
            raise ConfigError(
                f"model.revision={model.revision} is a commit of a hub repository, and these weights are "
                f"{'random' if source.kind == RANDOM else 'those of a folder'}; leave model.revision out"
            )
        return source

    @classmethod
    def _located(cls, model: Any) -> Source:
        weights = model.weights
        if weights == RANDOM:
            if not model.shape or not model.processor:
                raise ConfigError(
                    f"model={model.name} has no shape, so its weights cannot be random; allowed: "
                    f"{', '.join(shaped())}; choose one of these, or weights that exist"
                )
            if model.adapter is not None:
                raise ConfigError(
                    f"model.adapter={model.adapter} was trained on weights, and these are random; leave one of them out"
                )
            return cls(RANDOM, None, model)
        if model.layers is not None:
            raise ConfigError(
                f"model.layers={model.layers} needs random weights: a checkpoint with layers left out is another model; "
                "write model.weights=random, or leave model.layers out"
            )
        if weights != HUB:
            folder = resolve_path(str(weights))
            if not Path(folder).is_dir() and not is_gguf(folder):
                raise ConfigError(
                    f"model.weights={weights} is not a folder; allowed: hub, random, the folder of a checkpoint, or "
                    "a GGUF file; give one"
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
                f"{model.path.removeprefix(FETCHED_SCHEME).partition('/')[0]}` gets them"
            )
        return cls(FOLDER if Path(path).is_dir() or is_gguf(path) else HUB, path, model)

    def _check_named_tokenizer(self) -> None:
        folder = Path(resolve_path(self.settings.tokenizer))
        if self.path is None or not is_gguf(self.path):
            raise ConfigError(
                f"model.tokenizer={self.settings.tokenizer} is for GGUF files, and other checkpoints bring their tokenizer; "
                "leave it out"
            )
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(
                f"model.tokenizer={self.settings.tokenizer} has no tokenizer.json; give a tokenizer's folder"
            )

    @property
    def place(self) -> str:
        """`path` of weights that exist."""
        assert self.path is not None, "only random weights have no path"
        return self.path

    @property
    def gguf_file(self) -> str | None:
        """Name of a GGUF file with the types of its tensors, `model.gguf (Q4_1 210, F32 61)`; None of other weights."""
        if self.path is None or not is_gguf(self.path):
            return None
        return f"{Path(self.path).name} ({tensor_types(Path(self.path))})"

    @cached_property
    def commit(self) -> str | None:
        """The commit of a hub id, asked once: everything is read at it. None for folders and random weights."""
        return hub_folder(self.place, self.settings.revision).name if self.kind == HUB else None

    @cached_property
    def hf_config(self) -> Any:
        """The transformers config, read or built once.

        Raises:
            ConfigError: nothing there, or another architecture than the model's file says; more layers than it has.
            UnsupportedError: an architecture outside the supported families.
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
        """Refuse another model, or another checkpoint of the family: its rows would stand under this model's name."""
        expected = (self.settings.shape or {}).get("model_type")
        if expected is not None and config.model_type != expected:
            raise ConfigError(
                f"model={self.settings.name} is a {expected} model and {self.path} holds a {config.model_type} one; give "
                f"the folder or hub id of a {expected} checkpoint, or model=hf model.path={self.path}"
            )
        if expected is None:
            return
        shape = text_config(stated(values_of(self.settings.shape)) or config_of(self.settings.shape, None))
        actual = text_config(config)
        differing = [name for name in _SIZES if getattr(shape, name) != getattr(actual, name)]
        if differing:
            sizes = ", ".join(f"{name} {getattr(actual, name)} for {getattr(shape, name)}" for name in differing)
            raise ConfigError(
                f"{self.path} is not {self.settings.name}: it has {sizes}; give that model's checkpoint, or "
                f"model=hf model.path={self.path}"
            )

    @cached_property
    def described(self) -> Any:
        """The config that `model_facts` reads, without transformers where the files state enough. Raises
        what `hf_config` raises."""
        if self.kind == RANDOM:
            return self._shaped() or self.hf_config
        if is_gguf(self.place):
            self._check_tokenizer()
            try:
                config = stated(config_values(Path(self.place)))
            except Exception:  # noqa: BLE001 - `hf_config` says in a sentence what transformers says of such a file
                config = None
        else:
            config = read(Path(self.place) if self.kind == FOLDER else hub_folder(self.place, self.settings.revision))
        if config is None:
            return self.hf_config
        self._require_same(config)
        return config

    def _shaped(self) -> Any:
        return stated(values_of(self.settings.shape, self.settings.layers))

    def described_here(self) -> Any:
        """`described` as far as it is known without a connection, None where it is not: of a hub id what the cache has, else its
        file in conf/model. Raises what `described` raises, of what is there."""
        if self.kind != HUB:
            return self.described
        folder = cached_folder(self.place, self.settings.revision)
        return (read(folder) if folder else None) or (self._shaped() if self.settings.shape else None)

    def outlined(self) -> tuple[Any, str | None, str | None]:
        """`described_here`, fingerprint and commit as far as they are known without a connection: None for what is not.

        Raises:
            ConfigError, UnsupportedError: as `described`, of what is there.
        """
        if self.kind != HUB:
            return self.described, *self.fingerprint()
        folder = cached_folder(self.place, self.settings.revision)
        identity = (self._adapted(hub_fingerprint(self.place, folder.name)), folder.name) if folder else (None, None)
        return self.described_here(), *identity

    def fingerprint(self) -> tuple[str, str | None]:
        """Fingerprint of the model in rows and calibrations, 16 hex digits, and the commit of a hub id.

        Random weights: a checksum of shape, layers, processor settings, the rules that make weights, tokens and prompts
        (`SCHEME` of their files), and the version of transformers that builds the architecture. Their precision is a
        column of its own. An adapter's files are part of the model.
        """
        weights, commit = self._of_weights()
        return self._adapted(weights), commit

    def _adapted(self, weights: str) -> str:
        """The fingerprint with the files of adapter and tokenizer, and the template; that of the weights where none is named."""
        beside = self._beside()
        if beside:
            files = digest_of((file.name, file) for file in beside)
            weights = hashlib.sha256(f"{weights} {files}".encode()).hexdigest()[:16]
        if self.settings.template:
            weights = hashlib.sha256(f"{weights} {chat_template(PLAIN)}".encode()).hexdigest()[:16]
        return weights

    def _beside(self) -> list[Path]:
        """The files of an adapter and of a tokenizer that are named beside the weights."""
        settings = self.settings
        named = adapter.files(settings.adapter) if settings.adapter else []
        if settings.tokenizer:
            named += sorted(
                file for file in Path(resolve_path(settings.tokenizer)).iterdir() if file.suffix in (".json", ".jinja")
            )
        return named

    def _of_weights(self) -> tuple[str, str | None]:
        if self.commit is not None:
            return hub_fingerprint(self.place, self.commit), self.commit
        if self.kind == FOLDER:
            return folder_fingerprint(self.place), None
        from mmkv_bench.models import processor, random_weights

        rules = [random_weights.SCHEME, random_weights.SEED, processor.SCHEME]
        classes = family(self.settings.shape["model_type"]).classes_version
        parts = {
            "shape": plain(self.settings.shape),
            "layers": self.settings.layers,
            "processor": plain(self.settings.processor),
            "template": processor.chat_template(self.settings.processor["template"]),
            "rules": rules if classes is None else [*rules, classes],
            "transformers": version("transformers"),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16], None

    def confirm(self, fingerprint: str) -> None:
        """Check that the files of a folder and of an adapter are still those of `fingerprint`, so that rows name what was
        loaded. Only files that changed since are read.

        Raises:
            ConfigError: files that changed since; which of the two contents was loaded nobody knows.
        """
        if (self.kind == FOLDER or self._beside()) and self.fingerprint()[0] != fingerprint:
            raise ConfigError(
                f"the files of model {self.settings.name} in {self.path} changed while this run was loading them, so its "
                "answers could be of neither version; nothing was written: start the run again when they stay as they are"
            )

    def files(self) -> list[Path]:
        """The files that the model is read from, sorted; none of random weights."""
        if self.kind == RANDOM:
            return []
        folder = Path(self.place) if self.kind == FOLDER else hub_folder(self.place, self.settings.revision)
        return [*model_files(folder), *self._beside()]

    def load(self) -> LoadedModel:
        """The model in eval mode with its processor, on its device and in its precision, as the settings say.

        Raises:
            ConfigError, UnsupportedError: what cannot be loaded, limits that the family's processor does not have.
        """
        quiet_transformers()
        model = self.settings
        limits = {key: getattr(model, key) for key in ("min_pixels", "max_pixels", "video_max_pixels")}
        limits["frames"] = model.frames or DEFAULT_FRAMES
        if self.kind != RANDOM:
            self._check_tokenizer()
            return load_model(
                model.name,
                self.place,
                revision=self.commit,
                adapter=model.adapter,
                tokenizer=model.tokenizer and resolve_path(model.tokenizer),
                template=model.template and chat_template(model.template),
                dtype=model.dtype,
                attention=model.attention,
                device=model.device,
                device_map=model.device_map,
                **limits,
            )
        from mmkv_bench.models import random_weights
        from mmkv_bench.models.processor import build_processor

        config = self.hf_config
        where = device_of(model.device)
        processor = build_processor(config, model.processor)
        apply_limits(processor, **limits)
        built = random_weights.build(
            config,
            dtype=_dtype(model.dtype, config),
            device=where,
            device_map=model.device_map,
            generation=plain(model.shape.get(GENERATION) or {}),
        )
        return set_up(model.name, built, processor, config, model.attention, where, model.device_map)


def shaped() -> tuple[str, ...]:
    """Names in conf/model whose files hold a shape and processor settings."""
    from mmkv_bench.config.files import content

    return tuple(name for name in options("model") if content("model", name).get("shape"))


def _dtype(setting: str, config: Any) -> torch.dtype:
    import torch

    if setting != "auto":
        return getattr(torch, setting)
    declared = getattr(config, "dtype", None)
    if declared is None:
        raise ConfigError("the shape names no dtype; name it with model.dtype=bfloat16 (or another)")
    return getattr(torch, str(declared).removeprefix("torch."))

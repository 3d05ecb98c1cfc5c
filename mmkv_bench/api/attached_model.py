"""`attach`: compress the KV cache of an unmodified transformers model inside a `with` block.

The hooks are those of `compression/session.py`, which runs use too. This file adds names of methods, a report counted
from the stored tensors, and errors for ways of generating that would be compressed wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import CompileConfig, DynamicCache, PreTrainedModel

from mmkv_bench.compression import session as sessions
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.config.schema import resolve_path
from mmkv_bench.devices.requirements import check_compiler
from mmkv_bench.errors import CalibrationError, ConfigError, UnsupportedError
from mmkv_bench.families.facts import model_facts
from mmkv_bench.generation.decode import EAGER_DECODE, config_of
from mmkv_bench.generation.result import CellSpec, ForkResult
from mmkv_bench.generation.unshared_generation import fill_account
from mmkv_bench.methods.build import method as method_named
from mmkv_bench.methods.part_rules import refuse
from mmkv_bench.plan.identity import state_cost
from mmkv_bench.plan.validate import validate_combinations
from mmkv_bench.protocols import DEFAULT, FED_ONCE
from mmkv_bench.protocols import protocol as protocol_named


def attach(
    model: PreTrainedModel,
    method: str | Path | Compressor | Scorer | type[Scorer],
    budget: int | float | str | None = None,
    *,
    protocol: str = DEFAULT,
    reading: str = "paper",
    seed: int = 0,
    identity: str = sessions.UNNAMED,
    compiled_tokens: int | None = None,
    **parameters: Any,
) -> Attached:
    """Compress the KV cache of every prompt that `model` prefills inside the returned context.

    No part of the model or of transformers is replaced: after the block, even after an exception, the model is
    unchanged.

    Args:
        model: a transformers model of a supported family (docs/models.md), in eval mode, attention `sdpa` or `eager`.
        method: a method's name (docs/methods.md), the user's file (`"mine.py"`), the user's scorer (an object or a
            class), or a `Compressor`.
        budget: entries kept per KV head (64), or the fraction of the entries (0.2, "20%"); None for methods without a
            budget.
        protocol: `paper`: a prompt, then its answer token by token. `query_agnostic`: call the model with the context
            alone (`model(**context)`), then with the whole prompt and `past_key_values=session.cache`; tokens after the
            context are all kept.
        reading: `paper`, or `released` for the method of the paper's released code.
        seed: seed of stochastic methods; equal seeds draw the same for prompts of the same length and `identity`.
        identity: the prompt's name, for stochastic methods. In a run the name is `<dataset>/<sample_id>` of the row;
            with this name `attach` draws the run's numbers and gives the row's answer.
        compiled_tokens: reserve cache slots for an answer of so many tokens, and compile the decode step. `generate()`
            compiles if called with `past_key_values=session.new_cache()`, and on a CPU also with
            `compile_config=session.compile_config`. None: decode eagerly. Methods that act while decoding always decode
            eagerly; their report has `eager_decode`.
        parameters: parameters of the method (`window=16`), as for `method`.

    Returns:
        A context manager; its `report()` describes the latest prompt's kept entries.

    Raises:
        ConfigError: an unknown method or parameter, a wrong or missing budget; on entering the block, a model with
            another attached session.
        UnsupportedError: a model of another family, or a method that the model cannot run; while generating, a batch,
            beams, assisted decoding, chunked prefill, `use_cache=False` or the caller's cache.

    Example:
        >>> with attach(model, "snapkv", 64) as session:  # doctest: +SKIP
        ...     output = model.generate(**inputs, max_new_tokens=32)
        >>> print(session.report())  # doctest: +SKIP
    """
    if not protocol_named(protocol).feeds_once:
        raise UnsupportedError(
            f"attach cannot run protocol={protocol!r}, which feeds tokens of a prompt twice or chunk by chunk; allowed: "
            f"{', '.join(FED_ONCE)}; or use evaluate(protocol={protocol!r})"
        )
    if not hasattr(model, "config") or not hasattr(model, "generate"):
        raise UnsupportedError(
            f"{type(model).__name__} is not a transformers model; give the result of from_pretrained"
        )
    family = model_facts(model.config)
    compressor = _compressor(model, method, reading, parameters)
    dtype = str(model.dtype).removeprefix("torch.")
    parsed_budget = None if budget is None else Budget.parse(budget, state_cost(family, dtype))
    if compressor.unbudgeted and parsed_budget is not None:
        raise ConfigError(
            f"method {compressor.name} evicts nothing and takes no budget, got {parsed_budget}; leave it out"
        )
    _refuse_more_than_a_prefill(compressor)
    validate_combinations([protocol], family, [compressor], uncut=())
    if compiled_tokens is not None:
        if compiled_tokens < 1:
            raise ConfigError(
                f"compiled_tokens={compiled_tokens} is not the length of an answer; allowed: 1 or more tokens"
            )
        check_compiler()
    return Attached(model, compressor, parsed_budget, protocol, seed, compiled_tokens, identity)


@dataclass(frozen=True)
class SessionReport:
    """Counts of one prompt right after compression; names and units are those of result rows (docs/rows.md).

    Attributes:
        method, reading: method and reading (`paper` or `released`) that compressed the prompt.
        budget: the budget as given, `64` or `20%`; None without a budget.
        prompt_tokens: T, tokens of the prompt.
        budget_entries: C, entries per KV head.
        kept: kept entries per layer and KV head, `[layers][Hkv]`.
        entries_asked: min(C, T) times the number of layers and heads.
        entries_planned: selected entries, over all layers and heads.
        entries_resident: stored entries, over all layers and heads.
        entries_reachable: stored entries and entries that can be fetched from the host.
        bytes_device, bytes_host: bytes of keys and values on the device and in host memory.
        bytes_metadata: bytes of positions and scales.
        bytes_held: bytes of all tensors of the cache, slack and buffers included.
        bytes_full: bytes of the full cache's keys and values.
        bytes_state: bytes of windows and recurrent states, in layers that are not compressed; only `bytes_held`
            includes them.
        fallback: names of fallbacks that were taken (docs/rows.md).
        allowed_over: the method's formula, or its released code, may exceed the budget.
    """

    method: str
    reading: str
    budget: str | None
    prompt_tokens: int
    budget_entries: int | None
    kept: tuple[tuple[int, ...], ...]
    entries_asked: int | None
    entries_planned: int
    entries_resident: int
    entries_reachable: int
    bytes_device: int
    bytes_host: int
    bytes_metadata: int
    bytes_held: int
    bytes_full: int
    bytes_state: int = 0
    fallback: tuple[str, ...] = ()
    allowed_over: bool = False

    @property
    def audit(self) -> str:
        """Sentence on whether the selected entries are stored, and whether they are within the budget."""
        if self.entries_resident != self.entries_planned:
            return f"failed: {self.entries_resident} entries are stored, but {self.entries_planned} were selected"
        if self.entries_asked is None:
            return "passed: no budget"
        excess = self.entries_resident - self.entries_asked
        if excess > 0:
            permission = f"which {self.method} allows" if self.allowed_over else "which nothing allows"
            return f"{'passed' if self.allowed_over else 'failed'}: {excess} entries over the budget, {permission}"
        return "passed: exactly the budget" if not excess else f"passed: {-excess} entries below the budget"

    def __str__(self) -> str:
        name = self.method if self.budget is None else f"{self.method}@{self.budget}"
        full_entries = self.prompt_tokens * sum(len(layer) for layer in self.kept)
        stored = self.bytes_device + self.bytes_host + self.bytes_metadata
        asked_text = "no budget" if self.entries_asked is None else f"{self.entries_asked:,}"
        lines = [
            f"{name} reading={self.reading}: {self.entries_resident:,} of {full_entries:,} entries kept of "
            f"{self.prompt_tokens} prompt tokens",
            f"  entries  asked {asked_text}, planned {self.entries_planned:,}, resident "
            f"{self.entries_resident:,}, reachable {self.entries_reachable:,}",
            f"  bytes    {stored:,} of {self.bytes_full:,} ({self.bytes_device:,} device, {self.bytes_host:,} host, "
            f"{self.bytes_metadata:,} metadata), {self.bytes_held:,} with slack"
            f"{f' and {self.bytes_state:,} of layers that are not compressed' if self.bytes_state else ''}",
            f"  audit    {self.audit}",
        ]
        if self.fallback:
            lines.append(f"  fallback {', '.join(self.fallback)}")
        lines += [f"  layer {i:<3}{' '.join(f'{count:6d}' for count in heads)}" for i, heads in enumerate(self.kept)]
        return "\n".join(lines)


def session_report(
    session: sessions.Session, compressor: Compressor, budget: Budget | None, protocol: str
) -> SessionReport:
    """Return the report of a session that has just compressed one prompt (batch size 1), counted as in a run's rows."""
    prompt = session.prompt
    assert prompt is not None, "a prompt has just been reduced"
    length = prompt.length(0)
    types = None if prompt.token_types is None else prompt.token_types[0, prompt.pads[0] :]
    row = ForkResult(cell="", prompt_tokens=length)
    cell = CellSpec("", compressor, budget, protocol)
    fill_account(row, cell, protocol_named(protocol).lengths(length, length), session, types)
    derived = {"method", "reading", "budget", "kept", "fallback", "allowed_over"}
    return SessionReport(
        method=compressor.name,
        reading=compressor.reading,
        budget=None if budget is None else str(budget),
        kept=tuple(map(tuple, row.kept)),
        fallback=tuple(row.fallback),
        allowed_over=compressor.exceeds,
        **{field.name: getattr(row, field.name) for field in fields(SessionReport) if field.name not in derived},
    )


class Attached:
    """A compressor attached to a model by `attach`. Only one `with` block may use it at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        compressor: Compressor,
        budget: Budget | None,
        protocol: str,
        seed: int,
        compiled_tokens: int | None = None,
        identity: str = sessions.UNNAMED,
    ) -> None:
        if model.training:
            raise UnsupportedError("the model is in training mode, whose dropout changes answers; call model.eval()")
        self.model, self.compressor, self.budget, self.protocol = model, compressor, budget, protocol
        self.compiled = compiled_tokens is not None
        cache_settings: dict[str, Any] = (
            {} if compiled_tokens is None else {"reserve": compiled_tokens, "fixed": compressor.decoding is None}
        )
        self._session = sessions.attach(model, compressor, budget, protocol, seed, identity=identity, **cache_settings)
        self._report: SessionReport | None = None
        self._kept: list[Tensor] = []
        self._prompt: object | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._session.__enter__()
        text = self._session.text
        self._hooks = [
            text.register_forward_pre_hook(self._refuse, with_kwargs=True, prepend=True),
            text.register_forward_hook(self._count),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._session.__exit__(*exception)
        self._prompt = self._session.cache = None  # the report does not keep the cache alive

    @property
    def cache(self) -> CompressedCache | None:
        """Cache of the latest prompt, inside the `with` block. `past_key_values=session.cache` appends tokens to it."""
        return self._session.cache

    def new_cache(self) -> CompressedCache:
        """Return an empty cache for the next prompt: `generate(past_key_values=session.new_cache())`."""
        return self._session.new_cache()

    @property
    def compile_config(self) -> CompileConfig:
        """Argument of `generate(compile_config=...)` that compiles a decode step on any device, including a CPU."""
        return config_of(self.model.device)

    def report(self) -> SessionReport:
        """Return the report of the latest prompt's kept entries. Raises ConfigError: no prompt was prefilled yet."""
        if self._report is None:
            raise ConfigError("there is nothing to report yet; call model.generate(...) inside the with, then report()")
        return self._report

    def kept(self) -> list[Tensor]:
        """Return the kept positions of the latest prompt: per layer int64 `[KV heads, m]` on the CPU, in any order.

        Heads that keep fewer positions are padded with -1. Raises ConfigError: no prompt has been prefilled yet.
        """
        self.report()
        return self._kept

    # ------------------------------------------------------------------ hooks
    def _refuse(self, text: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a forward of the text model whose inputs would be compressed wrongly, or not at all."""
        model_input = kwargs.get("inputs_embeds")
        if model_input is None:
            model_input = args[0] if args else kwargs["input_ids"]
        rows, new_tokens = model_input.shape[:2]
        if rows != 1:
            raise UnsupportedError(
                f"attach compresses one prompt at a time, but got {rows} rows; give one prompt, without beams and with one "
                "answer (num_beams=1, num_return_sequences=1)"
            )
        if kwargs.get("use_cache") is False:
            raise UnsupportedError("use_cache=False leaves no cache to compress; leave it out")
        cache = kwargs.get("past_key_values")
        if self.compiled and not isinstance(cache, CompressedCache):
            raise UnsupportedError(
                "compiled_tokens needs a cache of the session, because generate() decides before the prompt whether to compile; "
                "give generate() past_key_values=session.new_cache(), a new cache for each prompt"
            )
        if not isinstance(cache, CompressedCache):
            stock = cache is None or (type(cache) is DynamicCache and not getattr(cache, "offloading", False))
            if cache is not None and (not stock or cache.get_seq_length() > 0):
                raise UnsupportedError(
                    f"past_key_values is a {type(cache).__name__} of {cache.get_seq_length()} tokens, which attach cannot "
                    "compress; allowed: none (and no cache_implementation), or session.cache to append tokens"
                )
        elif new_tokens > 1 and cache.get_seq_length() > 0 and not protocol_named(self.protocol).cuts:
            raise UnsupportedError(
                f"{new_tokens} tokens at once follow a prompt that is already compressed; allowed: one token at a "
                "time, as generate() decodes without assistant_model, prompt_lookup_num_tokens and prefill_chunk_size; to "
                "ask a question about a compressed context use attach(..., protocol='query_agnostic')"
            )

    def _count(self, text: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():  # a decode step
            return
        prompt = self._session.prompt
        if prompt is not None and prompt.complete and prompt is not self._prompt:
            self._prompt = prompt
            report = session_report(self._session, self.compressor, self.budget, self.protocol)
            self._kept = [layer[0].cpu() for layer in self._session.kept()]
            eager = self.compiled and self.compressor.decoding is not None
            self._report = replace(report, fallback=(*report.fallback, EAGER_DECODE)) if eager else report


def _compressor(model: PreTrainedModel, method: Any, reading: str, parameters: dict[str, Any]) -> Compressor:
    if not isinstance(method, Compressor):
        calibrations = _FolderCalibrations(model.config) if isinstance(method, str) else None
        return method_named(method, reading=reading, calibrations=calibrations, **parameters)
    extra = [*parameters, *(["reading"] if reading not in ("paper", method.reading) else [])]
    if extra:
        raise ConfigError(
            f"{method.name} is a Compressor whose parameters are already set, but got {extra[0]}; give {extra[0]} to method(...) "
            "or dataclasses.replace(...)"
        )
    refuse(method)
    return method


def _refuse_more_than_a_prefill(compressor: Compressor) -> None:
    for needed, what in (
        (compressor.needs.answer, "reads the full cache's answer, which does not exist while a prompt is prefilled"),
        (compressor.needs.replay, "feeds the prompt again with an instruction, which attach cannot do"),
    ):
        if needed:
            raise UnsupportedError(
                f"method {compressor.name} {what}; allowed: evaluate(method={compressor.name!r}), or another method"
            )


class _FolderCalibrations:
    """Finder of a method's calibration for an attached model, identified by the folder in the model's config."""

    def __init__(self, config: Any):
        self.path = str(getattr(config, "name_or_path", "") or "")

    def data(self, method: str, spec: Any) -> dict[str, Any]:
        from mmkv_bench.calibrate.artefact import EMBEDDED_NAME, Calibrations
        from mmkv_bench.models.files import folder_fingerprint

        folder = Path(self.path)
        if not self.path or not folder.is_dir():
            raise CalibrationError(
                f"{method} reads a calibration, which belongs to the weights of a folder, but this model is from "
                f"{self.path or 'no folder'}; load the model from a folder, or choose another method"
            )
        embedded = folder.resolve() == Path(resolve_path("pkg://mmkv_bench/tiny/weights")).resolve()
        name = EMBEDDED_NAME if embedded else folder.resolve().name
        return Calibrations(name, folder_fingerprint(folder)).data(method, spec)

"""One analysis: prefill each sample of a dataset, compute numbers of every layer, store rows of the table
`diagnostics`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.calibrate.samples import PromptSample, PromptSamples, encoded
from mmkv_bench.errors import ConfigError
from mmkv_bench.store.files import canonical_json, checksum

PROCESSOR = ("min_pixels", "max_pixels", "max_prompt_tokens", "frames", "video_max_pixels")
"""Settings of a model that affect its prompts."""

if TYPE_CHECKING:
    import torch

    from mmkv_bench.compression.budget import Budget, StateCost
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.compression.session import Session
    from mmkv_bench.config.schema import MethodConfig
    from mmkv_bench.diagnostics.quantities import Value
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.models.source import Source

Row = tuple[str, int | None, "Value"]
"""Sample id, layer, and one number of the layer."""


@dataclass(frozen=True)
class ComparedMethod:
    """A method at a budget. label: for example `snapkv@64`. base: base of the method's file. parameters: JSON."""

    label: str
    base: str
    compressor: Compressor
    budget: Budget
    parameters: str

    def settings(self) -> dict[str, Any]:
        """Return the settings of the method and budget, as rows store them."""
        has_entry_budget = self.budget.kind == "entries"
        return {
            "base": self.base,
            "reading": self.compressor.reading,
            "parameters": json.loads(self.parameters),
            "budget_kind": self.budget.kind,
            "budget": str(self.budget.entries) if has_entry_budget else self.budget.fraction_text,
        }


@dataclass(frozen=True)
class AnalysisCounts:
    """Numbers of samples measured now, samples measured before, and stored values."""

    measured: int
    before: int
    numbers: int


def methods_of(
    chosen: MethodConfig,
    budgets: Sequence[int | float | str],
    model: str,
    fingerprint: str,
    cost: StateCost | None = None,
) -> list[ComparedMethod]:
    """Return every evicting method at every budget, under the first seed. `full` is left out, because it is always
    analysed.

    Args:
        chosen, budgets: methods and budgets of a run.
        model, fingerprint: name and fingerprint of the run's model, to find its calibrations.
        cost: bytes of the model's state, for budgets in bytes.

    Raises:
        ConfigError: a method cannot be built, or reads the full cache's answer before it chooses entries.
    """
    from mmkv_bench.calibrate.artefact import Calibrations
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.methods.node import parameters_json
    from mmkv_bench.plan.cells import build_methods, method_entries

    methods_compared = []
    for method in build_methods(method_entries(chosen), Calibrations(model, fingerprint)):
        if method.compressor.needs.answer:
            raise ConfigError(
                f"{method.name} reads the answer beforehand, so a prompt alone does not determine what it keeps; leave it out"
            )
        for value in [] if method.compressor.unbudgeted else dict.fromkeys(budgets):
            budget = Budget.parse(value, cost)
            label = f"{method.name}@{budget}" + ("" if method.compressor.reading == "paper" else " released")
            base, parameters = str(method.plain["base"]), parameters_json(method.plain, method.decoding)
            methods_compared.append(ComparedMethod(label, base, method.compressor, budget, parameters))
    return methods_compared


def diagnose(
    name: str,
    model: Any,
    questions: PromptSamples,
    tokens: int,
    out: Path,
    methods: Callable[[str, StateCost | None], Sequence[ComparedMethod]] | None = None,
) -> AnalysisCounts:
    """Run one analysis and store its numbers, sample by sample. Numbers in the store are not measured again.

    Args:
        name: one of `quantities.QUANTITIES`.
        model: the `model` node of a run.
        tokens: limit of the full cache's answer, for analyses of answers.
        out: folder of the store.
        methods: function from the model's fingerprint and the cost of its state to the methods to compare.

    Raises:
        MMKVError: model or data are not available, or the model cannot read a prompt.
    """
    import pyarrow as pa

    from mmkv_bench.models.source import Source
    from mmkv_bench.plan.identity import cost_of, resolve_dtype
    from mmkv_bench.store.store import Store

    store, source = Store(out.expanduser()), Source.of(model)
    store.check_writable()
    fingerprint, _ = source.fingerprint()
    dtype = resolve_dtype(model.dtype, source.described, source.path)
    methods_compared = [] if methods is None else methods(fingerprint, cost_of(source.described, dtype))
    columns_by_measurement = measurements(name, source, questions, tokens, methods_compared)
    measurements_done = store.diagnosed([one["measurement"] for one in columns_by_measurement.values()])

    def missing(sample: str) -> list[str]:
        return [
            label
            for label, one in columns_by_measurement.items()
            if sample not in measurements_done[one["measurement"]]
        ]

    samples_done = [sample for sample in questions.ids if not missing(sample)]
    if len(samples_done) == len(questions.ids):
        return AnalysisCounts(0, len(samples_done), 0)
    loaded = source.load()
    source.confirm(fingerprint)
    numbers = 0

    def take(sample: PromptSample) -> None:
        nonlocal numbers
        labels = missing(sample.sample_id)
        values = layers_of(loaded, name, sample, tokens, [one for one in methods_compared if one.label in labels])
        rows = [
            {"sample_id": sample_id, "layer": layer, **value._asdict(), **columns_by_measurement[label]}
            for sample_id, layer, value in values
            if (label := value.part if value.part in columns_by_measurement else "")
            in labels  # "": a number without a method
        ]
        if rows:
            store.write_diagnostics(pa.Table.from_pylist(rows))
            numbers += len(rows)

    questions.each(loaded, take, samples_done)
    if not numbers and not samples_done:
        raise ConfigError(
            f"{name} has no values for these samples, because it needs text and images; choose other samples"
        )
    return AnalysisCounts(len(questions.ids) - len(samples_done), len(samples_done), numbers)


def measurements(
    name: str, source: Source, questions: PromptSamples, tokens: int, kept: Sequence[ComparedMethod]
) -> dict[str, dict[str, str]]:
    """Return label of a method (or "" for none) -> columns (name -> value) that identify an analysis's rows.

    The column `measurement` is the hash of all others: model, prompts and one method, but neither other methods nor
    samples. So numbers stay valid when methods or samples are added.
    """
    from mmkv_bench.diagnostics.quantities import QUANTITIES
    from mmkv_bench.plan.identity import resolve_dtype

    quantity, model = QUANTITIES[name], source.settings
    settings: dict[str, Any] = {
        "weights": source.kind,
        "attention": model.attention,
        "prompt": dict(questions.prompt),
        "processor": {key: value for key in PROCESSOR if (value := getattr(model, key)) is not None},
    }
    if quantity.answer or quantity.decoding:
        settings["tokens"] = tokens
    shared = {
        "name": name,
        "model": model.name,
        "model_fingerprint": source.fingerprint()[0],
        "dtype": resolve_dtype(model.dtype, source.described, source.path),
        "dataset": questions.settings["dataset"],
        "dataset_fingerprint": questions.settings["dataset_fingerprint"],
        "versions": json.dumps({package: metadata.version(package) for package in ("torch", "transformers")}),
    }
    settings_of = {} if quantity.decoding else {"": settings}
    settings_of |= {one.label: settings | {"method": one.settings()} for one in kept}
    columns = {label: shared | {"settings": json.dumps(one, sort_keys=True)} for label, one in settings_of.items()}
    return {label: one | {"measurement": checksum(canonical_json(one).encode())} for label, one in columns.items()}


def layers_of(
    loaded: LoadedModel, name: str, sample: PromptSample, tokens: int, methods: Sequence[ComparedMethod] = ()
) -> list[Row]:
    """Compute the numbers of the analysis `name` for one sample. Return rows (sample id, layer or None, value).

    tokens: limit of the full cache's answer. methods: methods to compare, if the analysis compares methods.
    """
    from mmkv_bench.calibrate.measurements import read_layers, with_answer
    from mmkv_bench.diagnostics.quantities import QUANTITIES, PromptFacts

    quantity, replays = QUANTITIES[name], any(one.compressor.needs.replay for one in methods)
    prompt = encoded(loaded, sample, replays)
    inputs, token_types = prompt.inputs, prompt.types
    kept_by_method = {one.label: kept_entries(loaded, prompt, one) for one in methods} if quantity.methods else {}
    decoded_by_name: dict[str, list[torch.Tensor]] = {}
    if quantity.answer or quantity.decoding:
        answer = fed_tokens(loaded, prompt, tokens, quantity.endless)
        if quantity.decoding:
            decoded_by_name = {"full": decoded_outputs(loaded, prompt, answer)}
            decoded_by_name |= {one.label: decoded_outputs(loaded, prompt, answer, one) for one in methods}
        else:
            inputs, token_types = with_answer(inputs, token_types, answer)
    prompt_facts = PromptFacts(prompt.length, kept_by_method, decoded_by_name)
    layer_values = read_layers(
        loaded.model,
        inputs,
        token_types,
        quantity.needs,
        lambda obs: list(quantity.read(obs, prompt_facts)),
        prompt.identity,
    )
    return [(sample.sample_id, layer, value) for layer, value in quantity.finish(layer_values)]


def attach_method(loaded: LoadedModel, prompt: EncodedPrompt, method: ComparedMethod) -> Session:
    """Return a session in which `method` compresses the cache of the prompt."""
    from mmkv_bench.compression.session import attach

    options: dict[str, Any] = {"token_types": prompt.types, "identity": prompt.identity, "replay": prompt.words}
    return attach(loaded.model, method.compressor, method.budget, **options)


def kept_entries(loaded: LoadedModel, prompt: EncodedPrompt, method: ComparedMethod) -> list[torch.Tensor]:
    """Return the prompt's entries that a method keeps, per layer int64 ``[Hkv, m]``, padded with -1 if a head keeps
    fewer."""
    import torch

    with attach_method(loaded, prompt, method) as session, torch.no_grad():
        loaded.model(**prompt.inputs, use_cache=True, logits_to_keep=1, return_dict=True)
        return [layer[0].cpu() for layer in session.kept()]


def decoded_outputs(
    loaded: LoadedModel, prompt: EncodedPrompt, fed: torch.Tensor, method: ComparedMethod | None = None
) -> list[torch.Tensor]:
    """Feed n tokens after the prompt, one by one through stock `generate`. Return each decoder layer's outputs ``[n,
    E]``.

    method: method that compresses the cache; None: the full cache.
    """
    from contextlib import nullcontext

    import torch

    from mmkv_bench.families.facts import text_model

    blocks = text_model(loaded.model).layers
    outputs: list[list[torch.Tensor]] = [[] for _ in blocks]

    def record(layer: list[torch.Tensor], module: Any, args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if states.shape[1] == 1:
            layer.append(states[0].detach())

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [int(fed[min(len(ids) - prompt.length, len(fed) - 1)])]

    generate: Any = loaded.model.generate
    hooks = [block.register_forward_hook(partial(record, layer)) for block, layer in zip(blocks, outputs, strict=True)]
    try:
        with nullcontext() if method is None else attach_method(loaded, prompt, method), torch.no_grad():
            generate(**prompt.inputs, max_new_tokens=len(fed) + 1, do_sample=False, prefix_allowed_tokens_fn=allowed)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(layer) for layer in outputs]


def fed_tokens(loaded: LoadedModel, prompt: EncodedPrompt, tokens: int, endless: bool = False) -> torch.Tensor:
    """Return the full cache's greedy answer without its last token, to feed after the prompt, int64 ``[n]``, n >= 1.

    An answer of one token stays whole. endless: the answer has `tokens` tokens, because no token ends it.
    """
    import torch

    generate: Any = loaded.model.generate
    min_tokens = {"min_new_tokens": tokens} if endless else {}
    with torch.no_grad():
        sequence = generate(**prompt.inputs, max_new_tokens=tokens, do_sample=False, **min_tokens)
    answer: torch.Tensor = sequence[0, prompt.length :]
    return answer[:-1] if len(answer) > 1 else answer

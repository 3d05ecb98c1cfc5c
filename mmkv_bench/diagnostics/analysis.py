"""One analysis from beginning to end: samples of a dataset, one prefill each, every layer read, rows of `diagnostics`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.calibrate.samples import DatasetQuestion, DatasetQuestions, encoded
from mmkv_bench.errors import ConfigError
from mmkv_bench.store.files import canonical_json, checksum

PROCESSOR = ("min_pixels", "max_pixels", "max_prompt_tokens", "frames", "video_max_pixels")
"""Settings of a model that shape its prompts."""

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.compression.session import Session
    from mmkv_bench.config.schema import RunConfig
    from mmkv_bench.diagnostics.quantities import Value
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.models.source import Source

Row = tuple[str, int | None, "Value"]
"""Sample, layer, and a number of it."""


@dataclass(frozen=True)
class ComparedMethod:
    """A method at a budget, whose kept entries an analysis looks at. label: both, as `snapkv@64`; base: the family of its
    file; parameters: JSON."""

    label: str
    base: str
    compressor: Compressor
    budget: Budget
    parameters: str

    def settings(self) -> dict[str, Any]:
        """The settings that rows hold of it."""
        entries = self.budget.kind == "entries"
        return {
            "base": self.base,
            "reading": self.compressor.reading,
            "parameters": json.loads(self.parameters),
            "budget_kind": self.budget.kind,
            "budget": str(self.budget.entries) if entries else self.budget.fraction_text,
        }


@dataclass(frozen=True)
class AnalysisCounts:
    """Counts of an analysis: samples measured now, samples measured before, numbers written."""

    measured: int
    before: int
    numbers: int


def methods_of(config: RunConfig, fingerprint: str) -> list[ComparedMethod]:
    """Every method that evicts at every budget, under the first seed; `full` is there without being asked for.

    Args:
        config: of a run; fingerprint: of its model, whose calibrations are looked up.

    Raises:
        ConfigError: a method that cannot be built, or one of them that knows the answer beforehand.
    """
    from mmkv_bench.calibrate.artefact import Calibrations
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.methods.node import parameters_json
    from mmkv_bench.plan.cells import build_methods, method_entries

    compared = []
    for method in build_methods(method_entries(config), Calibrations(config.model.name, fingerprint)):
        if method.compressor.needs.answer:
            raise ConfigError(
                f"{method.name} reads the answer beforehand, so that what it keeps is not decided by a prompt"
            )
        for value in [] if method.compressor.unbudgeted else dict.fromkeys(config.budget):
            budget = Budget.parse(value)
            label = f"{method.name}@{budget}" + ("" if method.compressor.reading == "paper" else " released")
            plain = method.plain
            compared.append(
                ComparedMethod(
                    label, str(plain["base"]), method.compressor, budget, parameters_json(plain, method.decoding)
                )
            )
    return compared


def diagnose(
    name: str,
    model: Any,
    questions: DatasetQuestions,
    tokens: int,
    out: Path,
    methods: Callable[[str], Sequence[ComparedMethod]] | None = None,
) -> AnalysisCounts:
    """Measure and store, sample by sample; what the store has of the same model, prompts and methods is not measured again.

    Args:
        name: one of `quantities.QUANTITIES`; model: the `model` node of a run; tokens: of the full cache's own answer, at
            most, where the analysis looks at answers.
        methods: fingerprint of the model -> what an analysis of methods compares.

    Raises:
        MMKVError: a model or data that cannot be had, a prompt that the model does not read.
    """
    from mmkv_bench.models.source import Source
    from mmkv_bench.store.store import Store

    store, source = Store(out.expanduser()), Source.of(model)
    store.check_writable()
    fingerprint, _ = source.fingerprint()
    kept = [] if methods is None else methods(fingerprint)
    columns_of = measurements(name, source, questions, tokens, kept)
    done = store.diagnosed([one["measurement"] for one in columns_of.values()])

    def lacking(sample: str) -> list[str]:
        return [label for label, one in columns_of.items() if sample not in done[one["measurement"]]]

    before = [sample for sample in questions.ids if not lacking(sample)]
    if len(before) == len(questions.ids):
        return AnalysisCounts(0, len(before), 0)
    loaded = source.load()
    source.confirm(fingerprint)
    numbers = 0

    def take(sample: DatasetQuestion) -> None:
        nonlocal numbers
        labels = lacking(sample.sample_id)
        rows = layers_of(loaded, name, sample, tokens, [one for one in kept if one.label in labels])
        rows = [row for row in rows if _label(row[2], columns_of) in labels]
        if rows:
            store.write_diagnostics(table(columns_of, rows))
            numbers += len(rows)

    questions.each(loaded, take, before)
    if not numbers and not before:
        raise ConfigError(f"{name} says nothing of these samples: it needs text and images; choose others")
    return AnalysisCounts(len(questions.ids) - len(before), len(before), numbers)


def measurements(
    name: str, source: Source, questions: DatasetQuestions, tokens: int, kept: Sequence[ComparedMethod]
) -> dict[str, dict[str, str]]:
    """Label of a method -> the columns that all its rows share, `measurement` their hash; "" for numbers of no method. A number
    is of model, prompts and its own method, so that a further method or sample leaves the others as they are."""
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
    columns = {label: shared | {"settings": json.dumps(own, sort_keys=True)} for label, own in settings_of.items()}
    return {
        label: own | {"measurement": checksum(canonical_json(dict(own)).encode())} for label, own in columns.items()
    }


def _label(value: Value, told: Mapping[str, Any]) -> str:
    """The method that a number is of, "" for none."""
    return value.part if value.part in told else ""


def layers_of(
    loaded: LoadedModel, name: str, sample: DatasetQuestion, tokens: int, methods: Sequence[ComparedMethod] = ()
) -> list[Row]:
    """Numbers of one sample, layer by layer. Raises what preparing or reading its prompt raises."""
    from mmkv_bench.calibrate.layers import read_layers, with_answer
    from mmkv_bench.diagnostics.quantities import QUANTITIES, PromptFacts

    quantity, prompt = QUANTITIES[name], encoded(loaded, sample)
    inputs, types = prompt.inputs, prompt.types
    kept = {one.label: kept_entries(loaded, prompt, one) for one in methods} if quantity.methods else {}
    decoded: dict[str, list[torch.Tensor]] = {}
    if quantity.answer or quantity.decoding:
        answer = fed_tokens(loaded, prompt, tokens, quantity.endless)
        if quantity.decoding:
            decoded = {"full": decoded_outputs(loaded, prompt, answer)}
            decoded |= {one.label: decoded_outputs(loaded, prompt, answer, one) for one in methods}
        else:
            inputs, types = with_answer(inputs, types, answer)
    facts = PromptFacts(prompt.length, kept, decoded)
    layer_values = read_layers(
        loaded.model, inputs, types, quantity.needs, lambda obs: list(quantity.read(obs, facts)), prompt.identity
    )
    return [(sample.sample_id, layer, value) for layer, value in quantity.finish(layer_values)]


def attached(loaded: LoadedModel, prompt: EncodedPrompt, method: ComparedMethod) -> Session:
    """A session in which the method compresses the prompt."""
    from mmkv_bench.compression.session import attach

    return attach(loaded.model, method.compressor, method.budget, token_types=prompt.types, identity=prompt.identity)


def kept_entries(loaded: LoadedModel, prompt: EncodedPrompt, method: ComparedMethod) -> list[torch.Tensor]:
    """Entries of the prompt that a method keeps, per layer int64 ``[Hkv, m]``, -1 where a head keeps fewer."""
    import torch

    with attached(loaded, prompt, method) as session, torch.no_grad():
        loaded.model(**prompt.inputs, use_cache=True, logits_to_keep=1, return_dict=True)
        return [layer[0].cpu() for layer in session.kept()]


def decoded_outputs(
    loaded: LoadedModel, prompt: EncodedPrompt, fed: torch.Tensor, method: ComparedMethod | None = None
) -> list[torch.Tensor]:
    """Outputs of every decoder layer for the n tokens that are fed after the prompt, one by one through stock `generate`:
    ``[n, E]`` a layer; with the full cache, or compressed by a method."""
    from contextlib import nullcontext

    import torch

    from mmkv_bench.families.facts import text_model

    blocks = text_model(loaded.model).layers
    outputs: list[list[torch.Tensor]] = [[] for _ in blocks]

    def listen(place: list[torch.Tensor]) -> Callable[..., None]:
        def note(module: Any, args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            if states.shape[1] == 1:
                place.append(states[0].detach())

        return note

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [int(fed[min(len(ids) - prompt.length, len(fed) - 1)])]

    generate: Any = loaded.model.generate
    hooks = [block.register_forward_hook(listen(place)) for block, place in zip(blocks, outputs, strict=True)]
    try:
        with nullcontext() if method is None else attached(loaded, prompt, method), torch.no_grad():
            generate(**prompt.inputs, max_new_tokens=len(fed) + 1, do_sample=False, prefix_allowed_tokens_fn=allowed)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(place) for place in outputs]


def fed_tokens(loaded: LoadedModel, prompt: EncodedPrompt, tokens: int, endless: bool = False) -> torch.Tensor:
    """Tokens that decoding feeds after the prompt, int64 ``[n]``, n >= 1: the full cache's own greedy answer without its
    last one, which nobody reads; of an answer of one token that one. endless: it has `tokens` of them, since none ends it."""
    import torch

    generate: Any = loaded.model.generate
    least = {"min_new_tokens": tokens} if endless else {}
    with torch.no_grad():
        whole = generate(**prompt.inputs, max_new_tokens=tokens, do_sample=False, **least)
    answer: torch.Tensor = whole[0, prompt.length :]
    return answer[:-1] if len(answer) > 1 else answer


def table(told: Mapping[str, Mapping[str, str]], rows: Sequence[Row]) -> pa.Table:
    """Rows of one sample, each with the columns of its measurement (`measurements`)."""
    import pyarrow as pa

    samples, layers, values = zip(*rows, strict=True)
    columns: dict[str, Any] = {
        "sample_id": samples,
        "layer": pa.array(layers, pa.int64()),
        "head": pa.array([value.head for value in values], pa.int64()),
        "quantity": [value.quantity for value in values],
        "part": [value.part for value in values],
        "x": pa.array([value.x for value in values], pa.float64()),
        "value": pa.array([value.value for value in values], pa.float64()),
    }
    measured = [told[_label(value, told)] for value in values]
    return pa.table(columns | {name: [one[name] for one in measured] for name in measured[0]})

"""Samples of a dataset, with the prompts of a run, for calibrations and diagnostics."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.calibrate.samples import PromptSample, PromptSamples
from mmkv_bench.errors import CalibrationError, ConfigError, DataError

if TYPE_CHECKING:
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.evaluation.samples import Request
    from mmkv_bench.models.load import LoadedModel

KEYS = ("dataset", "datasets", "data")


class _EnoughError(Exception):
    """Signal that enough samples were taken."""


def of_dataset(
    overrides: Sequence[str],
    count: int,
    draw: int | None = None,
    instruction: str | None = None,
    calibrating: bool = True,
) -> PromptSamples:
    """Return `count` samples of one dataset with their prompts: the first samples, or random ones.

    Args:
        overrides: settings that name the dataset: `dataset=<name>`, `data=...`, `dataset.<key>=...`.
        draw: seed of a random draw; None takes the first samples.
        instruction: `LOW:HIGH`: take samples whose text has more than LOW and at most HIGH tokens; either may be empty.
        calibrating: the samples calibrate a method, so test pages are refused.

    Raises:
        ConfigError: other settings, no dataset or several, or a wrong `instruction`.
        CalibrationError: too few samples, or test pages.
        MissingDataError: the data are missing.
    """
    from mmkv_bench.evaluation.documents import sample_refs
    from mmkv_bench.evaluation.fingerprints import fingerprint
    from mmkv_bench.plan.identity import dataset_identity

    spec = _spec(overrides, calibrating)
    low, high = _bounds(instruction)
    if draw is not None and instruction:
        raise ConfigError(
            "--draw and --instruction exclude each other, because samples of a length are taken in order; leave one out"
        )
    refs = sample_refs(spec, None)
    if len(refs) < count:
        raise CalibrationError(
            f"{spec.dataset} has {len(refs)} samples, fewer than the {count} asked for; lower --samples"
        )
    drawn_refs = refs[:count] if draw is None else random.Random(draw).sample(refs, count)
    choice_text = f"the first {count} samples" if draw is None else f"{count} samples drawn with seed {draw}"
    if instruction:
        choice_text += f" with more than {low}{f' and at most {high}' if high else ''} tokens of text"
    settings: dict[str, Any] = {"dataset": spec.dataset, "dataset_fingerprint": fingerprint(spec), "split": spec.split}
    settings |= {"draw": draw} if draw is not None else {}
    settings |= {"instruction": instruction} if instruction else {}

    def each(loaded: LoadedModel, take: Callable[[PromptSample], None], without: Collection[str] = ()) -> None:
        def fits(request: Request) -> bool:
            text_parts = (part for turn in request.messages for part in turn["content"] if part["type"] == "text")
            text = "\n".join(part["text"] for part in text_parts)
            tokens = len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
            return tokens > low and (high is None or tokens <= high)

        if instruction:
            _take_samples(spec, count, take, fits=fits)
        else:
            wanted = {ref.doc_id for ref in drawn_refs if ref.sample_id not in without}
            _take_samples(spec, len(wanted), take, wanted, first=count if draw is None else None)

    ids = () if instruction else tuple(ref.sample_id for ref in sorted(drawn_refs, key=lambda ref: ref.doc_id))
    prompt = dataset_identity(spec, settings["dataset_fingerprint"]).prompt
    return PromptSamples(f"{choice_text} of {spec.dataset} (task {spec.name})", each, settings, ids, prompt)


def _spec(overrides: Sequence[str], calibrating: bool) -> TaskSpec:
    from mmkv_bench.config.compose import compose
    from mmkv_bench.datasets.sources import preflight
    from mmkv_bench.plan.planner import stay_offline, tasks_of

    for text in overrides:
        if text.partition("=")[0].partition(".")[0].lstrip("+") not in KEYS:
            raise ConfigError(
                f"{text} is not a setting of the samples; allowed: dataset=<name>, data=<source>, data.root=<folder> and "
                "dataset.<key>=<value>; give the model with flags"
            )
    if not any(text.partition("=")[0] == "dataset" for text in overrides):
        raise ConfigError("no dataset is given; give one with dataset=<name>")
    config = compose(overrides)
    specs = tasks_of(config.datasets, config.data)
    if len(specs) != 1:
        raise ConfigError(
            f"only one dataset can be measured at a time, but {', '.join(specs)} are {len(specs)}; name one"
        )
    stay_offline(config.model, specs)
    (spec,) = specs.values()
    preflight(spec)
    if calibrating and spec.is_pages and spec.split == "test":
        raise CalibrationError(
            f"{spec.dataset} has test pages, on which no method may be calibrated; set dataset.split=dev, or leave dataset= "
            "out to calibrate on pages drawn like the training pages"
        )
    return dataclasses.replace(spec, measures=("ppl",))  # so that requests come with the reference answer


def _bounds(instruction: str | None) -> tuple[int, int | None]:
    lowest, colon, highest = (instruction or ":").partition(":")
    if not colon or not all(text == "" or (text.isascii() and text.isdigit()) for text in (lowest, highest)):
        raise ConfigError(
            f"--instruction {instruction} is not a range of tokens; write LOW:HIGH, such as 100:500, :100 or 500:"
        )
    return int(lowest or 0), int(highest) if highest else None


def _take_samples(
    spec: TaskSpec,
    count: int,
    take: Callable[[PromptSample], None],
    wanted: Collection[int] | None = None,
    first: int | None = None,
    fits: Callable[[Request], bool] = lambda request: True,
) -> None:
    """Call `take` for `count` samples of a dataset for which `fits` is true.

    wanted: numbers of the documents to use; None: all. first: number of documents to search; None: all.

    Raises CalibrationError: too few such samples. DataError: a sample cannot be read.
    """
    from mmkv_bench.evaluation.generating import generate

    taken = 0

    def answered(request: Request) -> str:
        nonlocal taken
        if request.error:
            raise DataError(f"{request.error}; restore it, or choose other samples")
        if fits(request):
            media = request.images, request.videos
            take(PromptSample(request.sample_id, request.messages, *media, request.reference or ""))
            taken += 1
        if taken == count:
            raise _EnoughError
        return ""

    try:
        generate(spec, answered, first, lambda ref: wanted is None or ref.doc_id in wanted)
    except _EnoughError:
        return
    raise CalibrationError(
        f"{spec.dataset} has {taken} such samples, fewer than the {count} asked for; lower --samples"
    )

"""Run a calibration: load the model, measure the samples one by one, write the artefact."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import mmkv_bench
from mmkv_bench.calibrate.artefact import Artefact, committed, save
from mmkv_bench.calibrate.measurements import MEASUREMENTS
from mmkv_bench.calibrate.released_files import imported
from mmkv_bench.calibrate.samples import PromptSample, PromptSamples, described, page, pages, passages
from mmkv_bench.config.files import content
from mmkv_bench.config.files import options as config_options
from mmkv_bench.config.names import canonical, unavailable
from mmkv_bench.config.schema import Model
from mmkv_bench.errors import CalibrationError, ConfigError, nearest
from mmkv_bench.families.facts import model_facts
from mmkv_bench.models.load import LoadedModel, quiet_transformers
from mmkv_bench.models.source import Source
from mmkv_bench.store.files import check_folder
from mmkv_bench.tiny.pages import TASKS

if TYPE_CHECKING:
    import argparse


SHOW_EVERY = 10.0
"""Seconds between two lines of progress."""


def run(options: argparse.Namespace, questions: PromptSamples | None = None) -> Path:
    """Carry out `mmkv-bench calibrate`: measure or import an artefact, write it, and return its path.

    Args:
        options: options of the command line.
        questions: samples of a dataset, used instead of pages.

    Raises:
        MMKVError: the artefact cannot be written, which is checked before any work; the model cannot be loaded or measured,
            no sample is selected, or files cannot be imported.
    """
    _model(options)  # first, because the path follows from the model's canonical name
    _check_file(_file(options))
    artefact = imported_artefact(options) if options.imports else measured(options, questions)
    path = _file(options)
    try:
        return save(artefact, path)
    except OSError as error:
        raise CalibrationError(
            f"{path} cannot be written ({error.strerror or error}); free space there, or name another file with --out, and "
            "run the command again"
        ) from error


def _file(options: argparse.Namespace) -> Path:
    return options.out or committed(options.method, options.model or options.name)


def _check_file(path: Path) -> None:
    """Raise ConfigError if no file can be written to `path`. Nothing is left behind."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file in it, for example {path / 'artefact.json'}")
    check_folder(path.parent, 1 << 20, "folder of --out")


def measured(options: argparse.Namespace, questions: PromptSamples | None = None) -> Artefact:
    """Measure the samples that the options select, and return the artefact.

    questions: samples of a dataset, used instead of pages.
    """
    questions = questions or _samples(options)
    source = Source.of(_model(options))
    committed(options.method, source.settings.name)  # refuse a name that `auto` cannot find before any work
    quiet_transformers()
    torch.set_num_threads(options.threads)
    identity = _identity(source)
    loaded = source.load()
    source.confirm(identity["model_fingerprint"])
    measurement = MEASUREMENTS[options.method]
    settings: dict[str, Any] = {name: getattr(options, name) for name in measurement.options}
    values: list[Any] = []
    samples: list[str] = []
    start_time = shown = time.monotonic()

    def take(sample: PromptSample) -> None:
        nonlocal shown
        values.append(measurement.measure(loaded, sample, settings))
        samples.append(sample.sample_id)
        if time.monotonic() - shown > SHOW_EVERY:
            shown = time.monotonic()
            remaining_s = (shown - start_time) / len(samples) * (options.samples - len(samples))
            print(f"{len(samples)}/{options.samples} samples, about {remaining_s:.0f} s left", flush=True)

    questions.each(loaded, take)
    return Artefact.make(
        method=options.method,
        **identity,
        dataset=questions.described,
        samples=samples,
        settings={**settings, **questions.settings} | {"samples": len(samples), "dtype": loaded.dtype},
        data=measurement.summarise(values, settings, loaded.family.num_kv_heads),
    )


def imported_artefact(options: argparse.Namespace) -> Artefact:
    """Return the artefact made from a paper's released files. No weights are loaded."""
    source = Source.of(_model(options))
    committed(options.method, source.settings.name)
    quiet_transformers()
    released_fields = imported(options.method, options.imports, model_facts(source.described))
    return Artefact.make(method=options.method, **_identity(source), samples=[], **released_fields, digits=None)


def _identity(source: Any) -> dict[str, Any]:
    fingerprint, revision = source.fingerprint()
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {
        "model": source.settings.name,
        "model_fingerprint": fingerprint,
        "model_revision": revision,
        "versions": versions | {"mmkv_bench": mmkv_bench.__version__},
    }


def _samples(options: argparse.Namespace) -> PromptSamples:
    """Return the pages, or the passages of a text, that the options select.

    Raises:
        CalibrationError: an unknown kind of page, both pages and text, or no text; when pages are read, also a model
            that reads no images.
    """
    text_path, page_size, number_of_samples = getattr(options, "text", None), options.size, options.samples
    if text_path is not None and options.kinds:
        raise CalibrationError("--kinds selects pages, but --text replaces pages; give only one of the two options")
    if text_path is not None:

        def each_passage(loaded: LoadedModel, take: Callable[[PromptSample], None]) -> None:
            for passage in passages(loaded.tokenizer, text_path, options.tokens, number_of_samples):
                take(passage)

        return PromptSamples(described(text_path, options.tokens), each_passage)
    page_kinds = list(options.kinds or TASKS)
    for kind in page_kinds:
        if kind not in TASKS:
            raise CalibrationError(f"--kinds {kind} is not a kind of page; {nearest(kind, TASKS)}")
    page_arguments = pages(page_kinds, page_size, options.split, number_of_samples)

    def each_page(loaded: LoadedModel, take: Callable[[PromptSample], None]) -> None:
        if not loaded.family.multimodal:
            alternative = "give --text <folder with *.txt files>" if "text" in options else "choose a multimodal model"
            raise CalibrationError(f"{loaded.family.name} reads no images, but pages are images; {alternative}")
        for place in page_arguments:
            take(page(*place))

    return PromptSamples(f"{page_size} {options.split} pages of the kinds {', '.join(page_kinds)}, in turn", each_page)


def _model(options: argparse.Namespace) -> Model:
    """Return the `model` settings of the options, and replace `options.model` by its canonical name.

    Raises:
        CalibrationError: the name is not in conf/model.
    """
    device_settings = {"dtype": options.dtype, "device": options.device}
    if options.model is None:
        return Model(name=options.name, path=options.path, revision=options.revision, **device_settings)
    model_names = config_options("model")
    options.model = canonical("model", options.model)
    if options.model not in model_names and (model := unavailable(options.model)) is not None:
        raise CalibrationError(model.sentence(options.model))
    if options.model not in model_names:
        raise CalibrationError(f"--model {options.model} is not in conf/model; {nearest(options.model, model_names)}")
    values = content("model", options.model) | {"weights": options.weights, "layers": options.layers}
    return Model(**values | device_settings)

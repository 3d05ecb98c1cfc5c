"""Everything that runs a model gives on the second device what it gives on the CPU, and mixes no tensors of the two.

Results are compared whole: answers, kept entries and their digests, bytes, fallbacks, fidelity; only times and peaks differ.
"""

from __future__ import annotations

import functools

import pytest
import torch

from mmkv_bench.api.attached_model import attach
from mmkv_bench.calibrate.artefact import METHODS as CALIBRATED
from mmkv_bench.calibrate.command import measured
from mmkv_bench.cli.grammar import reader
from mmkv_bench.cli.verbs.measure import with_defaults
from mmkv_bench.generation.fidelity import ExtraMeasures
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.protocols import NAMES, WHOLE, protocol
from tests import zoo
from tests.generation import common
from tests.second_device import Far, far, second_device, there

EVERYTHING = ExtraMeasures(True, (3, 4, 5), True)
KINDS = ("full", "h2o_decode", "hybridkv", "kivi_prefixkv", "look_m", "mmshift_adakv")
"""Methods that score, divide, reduce, store and act while decoding, each in another way."""


def cells(family: str, names: tuple[str, ...] | None = None, turns: bool = False) -> list[CellSpec]:
    """Methods under every protocol that the family's prompt has; `turns`: each under one of them, in turn."""
    protocols = [name for name in NAMES if not protocol(name).streams] if family in zoo.MULTIMODAL else WHOLE
    methods = common.registry("paper", family)
    methods = methods if family in zoo.MULTIMODAL else common.for_text(methods)
    chosen = [made for name, made in methods.items() if names is None or name in names]
    assert names is None or len(chosen) == len(names)
    return [
        common.cell(made, None if made.unbudgeted else 6, protocol, 0, f"{made.name}/{protocol}/{number}")
        for number, made in enumerate(chosen)
        for protocol in (protocols[number % len(protocols) :][:1] if turns else protocols)
    ]


def assert_as_on_the_cpu(family: str, asked: list[CellSpec], run) -> None:
    """`run(model, prompt, cells)` -> results, the same on both; failures too, word for word."""
    model, prompt = zoo.model(family), common.encoded(family)
    expected = run(model, prompt, asked)
    with second_device() as device:
        found = run(there(model), far(prompt), asked)
        assert device.memory.peak().allocated > 0 and device.waits > 0
    common.assert_same(found, expected)
    assert sum(one.status == "ok" for one in found) >= 0.8 * len(found), "refused combinations are the exception"
    for one in found:
        assert one.peak_device_bytes > 0 and one.peak_resident_bytes is None


def shared(family: str, extras: ExtraMeasures):
    return lambda model, prompt, asked: common.together(
        model, family, prompt, asked, common.rules(model, 4), extras=extras
    )


def apart(family: str):
    return lambda model, prompt, asked: common.alone(model, family, prompt, asked, common.rules(model, 4))


@pytest.mark.full
def test_ways_of_compressing_fork_and_are_measured_as_on_the_cpu():
    assert_as_on_the_cpu("qwen2_5_vl", cells("qwen2_5_vl", KINDS, turns=True), shared("qwen2_5_vl", EVERYTHING))


@pytest.mark.slow
def test_ways_of_compressing_run_alone_as_on_the_cpu():
    assert_as_on_the_cpu("llava", cells("llava", ("hybridkv", "kivi", "oracle"), turns=True), apart("llava"))


@pytest.mark.full
@pytest.mark.parametrize("family", zoo.ALL)
def test_every_method_and_protocol_of_every_family_forks_and_is_measured_as_on_the_cpu(family):
    assert_as_on_the_cpu(family, cells(family), shared(family, EVERYTHING))


@pytest.mark.full
@pytest.mark.parametrize("family", zoo.FEW)
def test_every_method_and_protocol_runs_alone_as_on_the_cpu(family):
    assert_as_on_the_cpu(family, cells(family), apart(family))


@pytest.mark.full
@pytest.mark.parametrize("reading", ["released"])
def test_released_readings_fork_as_on_the_cpu(reading):
    for family in ("qwen2_5_vl", "llava"):
        methods = common.registry(reading, family).values()
        asked = [common.cell(made, None if made.unbudgeted else 6, name=made.name) for made in methods]
        assert_as_on_the_cpu(family, asked, shared(family, EVERYTHING))


def test_stock_generate_with_a_method_attached_answers_as_on_the_cpu():
    model, inputs = zoo.model("llava"), zoo.prompt("llava")
    compressor = common.registry("paper", "llava")["adakv"]

    def answer(one, given):
        with attach(one, compressor, budget=8):
            return one.generate(**given, max_new_tokens=3, do_sample=False)

    expected = answer(model, inputs)
    with second_device():
        found = answer(there(model), far(inputs))
        assert isinstance(found, Far) and torch.equal(found.cpu(), expected)


def calibration(method: str, *words: str) -> dict:
    return measured(
        with_defaults(reader("calibrate")[1].read((method, "--samples", "1", "--kinds", "lookup", *words)))
    ).data


@pytest.mark.full
@pytest.mark.parametrize("method", CALIBRATED)
def test_calibration_measures_the_same_there(method):
    with second_device() as device:
        found = calibration(method, "--device", "cuda")
        assert device.memory.peak().allocated > 2**20
    assert found == calibration(method)


@functools.cache
def hybrid():
    return common.registry("paper", "qwen2_5_vl")["hybridkv"]


@pytest.mark.slow
def test_dynamic_heads_keep_their_pages_on_the_host_and_fetch_through_pinned_buffers():
    model, prompt = zoo.model("qwen2_5_vl"), common.encoded("qwen2_5_vl")
    with second_device() as device:
        (found,) = apart("qwen2_5_vl")(there(model), far(prompt), [common.cell(hybrid(), 6)])
        assert found.status == "ok" and found.bytes_host > 0
        assert len(device.buffers) >= 2 and not any(isinstance(one, Far) for one in device.buffers)
        pages = sum(one.nbytes for one in device.buffers if one.dtype != torch.int64)  # the others hold rows' numbers
        assert pages == found.bytes_host
        assert device.lanes >= 3 * zoo.LAYERS, "a lane for every step of every layer"
        assert 0 < found.bytes_moved_step < found.bytes_host


@pytest.mark.slow
def test_what_methods_take_is_timed_by_the_devices_clock():
    """Kernels run behind the host's back: a time that was not waited for is that of giving them work."""
    model, prompt = zoo.model("qwen2_5_vl"), common.encoded("qwen2_5_vl")
    asked = [common.cell(common.registry("paper", "qwen2_5_vl")[name], 6) for name in ("snapkv", "streamingllm")]
    waits = []
    with second_device() as device:
        moved, inputs = there(model), far(prompt)
        for some in (asked[:1], asked):
            before = device.waits
            shared("qwen2_5_vl", ExtraMeasures())(moved, inputs, some)
            waits.append(device.waits - before)
    assert waits[1] - waits[0] == 2 * zoo.LAYERS + 2, "around the scores of each layer, and around the selection"


def test_a_cell_that_runs_out_of_the_devices_memory_fails_alone():
    model, prompt = zoo.model("qwen2_5_vl"), common.encoded("qwen2_5_vl")
    asked = cells("qwen2_5_vl", ("snapkv", "streamingllm"))[:1]
    with second_device() as device:
        moved, inputs = there(model), far(prompt)
        (fine,) = shared("qwen2_5_vl", ExtraMeasures())(moved, inputs, asked)
        assert fine.status == "ok" and fine.peak_device_bytes >= device.memory.held().allocated > 0
        device.memory.limit = device.memory.held().allocated + 10_000  # less than one layer's states
        (lost,) = shared("qwen2_5_vl", ExtraMeasures())(moved, inputs, asked)
        assert lost.status == "oom" and "CUDA out of memory" in lost.error
        assert device.memory.held().reserved < fine.peak_device_bytes, "what was reserved was given back"
        device.memory.limit = None
        assert shared("qwen2_5_vl", ExtraMeasures())(moved, inputs, asked)[0].status == "ok"

"""Fused statistics: in Triton's interpreter, and compiled for devices that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mmkv_bench.compression.numerics.attention import column_sums
from mmkv_bench.compression.numerics.proxies import group_votes
from mmkv_bench.devices import Cuda
from tests.each import each

INTERPRETED = Path(__file__).with_name("fused_in_interpreter.py")
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed; its wheels are for Linux, with torch's for CUDA"
)
SHARED = 99 * 1024  # bytes that a program may have on the consumer devices of compute capability 8.6 and 8.9


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("which", ["not full", "full"])
def test_kernels_equal_the_definitions_in_float64(which):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    root = INTERPRETED.parents[2]
    ended = subprocess.run([*command, str(INTERPRETED)], cwd=root, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout and "skipped" not in ended.stdout


@pytest.mark.full
def test_a_dry_run_on_a_device_with_kernels_starts_none(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode  # seconds

    monkeypatch.setattr(Cuda, "fuses", True)
    with FakeTensorMode():
        query = torch.empty(28, 512, 128, device="cuda", dtype=torch.bfloat16)
        key = torch.empty(4, 32768, 128, device="cuda", dtype=torch.bfloat16)
        sums, votes = column_sums(query, key, 0.1, 32256), group_votes(query, key, 0.1, 32, 0.95)
    for made in (sums, votes):
        assert (made.shape, made.dtype, str(made.device)) == ((4, 32768), torch.float32, "cuda:0")


@needs_triton
@pytest.mark.full
@each(
    "capability, dtypes, dim",
    [
        (80, ("bf16", "bf16"), 128),
        (80, ("fp16", "fp16"), 80),
        (80, ("fp32", "bf16"), 128),  # proxies are float32 whatever the model is
        (90, ("bf16", "bf16"), 256),
    ],
)
def test_kernels_compile_for_devices_of_two_generations(monkeypatch, tmp_path, dtypes, dim, capability):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mmkv_bench.compression.numerics import fused, fused_kernels

    names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    query, key = (torch.empty(heads, 512, dim, dtype=names[name]) for heads, name in zip((14, 2), dtypes, strict=True))
    shape = fused._kernel_constants(query, key, 512)
    search = {"LEFT": True, "BLOCK": fused.BLOCK}
    given = {
        "row_softmax": {**shape, "CAUSAL": True},
        "column_sums": shape,
        "group_mass": {**shape, "ROWS": 16, "MEMBERS": 7},
        **({"covering_set": search, "votes": {"BLOCK": 256}} if dim == 128 else {}),
    }
    types = {"QUERY": f"*{dtypes[0]}", "KEY": f"*{dtypes[1]}", "TARGET": "*fp64", "HIGHEST": "*i32", "CUT": "*i32"}
    for name, constants in given.items():
        kernel = getattr(fused_kernels, name)
        usual = {one: "*fp32" if one.isupper() else "fp32" if one == "scale" else "i32" for one in kernel.arg_names}
        signature = {**usual, **{one: types[one] for one in usual if one in types}}
        signature.update(dict.fromkeys(constants, "constexpr"))
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=fused._OPTIONS)
        assert made.asm["cubin"] and made.metadata.shared <= SHARED, name

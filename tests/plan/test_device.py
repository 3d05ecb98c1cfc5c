"""A GPU that is asked for and not there: what the run would need is said before any work."""

from __future__ import annotations

import pytest
import torch

from mmkv_bench.cli.main import main
from mmkv_bench.devices import kind_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.mark.full
def test_without_a_gpu_the_gpu_run_says_what_it_needs(capsys, tmp_path):
    assert main(["experiment=gpu", f"out={tmp_path / 'rows'}"]) == 2
    said = capsys.readouterr().err
    assert "no CUDA device" in said and "more than 15.4 GiB" in said and "model.layers=2 model.device=cpu" in said
    assert not (tmp_path / "rows").exists()


def test_auto_and_a_wanted_gpu_come_to_cpu_where_there_is_none():
    assert {kind_of(setting) for setting in ("auto", "cpu", "cuda")} == {"cpu"}

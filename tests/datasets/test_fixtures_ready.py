"""Every fixture has what its dataset's task reads: columns of the upstream schema, rows, and each video it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mmkv_bench.datasets import fixtures
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.evaluation.data_check import check

CONF = Path(__file__).parents[2] / "conf" / "dataset"


@pytest.mark.parametrize("name", fixtures.names())
def test_the_fixture_of_a_dataset_is_complete(name):
    node = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    found = check(spec_from_config(name, node, {"source": "fixture"}), node["about"])
    assert (found.missing, found.notes) == ([], []) and found.rows >= 2

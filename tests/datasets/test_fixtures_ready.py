"""Every fixture has what its dataset's task reads: columns of the upstream schema, rows, and each video it names."""

from __future__ import annotations

import pytest

from mmkv_bench.config.files import content
from mmkv_bench.datasets import fixtures
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.evaluation.data_check import check
from tests.each import each
from tools.fixtures import makers


@pytest.mark.slow
@each("name", fixtures.names(), keep=24)
def test_the_fixture_of_a_dataset_is_complete(name):
    node = content("dataset", name)
    found = check(spec_from_config(name, node, {"source": "fixture"}), node["about"])
    assert (found.missing, found.notes) == ([], []) and found.rows >= 2


def test_every_maker_has_its_archive():
    assert set(fixtures.names()) == set(makers())

"""What a dataset adds to the identity of its cells."""

from __future__ import annotations

from pathlib import Path

import yaml

from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.plan.identity import dataset_identity

MUIRBENCH = Path(__file__).parents[2] / "conf" / "dataset" / "muirbench.yaml"


def prompt_of(**changes):
    node = yaml.safe_load(MUIRBENCH.read_text()) | changes
    return dataset_identity(spec_from_config("muirbench", node, {"source": "fixture"})).prompt


def test_the_places_of_images_are_part_of_a_cells_identity():
    uses = [prompt_of(placeholders=use) for use in ("interleave", "remove", "keep")]
    assert len({str(use) for use in uses}) == 3
    assert uses[2].keys() == {"task", "size", "split"}, "datasets without the setting keep the identity they had"

"""Which tasks a configuration asks, and under which labels its rows name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError
from mmkv_bench.models.source import HUB, Source

if TYPE_CHECKING:
    from mmkv_bench.config.schema import RunConfig
    from mmkv_bench.datasets.task_spec import TaskSpec


def tasks_of(config: RunConfig) -> dict[str, TaskSpec]:
    """Dataset label -> task, in the order of the configuration. The label tells page size and split, so that two of them
    never share a table.

    Raises:
        ConfigError: a dataset twice, or one whose settings make no task.
    """
    from mmkv_bench.datasets.specs import spec_from_config

    specs: dict[str, TaskSpec] = {}
    for name, node in config.datasets.items():
        spec = spec_from_config(str(name), dict(node), vars(config.data))
        if spec.dataset in specs:
            raise ConfigError(f"datasets.{name} is {spec.dataset}, which this run has already; drop one of the two")
        specs[spec.dataset] = spec
    return specs


def labelled(config: RunConfig, labels: Iterable[str]) -> RunConfig:
    """The configuration with its datasets under these labels."""
    return config.updated(datasets=dict(zip(labels, config.datasets.values(), strict=True)))


def stay_offline(config: RunConfig, specs: Mapping[str, TaskSpec]) -> None:
    """Keep the Hugging Face libraries from asking a hub where nothing of this run is there; before they are imported."""
    from mmkv_bench.evaluation.environment import go_offline

    if all(spec.offline for spec in specs.values()) and Source.of(config.model).kind != HUB:
        go_offline()

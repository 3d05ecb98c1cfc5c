"""`samples=[id, ...]`: single samples of a run's datasets, wherever they stand in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.config.schema import RunConfig
    from mmkv_bench.datasets.task_spec import TaskSpec
    from mmkv_bench.evaluation.contract import SampleRef


def chosen(refs: Sequence[SampleRef], config: RunConfig) -> list[SampleRef]:
    """Those that the configuration asks for by their ids; all where it names none."""
    if config.samples is None:
        return list(refs)
    wanted = {*config.samples}
    return [ref for ref in refs if ref.sample_id in wanted]


def reaching(config: RunConfig, specs: Mapping[str, TaskSpec]) -> RunConfig:
    """The configuration with a limit that reaches as far as the samples that it names; as it is where it names none.

    Args:
        specs: of its datasets; those that are not pages are opened.

    Raises:
        ConfigError: a sample that is in none of the datasets, a dataset that has none of the samples.
    """
    if config.samples is None:
        return config
    from mmkv_bench.evaluation.documents import sample_refs

    wanted, known, last = config.samples, set[str](), 0
    for label, spec in specs.items():
        refs = sample_refs(spec, None)
        own = chosen(refs, config)
        if not own:
            raise ConfigError(
                f"samples={_words(wanted)}: {label} has none of these, {_near(wanted[0], refs)}; name one of its samples, or "
                "leave the dataset out"
            )
        known |= {ref.sample_id for ref in own}
        last = max(last, *(ref.doc_id for ref in own))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        every = [ref for spec in specs.values() for ref in sample_refs(spec, None)]
        raise ConfigError(f"samples: {unknown[0]!r} is in no dataset of this run; {_near(unknown[0], every)}")
    return config.updated(limit=last + 1)


def _near(name: str, refs: Sequence[SampleRef]) -> str:
    close = get_close_matches(name, [ref.sample_id for ref in refs], n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"its samples are called {refs[0].sample_id!r} to {refs[-1].sample_id!r}"


def _words(names: Sequence[str]) -> str:
    return f"[{','.join(names[:3])}{',...' if len(names) > 3 else ''}]"

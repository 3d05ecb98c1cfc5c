"""Promise: `${...}` that leads nowhere is one sentence that names the key, wherever it stands."""

from __future__ import annotations

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.errors import ConfigError
from tests.each import each

NOWHERE = (
    "out=runs/${oc.env:MMKV_NOT_SET}", "budget=${x}", "budget=[16,${x}]", "budget=${budget}", "budget=${nope:1}",
    "model.path=${oc.env:MMKV_NOT_SET}", "model.shape=${x}", "out='???'", "datasets.pages.split=${x}", "data.root=${x}",
    "methods.snapkv.scorer.window=${..nope}", "methods.snapkv.reading=${x}",
    "methods.custom.args.key=${oc.env:MMKV_NOT_SET}", "variants.a=${x}", "variants.a={base: ${x}}",
    "variants.a={base: snapkv, window: ${.nope}}", "seed=${x}", "protocol=${x}", "shard=${x}", "stage=${x}",
    "retry=${x}", "retry=[oom,${x}]", "fork_memory=${x}", "logger.project=${x}", "judge.url=${x}", "reading=${x}",
)  # fmt: skip


@pytest.mark.slow
@each("override", NOWHERE)
def test_an_interpolation_that_leads_nowhere_is_one_sentence(override, monkeypatch):
    monkeypatch.delenv("MMKV_NOT_SET", raising=False)
    with pytest.raises(ConfigError, match=f"^{override.split('=')[0].split('{')[0]}.* has no value") as refused:
        compose(["method=[snapkv,custom]", "dataset=pages", override])
    assert "\n" not in str(refused.value)


def test_interpolations_are_settled_once(monkeypatch):
    monkeypatch.setenv("MMKV_SET", "here")
    words = (
        "out=runs/${oc.env:MMKV_SET}",
        "logger.project=${model.name}",
        "variants.a={base: snapkv, window: ${limit}}",
    )
    config = compose(["dataset=pages", "method=snapkv", "limit=7", *words])
    monkeypatch.setenv("MMKV_SET", "elsewhere")
    assert (config.out, config.logger.project, config.variants["a"]["window"]) == ("runs/here", "tiny", 7)

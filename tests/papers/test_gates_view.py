"""Promise: the gates of conf/model are a view of the printed numbers: none is typed twice, and each is a table's full cache."""

from __future__ import annotations

import pytest
import yaml

from mmkv_bench.config.files import conf_dir, content, filled, options
from mmkv_bench.errors import ConfigError
from mmkv_bench.papers import printed
from mmkv_bench.papers.margins import margin


def test_no_model_file_types_a_printed_number():
    written = 0
    for file in (conf_dir() / "model").glob("*.yaml"):
        for gate in yaml.safe_load(file.read_text(encoding="utf-8")).get("gates") or []:
            assert {*gate} - {"as"} in ({"dataset", "metric", "printed"}, {"group", "printed"}), file
            written += 1
    assert written == 130


def test_every_gate_is_what_its_table_prints_for_the_full_cache():
    rows = printed.load()
    full = rows[(rows["method"] == "full") & rows["number"].notna()]
    known = {}
    for row in full.to_dict("records"):
        if row["status"] != printed.CLAIM:
            at = printed.printed_address(row)
            source = f"{printed.table_id(row['paper'], row['table'])}"
            known.setdefault((source, at.dataset, at.metric), set()).add(row["number"])
    checked = 0
    for model in options("model"):
        gates = content("model", model).get("gates") or []
        asked = yaml.safe_load((conf_dir() / "model" / f"{model}.yaml").read_text(encoding="utf-8")).get("gates") or []
        for gate, told in zip(gates, asked, strict=True):
            dataset, metric = gate.get("dataset", gate.get("group")), gate.get("metric", "mean")
            assert gate["expected"] in known[told["printed"], dataset, metric]
            own = margin(dataset, metric)
            assert (gate["tolerance"], gate["scale"]) == (own.gate or own.margin, own.scale)
            checked += 1
    assert checked == 130


def test_a_gate_of_what_a_table_does_not_print_is_one_sentence():
    with pytest.raises(ConfigError, match=r"conf/model/m.yaml: mmshift_table01 prints 0 scores of the full cache"):
        filled("m", [{"dataset": "docvqa", "metric": "anls", "printed": "mmshift_table01"}])
    with pytest.raises(ConfigError, match="no printed numbers of mmshift_table99"):
        filled("qwen2_5_vl_7b", [{"dataset": "docvqa", "metric": "anls", "printed": "mmshift_table99"}])
    own = [{"dataset": "docvqa", "metric": "anls", "expected": 1.0}]
    assert filled("m", own) == own and filled("m", None) is None, "gates of a user's own file stay as they are"

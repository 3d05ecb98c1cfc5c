"""Promise: what may be written shorter is what it stands for, on a command line and for Hydra; all else is refused in words."""

from __future__ import annotations

import shlex

import pytest

from mmkv_bench.config.compose import by_hydra, compose, for_hydra
from mmkv_bench.config.names import tables
from mmkv_bench.errors import ConfigError
from tests import cover
from tests.each import each

QUALIFIED = "method=[] 'variants.mine={base: custom, path: a b/mine.py}'"


@cover.few(
    ("short", "long"),
    [
        ("'method=a b/mine.py'", QUALIFIED),
        ("'method=[snapkv,a b/mine.py]'", QUALIFIED.replace("[]", "[snapkv]")),
        ("'method=a b/mine.py' methods.mine.args.x=2", QUALIFIED + " variants.mine.args.x=2"),
        ("'method=a b/mine.py' 'methods.mine={window: 4}'", QUALIFIED + " variants.mine.window=4"),
        ("'method=a b/mine.py' mine.reading=released", QUALIFIED + " variants.mine.reading=released"),
        ("snapkv.window=8 method=snapkv", "methods.snapkv.window=8 method=snapkv"),
        ("dataset=pages_walk pages_walk.count=3", "dataset=pages_walk datasets.pages_walk.count=3"),
        ("model=some/model", "model=hf model.path=some/model"),
        ("model=./here", "model=hf model.path=./here"),
        ("model=Qwen/Qwen2.5-VL-7B-Instruct", "model=qwen2_5_vl_7b"),
        ("method=SnapKV", "method=snapkv"),
        ("method=[LOOK-M,Ada_KV,MM-ShiftKV]", "method=[look_m,adakv,mmshift]"),
        ("model=llava-1.5-7b", "model=llava_v1_5_7b"),
        ("model=Qwen2.5-VL-7B-Instruct dataset=docvqa_val", "model=qwen2_5_vl_7b dataset=docvqa"),
        ("method=snapkv method.window=8", "method=snapkv methods.snapkv.window=8"),
        ("dataset=DREAM-1K", "dataset=dream1k"),
        ("dataset=MileBench", "experiment=milebench out=runs/default"),
        ("methods=[snapkv,meda] seeds=[1,2] torch_dtype=bf16", "method=[snapkv,meda] seed=[1,2] model.dtype=bfloat16"),
        ("model=some/model model.revision=v2", "model=hf model.path=some/model model.revision=v2"),
    ],
    keep=3,
)
def test_a_short_form_composes_to_what_it_stands_for(short, long):
    words = shlex.split(short)
    assert compose(words) == compose(shlex.split(long))
    assert by_hydra(for_hydra(words)).methods == compose(words).methods


def test_a_folder_is_a_model_only_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "tiny").mkdir()
    assert compose(["model=checkpoint"]).model.path == "checkpoint"
    assert compose(["model=tiny"]).model.name == "tiny"
    with pytest.raises(ConfigError, match="unknown model 'chekpoint'"):
        compose(["model=chekpoint"])


@each(
    ("words", "said"),
    [
        ("method=SnapKw", "unknown method 'SnapKw'; did you mean 'snapkv'"),
        ("method=VL-Cache", "unknown method 'VL-Cache'; it is none of the"),
        ("model=InternVL2_5-8B", "any other checkpoint of a supported family is `model=<folder or org/name>`"),
        (
            "model=qwen2_5_vl",
            "did you mean 'qwen2_5_vl_32b' or 'qwen2_5_vl_3b' or 'qwen2_5_vl_72b' or 'qwen2_5_vl_7b'?",
        ),
        ("dataset=demo", "write `experiment=demo`"),
        ("method=all", "`experiment=methods`"),
        ("method=*", "`experiment=methods`"),
        ("compression_ratio=0.9", "write `budget=10%`"),
        ("compression_ratio=8", "write the share as `budget=10%`"),
        ("snapkv.window=8", "choose it with 'method=[mmshift,snapkv]'"),
        ("snapkw.window=8", "unknown key 'snapkw'; did you mean 'snapkv'"),
        ("method=[a/x.py,b/x.py]", "are both the method 'x'"),
        ("method=[x.py,x.py]", "are both the method 'x'"),
        ("method=snapkv.py", "snapkv is the name of another method"),
        ("method=2nd.py", "'2nd' cannot be a method's name"),
        ("method=mine.py 'variants.mine={base: snapkv}'", "variants.mine are two methods with one name"),
        ("method=mine.py mine.power=2", "write methods.mine.args.power=2"),
        ("method=mine.py,snapkv", "'method=[mine.py,snapkv]' (one run"),
        ("model=a/b,c/d", "write model=hf -m model.path=a/b,c/d"),
    ],
)
def test_what_no_short_form_is_gets_the_words_that_help(words, said):
    for read in (compose, for_hydra):
        if read is compose or "," in words.partition("=")[2].strip("[]"):
            with pytest.raises(ConfigError) as refused:
                read(shlex.split(words))
            assert said in str(refused.value), read


def test_a_papers_table_is_meant_by_its_words():
    for words in ("MM-ShiftKV Table 1", "mmshift table01", "mmshift_table1", "MMShiftKV tab. 1"):
        assert tables(words) == ["mmshift_table01"]
    assert len(tables("MM-ShiftKV")) > 10 and tables("table 99") == tables("snapkv") == tables("x table 1") == []
    assert {name.partition("_")[2] for name in tables("figure 4")} == {"fig04"}

"""Overrides -> configuration: every shipped file, every spelling the documentation shows, every typo refused."""

from __future__ import annotations

import shlex
from itertools import product

import pytest
import yaml

from mmkv_bench.cli.grammar import overrides_of, reader, split
from mmkv_bench.config import compose as composing
from mmkv_bench.config.compose import compose, expand_sweep, for_hydra, method_defaults
from mmkv_bench.config.files import conf_dir, content, groups, options
from mmkv_bench.config.overrides import parse
from mmkv_bench.config.schema import LIST_GROUPS
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods.build import OUTSIDE, build_compressor
from mmkv_bench.methods.node import PARTS
from mmkv_bench.plan.validate import validate
from tests.each import each
from tests.plan.setting import MODEL

METHODS = ("expected_attention", "full", "keydiff", "mmshift", "random", "snapkv", "streamingllm")


def chosen(*overrides: str):
    config = compose(overrides)
    return list(config.methods), list(config.datasets)


PLANNED = ("model", "experiment", *LIST_GROUPS)
"""Groups whose files `tests/plan/test_plan.py` composes, validates and plans."""


@pytest.mark.slow
@each(("group", "name"), [(group, name) for group in groups() if group not in PLANNED for name in options(group)])
def test_every_shipped_file_composes_resolves_and_validates(group, name):
    model = MODEL
    if "weights: random" in yaml.safe_dump(content(group, name)):
        model = ["model=qwen2_5_vl_7b"]  # random weights need a model with a shape
    config = compose([f"{group}={name}", *model])
    validate(config)


@pytest.mark.full
@each("group", LIST_GROUPS)
def test_every_shipped_method_and_dataset_composes_resolves_and_validates_under_its_own_name(group):
    names = options(group)
    own = [f"methods.custom.path={conf_dir().parent / 'examples' / 'value_norm.py'}"] if group == "method" else []
    config = compose([f"{group}=[{','.join(names)}]", *own, *MODEL])
    assert list(getattr(config, f"{group}s")) == list(names)
    validate(config)


@pytest.mark.slow
def test_every_shipped_method_is_built():
    nodes = method_defaults(sorted(set(options("method")) - set(OUTSIDE)))
    for name, reading in product(nodes, ("paper", "released")):
        compressor = build_compressor(name, nodes[name], reading)
        assert compressor.is_full == (name == "full"), (name, reading)
        if not compressor.is_full:
            assert compressor.reading == reading
            needed = [part for part in PARTS if part != "scorer" or not compressor.unbudgeted]
            assert all(getattr(compressor, part) is not None for part in needed), (name, reading)


def test_the_methods_of_the_first_release_are_all_there():
    assert set(METHODS) <= set(options("method"))


def test_the_demo_runs_all_seven_methods_at_three_budgets_on_two_tasks():
    config = compose(["experiment=demo"])
    assert sorted(config.methods) == sorted(METHODS)
    assert len(config.budget) == 3
    assert sorted(config.datasets) == ["pages_lookup", "pages_walk"]


def test_every_released_value_belongs_to_a_parameter_of_its_method():
    for name in options("method"):
        node = content("method", name)
        for key in node["released"]:
            parent, _, leaf = key.rpartition(".")
            holder = node[parent] if parent else node
            assert leaf in holder, (name, key)


@pytest.mark.slow
@each(
    ("overrides", "methods", "datasets"),
    [
        ((), ["mmshift"], ["pages"]),
        (("method=snapkv",), ["snapkv"], ["pages"]),
        (("method=[full,snapkv,mmshift]",), ["full", "snapkv", "mmshift"], ["pages"]),
        (("+method=snapkv",), ["mmshift", "snapkv"], ["pages"]),
        (("dataset=pages_walk",), ["mmshift"], ["pages_walk"]),
        (("dataset=[pages_walk,pages_lookup]",), ["mmshift"], ["pages_walk", "pages_lookup"]),
        (("experiment=demo", "method=full"), ["full"], ["pages_walk", "pages_lookup"]),
    ],
)
def test_methods_and_datasets_are_chosen_singly_or_as_a_list(overrides, methods, datasets):
    assert chosen(*overrides) == (methods, datasets)


def test_variants_given_all_at_once_are_refused_with_the_way_that_works():
    for plus in ("", "+"):
        with pytest.raises(ConfigError, match=r"variants are given one by one; allowed: 'variants\.<name>="):
            compose([f"{plus}variants={{x: {{base: snapkv, window: 8}}}}"])


@each("page", sorted((conf_dir().parent / "docs").glob("*.md")))
def test_the_command_lines_of_the_docs_compose(page):
    start = "    python -m mmkv_bench "
    for line in page.read_text().splitlines():
        if line.startswith(start):
            verb, words = split(shlex.split(line.removeprefix(start), comments=True))
            given = reader(verb)[1].read(words)
            if verb == "run":
                compose(overrides_of(given))


def test_method_parameters_are_overridden_in_place():
    config = compose(["method=snapkv", "methods.snapkv.window=16"])
    node = config.resolved["methods"]["snapkv"]
    assert (node["scorer"]["window"], node["selector"]["window"]) == (16, 16)


@each("plus", ["", "+", "++"])
def test_keys_that_are_the_users_own_need_no_plus_and_bear_one(plus):
    config = compose([f"{plus}variants.g3={{base: mmshift, gamma: 3}}", f"{plus}methods.mmshift.reading=released"])
    assert config.variants == {"g3": {"base": "mmshift", "gamma": 3}}
    assert config.methods["mmshift"]["reading"] == "released"


@each("plus", ["", "++"])
def test_generation_settings_of_a_dataset_are_the_users_own(plus):
    """A dataset's file cannot list what every task of lmms-eval understands."""
    one = compose(["dataset=lmms_eval", f"{plus}datasets.lmms_eval.generation.max_new_tokens=5"])
    several = compose(["dataset=lmms_eval", f"{plus}datasets.lmms_eval.generation={{max_new_tokens: 5, until: [x]}}"])
    assert one.datasets["lmms_eval"]["generation"] == {"max_new_tokens": 5}
    assert several.datasets["lmms_eval"]["generation"] == {"max_new_tokens": 5, "until": ["x"]}
    added = compose([f"{plus}datasets.pages.generation.repetition_penalty=1.2"])
    assert added.datasets["pages"]["generation"] == {"max_new_tokens": 24, "repetition_penalty": 1.2}


def test_an_experiment_changes_values_and_the_command_line_wins():
    assert compose(["experiment=demo"]).out == "runs/demo"
    assert compose(["experiment=demo", "out=elsewhere", "budget=7"]).budget == (7,)


def test_force_adding_a_key_that_exists_changes_it():
    assert compose(["++budget=3"]).budget == (3,)


def test_statuses_to_retry_are_words_even_where_they_could_be_numbers():
    assert list(compose(["retry=nan"]).retry) == ["nan"]
    assert list(compose(["retry=[oom,nan]"]).retry) == ["oom", "nan"]


def test_datasets_follow_the_page_size():
    config = compose(["page_size=large", "dataset=pages_walk"])
    assert config.datasets["pages_walk"]["size"] == "large"


@each(
    ("override", "words"),
    [
        ("sede=1", "unknown key 'sede'; did you mean 'seed'"),
        ("+sede=1", "unknown key 'sede'; did you mean 'seed'"),
        ("++sede=1", "unknown key 'sede'; did you mean 'seed'"),
        ("methods.mmshift.gama=1", "unknown key 'gama' in methods.mmshift; did you mean 'gamma'"),
        ("+methods.mmshift.gama=1", "did you mean 'gamma'"),
        ("++methods.mmshift.gama=1", "did you mean 'gamma'"),
        ("++methods.mmshift.scorer.gama=1", "unknown key 'gama' in methods.mmshift.scorer"),
        ("methods.mmshift={gama: 1}", "did you mean 'gamma'"),
        ("++datasets.pages.splt=dev", "did you mean 'split'"),
        ("model.pth=x", "unknown key 'pth' in model; did you mean 'path'"),
        ("+logger.knd=none", "did you mean 'kind'"),
        ("modle=tiny", "did you mean 'model'"),
        ("methd=snapkv", "did you mean 'method'"),
        ("method=snapvk", "unknown method 'snapvk'; did you mean 'snapkv'"),
        ("dataset=pages_wlk", "did you mean 'pages_walk'"),
        ("model=tinny", "did you mean 'tiny'"),
        ("experiment=dmo", "did you mean 'demo'"),
        ("methods.snapkv.window=3", "choose it with 'method=[mmshift,snapkv]'"),
        ("methods.snapvk.window=3", "did you mean 'snapkv'"),
        ("+budget=3", "already exists, so it is changed without a plus; write budget=3"),
        ("+experiment=demo", "write experiment=demo"),
        ("++method=snapkv", "write method=snapkv"),
        ("~budget", "keys cannot be removed"),
        ("~method", "cannot be removed"),
        ("budget=32,64", "'budget=[32,64]'"),
        ("method=full,snapkv", "'method=[full,snapkv]'"),
        ("method=[snapkv,snapkv]", "more than once"),
        ("model=[tiny,hf]", "takes one name"),
        ("budget", "cannot read the override 'budget'"),
        ("budget=[1,", "cannot read the override"),
        ("=3", "cannot read the override"),
        ("method@x=snapkv", "cannot read the override"),
        ("budget.x=3", "budget is a value without keys below it"),
        ("datasets.pages.generation.max_new_tokens=abc", "is text; allowed: a whole number"),
        ("datasets.pages.generation={max_new_tokens: abc}", "is text; allowed: a whole number"),
        ("datasets.pages.generation=3", "but keys are needed"),
        ("datasets.pages_walk.generation.max_new_tokens=3", "choose it with 'dataset=[pages,pages_walk]'"),
        ("datasets.pages.genration.max_new_tokens=3", "did you mean 'generation'"),
        ("methods=3", "unknown method '3'"),
        ("methods.mmshift.gamma=abc", "is text; allowed: a number"),
        ("methods.mmshift.samples=1.5", "allowed: a whole number"),
        ("methods.mmshift.drop_last_key=1", "allowed: true or false"),
        ("limit=abc", "allowed: a whole number >= 1 or null"),
        ("fork_batch=null", "allowed: a whole number >= 1"),
        ("json=maybe", "allowed: true, false"),
        ("hydra.foo=1", "'foo' not in 'HydraConf'"),
    ],
)
def test_an_override_that_means_nothing_is_refused_in_one_sentence(override, words):
    with pytest.raises(ConfigError) as refused:
        compose([override])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_list_that_hydra_would_read_for_minutes_is_refused():
    """A plan of 20,000 budgets or 100,000 seeds did not end within a minute: the time grows with the square of their number."""
    for text in (f"seed=[{','.join(['1'] * 4001)}]", f"seed={','.join(['1'] * 100_000)}"):
        with pytest.raises(ConfigError, match=r"seed=... has [\d,]+ values; allowed: at most 4,000 in one override"):
            parse(text)
    for quoted in (f'"{"," * 5000}"', f"'it\\'s{',' * 5000}'"):  # one value
        assert parse(f"dataset.prompt={quoted}").value().count(",") == 5000


def test_a_sweep_is_the_product_of_its_lists():
    assert expand_sweep(["budget=16,32", "seed=range(0,2)", "method=full"]) == [
        ["budget=16", "seed=0", "method=full"],
        ["budget=16", "seed=1", "method=full"],
        ["budget=32", "seed=0", "method=full"],
        ["budget=32", "seed=1", "method=full"],
    ]


def test_own_keys_are_marked_for_hydra_and_nothing_else_is():
    own = ["variants.a={base: snapkv}", "methods.snapkv.reading=released", "datasets.pages.generation.until=[x]"]
    assert for_hydra([*own, "budget=3"]) == [
        "++variants.a={base: snapkv}",
        "++methods.snapkv.reading=released",
        "++datasets.pages.generation.until=[x]",
        "budget=3",
    ]


def test_a_further_config_folder_adds_choices(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nbudget: 5\n")
    with pytest.raises(ConfigError, match="unknown experiment 'mine'"):
        compose(["experiment=mine"])
    assert compose([f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"]).budget == (5,)


def test_a_broken_file_is_named_in_one_sentence(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "broken.yaml").write_text("# @package _global_\nsede: 5\n")
    with pytest.raises(ConfigError) as refused:
        compose([f"hydra.searchpath=[file://{tmp_path}]", "experiment=broken"])
    assert "sede" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_slurm_settings_are_those_of_its_launcher():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    compose(["launcher=slurm", "hydra.launcher.partition=low", "hydra.launcher.timeout_min=5"])
    with pytest.raises(ConfigError, match="partitoin"):
        compose(["launcher=slurm", "hydra.launcher.partitoin=low"])


def test_the_keys_of_the_only_dataset_need_no_name():
    config = compose(["dataset=lmms_eval", "dataset.task=docvqa_val", "dataset.generation.max_new_tokens=5"])
    assert tuple(config.datasets["lmms_eval"][key] for key in ("task", "generation")) == (
        "docvqa_val",
        {"max_new_tokens": 5},
    )
    assert compose(["dataset.count=3"]).datasets["pages"]["count"] == 3
    assert for_hydra(["dataset=lmms_eval", "dataset.task=x,y"]) == ["dataset=lmms_eval", "datasets.lmms_eval.task=x,y"]


@each(
    ("overrides", "words"),
    [
        (["dataset=[pages,pages_walk]", "dataset.count=3"], "2 datasets .pages, pages_walk.*datasets.<name>.count="),
        (["dataset.cuont=3"], "did you mean 'count'"),
        (["dataset=pgaes", "dataset.count=3"], "unknown dataset 'pgaes'"),
    ],
)
def test_keys_of_a_dataset_that_is_not_alone_or_has_none_such_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        compose(overrides)


def test_a_sweep_over_datasets_names_the_one_it_means():
    with pytest.raises(ConfigError, match="sweep.*datasets.<name>.count"):
        for_hydra(["dataset=pages,pages_walk", "dataset.count=3"])


@pytest.mark.full
def test_values_laid_on_kept_choices_are_what_hydra_composes_at_once(tmp_path):
    """Kept choices are a command's own copy, and are composed anew when one of their files is another."""
    (tmp_path / "method").mkdir()
    own = tmp_path / "method" / "mine.yaml"
    text = (conf_dir() / "method" / "random.yaml").read_text()
    own.write_text(text)
    folder = f"hydra.searchpath=[{tmp_path}]"
    cases = [
        (
            ["method=[snapkv,pyramidkv]", "experiment=demo"],
            ["budget=[8,0.25]", "methods.snapkv.scorer.window=4", "seed=null"],
        ),
        (["dataset=[pages,pages_walk]"], ["++datasets.pages.generation.max_new_tokens=3", "out='a b'", "limit=12"]),
        (["method=[h2o]"], ["++variants.v={base: h2o, ratio: 0.25}", "++variants.v.ratio=0.5", "model.dtype=float32"]),
        ([f"hydra.searchpath=['mmkv://{tmp_path}']", "method=[mine]"], ["retry=[oom,error]"]),
    ]
    for choices, values in cases:
        extra = [str(tmp_path)] if "mine" in choices[-1] else []
        for _ in range(2):
            kept = composing.composed(choices, values, extra)
            assert kept == composing.by_hydra([*choices, *values])
            assert (kept._metadata.flags or {}) == {**(composing.by_hydra(choices)._metadata.flags or {})}
            kept.budget = [1]
    before = compose([folder, "method=mine"])
    own.write_text(text.replace("[sinks, recents]", "[recents]"))
    assert compose([folder, "method=mine"]).methods != before.methods

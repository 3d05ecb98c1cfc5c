"""Method files: parts by name, parameters and defaults from the parts' classes; a written-out file says the same."""

from __future__ import annotations

import importlib
import inspect
import json
import re

import pytest
import yaml

from mmkv_bench.config.compose import compose
from mmkv_bench.config.files import conf_dir, content, options
from mmkv_bench.config.method_parts import FOLDERS, REQUIRED, defaults, expanded, part_classes, part_parameters
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods.node import under_reading
from tests.each import each
from tools.methods_page import meaning

SHORT = """
pool: 7
scorer: {window: all}
allocator: {uniform: {excess: "${..more}", unused: 2}}
selector: {topk: [window, sinks]}
reducer: evict
"""
WRITTEN_OUT = """
base: mine
pool: 7
window: 32
pooling: average
heads: first
score_rounding: none
more: 0
sinks: 0
scorer:
  _target_: mmkv_bench.compression.scorers.window.WindowScorer
  window: ${..window}
  pool: ${..pool}
  pooling: ${..pooling}
  heads: ${..heads}
  score_rounding: ${..score_rounding}
allocator: {_target_: mmkv_bench.compression.allocators.uniform.Uniform, excess: "${..more}", unused: 2}
selector: {_target_: mmkv_bench.compression.selectors.topk.TopK, window: "${..window}", sinks: "${..sinks}"}
reducer: {_target_: mmkv_bench.compression.reducers.evict.Evict}
released: {}
"""


def test_a_short_file_stands_for_the_written_out_one_which_stays_what_it_is():
    written = yaml.safe_load(WRITTEN_OUT)
    assert expanded("mine", yaml.safe_load(SHORT)) == written
    assert expanded("mine", written) == written


def test_both_forms_compose_from_a_folder_of_the_users_own(tmp_path):
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text(SHORT)
    (tmp_path / "method" / "old.yaml").write_text(f"# @package methods.old{WRITTEN_OUT}")
    both = (
        "method=[mine,old]",
        "methods.mine.window=8",
        "methods.old.window=8",
        "methods.mine.more=3",
        "methods.old.more=3",
    )
    methods = compose([f"hydra.searchpath=['file://{tmp_path}']", *both]).methods
    resolved = under_reading("mine", methods["mine"], "paper")
    assert methods["mine"] == methods["old"] and resolved["selector"]["window"] == 8
    assert resolved["allocator"]["excess"] == 3


@each(
    ("change", "words"),
    [
        (("{window: all}", "windw"), "method mine: unknown scorer 'windw'; did you mean 'window'"),
        (("[window, sinks]", "[window, sink]"), "selector topk has no parameter 'sink'; did you mean 'sinks'"),
        (("unused: 2", "unusd: 2"), "allocator uniform has no parameter 'unusd'; did you mean 'unused'"),
        (("reducer: evict", "reducer: [evict]"), r"reducer is \['evict'\]; allowed: <name>, {<name>: all}"),
    ],
)
def test_what_names_no_part_or_parameter_is_refused(change, words):
    assert change[0] in SHORT
    with pytest.raises(ConfigError, match=words):
        expanded("mine", yaml.safe_load(SHORT.replace(*change)))


def test_what_is_read_of_a_class_is_what_the_class_has():
    for part in FOLDERS:
        found = part_classes(part)
        assert found
        for target in found.values():
            module, _, name = target.rpartition(".")
            cls = getattr(importlib.import_module(module), name)
            real = {}
            for parameter in () if inspect.isabstract(cls) else inspect.signature(cls).parameters.values():
                default = parameter.default
                if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
                    default = cls.__dataclass_fields__[parameter.name].default_factory()
                value = default is None or isinstance(default, (bool, int, float, str, tuple, dict))
                real[parameter.name] = default if value else REQUIRED
            if real:
                told = {
                    key: tuple(value) if isinstance(value, list) else value for key, value in defaults(target).items()
                }
                assert told == real, target


def test_a_method_file_repeats_no_default_unless_it_has_something_to_say_about_it():
    for name in options("method"):
        text = (conf_dir() / "method" / f"{name}.yaml").read_text()
        given, taken = yaml.safe_load(text), part_parameters(content("method", name))
        for parameter, (target, argument) in taken.items():
            default = defaults(target)[argument]
            if parameter in given and json.dumps(given[parameter]) == json.dumps(default):
                assert re.search(rf"^{parameter}:.*#", text, re.MULTILINE), (name, parameter)


def test_every_parameter_of_every_part_is_explained_and_pointers_are_followed():
    for name in options("method"):
        for target, argument in part_parameters(content("method", name)).values():
            said = meaning(target, argument)
            assert said and not said.startswith("see "), (target, argument)
    quota = part_classes("selector")["modality_quota"]
    assert meaning(quota, "sinks") == meaning(part_classes("selector")["topk"], "sinks")

"""A user's file as a method: the same answers as a built-in one, an identity of its content, and one sentence for every
file that cannot be used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mmkv_bench.cli.main import main
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.config.method_parts import FOLDERS
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods import invariants, toy_layers
from mmkv_bench.methods import method_file as custom
from mmkv_bench.methods.build import build_compressor
from mmkv_bench.plan.cells import build_methods, method_entries
from mmkv_bench.plan.validate import validate
from tests import zoo
from tests.cli.setting import refusal
from tests.each import each
from tests.generation import common
from tests.run.setting import cells, commits, done

EXAMPLE = Path(__file__).parents[2] / "examples" / "value_norm.py"
HEAD = """\
from dataclasses import dataclass
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.compression.scorers.window import WindowScorer
"""
SCORER = """
@dataclass(frozen=True)
class Mine(Scorer):
    power: float = 1.0
    {fields}
    def key(self, budget, length):
        return {key}
    def score(self, obs, budget, seed):
        {body}
"""


def scorer(
    body: str = "return obs.key.float().norm(dim=-1) ** self.power", key: str = "(self.power,)", fields: str = ""
) -> str:
    return HEAD + SCORER.format(body=body, key=key, fields=fields)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does with the working directory
    return tmp_path


def node_of(*overrides: str):
    return compose(["method=custom", *overrides]).methods["custom"]


def build(*overrides: str):
    return build_compressor("custom", node_of(*overrides), "paper", method_defaults(["custom"])["custom"])


def identity(*overrides: str) -> dict:
    config = compose(["method=custom", "baseline=none", *overrides])
    (method,) = build_methods(method_entries(config.method_config))
    return dict(method.plain) | {"tuned": method.tuned}


# ---------------------------------------------------------------- what is built


def test_a_scorer_alone_gets_uniform_budgets_top_k_with_the_last_token_and_eviction(folder):
    (folder / "mine.py").write_text(scorer())
    made = build("methods.custom.path=mine.py", "methods.custom.args={power: 3}")
    assert made.scorer.power == 3.0 and isinstance(made.scorer.power, float)
    assert (made.allocator, made.selector, made.reducer, made.decoding) == (Uniform(), TopK(recents=1), Evict(), None)
    assert build("methods.custom.path=mine.py", "methods.custom.window=8").selector == TopK(window=8)


def test_a_file_may_bring_every_part_and_arguments_go_to_those_that_take_them(folder):
    (folder / "mine.py").write_text(
        scorer()
        + """
from mmkv_bench.compression.allocators.pyramid import Pyramid
from mmkv_bench.compression.selectors.topk import TopK
class Steep(Pyramid):
    pass
@dataclass(frozen=True)
class Firsts(TopK):
    sinks: int = 2
"""
    )
    made = build("methods.custom.path=mine.py", "methods.custom.args={power: 2, beta: 7, sinks: 3}")
    assert (type(made.allocator).__name__, made.allocator.beta) == ("Steep", 7)
    assert (type(made.selector).__name__, made.selector.sinks) == ("Firsts", 3)
    assert (made.allocator.window, made.selector.window) == (32, 0), "each class has its own default"
    assert type(build("methods.custom.path=mine.py", "methods.custom.name=Mine").selector) is TopK, "only what is named"
    both = build("methods.custom.path=mine.py", "methods.custom.name=[Mine,Firsts]")
    assert (type(both.selector).__name__, type(both.allocator)) == ("Firsts", Uniform)
    with pytest.raises(ConfigError, match=r"\(Firsts\); give the value in methods.custom.args"):
        build("methods.custom.path=mine.py", "methods.custom.sinks=4")


def test_imported_classes_are_no_parts_and_files_are_told_apart(folder):
    (folder / "one.py").write_text(scorer())
    (folder / "two.py").write_text(scorer().replace("Mine", "Other"))
    assert [type(build(f"methods.custom.path={n}.py").scorer).__name__ for n in ("one", "two")] == ["Mine", "Other"]
    first, again = (build("methods.custom.path=one.py").scorer for _ in range(2))
    assert type(first) is type(again) and first == again, "shared scores rely on it"


def test_what_runs_is_what_was_hashed_and_nothing_is_left_beside_it(folder):
    file = folder / "mine.py"
    found = []
    for power in range(8):  # within one tick of the clock and of equal size: what fools a bytecode cache
        file.write_text(scorer().replace("float = 1.0", f"float = {power}.0"))
        found.append(build("methods.custom.path=mine.py").scorer.power)
    assert found == [float(power) for power in range(8)]
    assert sorted(path.name for path in folder.iterdir()) == ["mine.py"]


# ---------------------------------------------------------------- identity


def test_the_identity_is_the_content_and_all_arguments_not_the_place(folder):
    shutil.copy(EXAMPLE, folder / "a.py")
    (folder / "sub").mkdir()
    shutil.copy(EXAMPLE, folder / "sub" / "b.py")
    plain = identity("methods.custom.path=a.py")
    assert plain == identity("methods.custom.path=sub/b.py") == identity(f"methods.custom.path={folder}/a.py")
    assert plain == identity("methods.custom.path=a.py", "methods.custom.args={power: 1}"), (
        "a default that was written out"
    )
    assert plain == identity("methods.custom.path=a.py", "methods.custom.name=ValueNormScorer")
    assert str(folder) not in str(plain) and plain["args"] == {"power": 1.0} and not plain["tuned"]
    other = identity("methods.custom.path=a.py", "methods.custom.args.power=2")
    assert other["tuned"] and other["args"] == {"power": 2.0}
    (folder / "a.py").write_text(EXAMPLE.read_text() + "# a comment\n")
    changed = identity("methods.custom.path=a.py")
    assert changed["sha256"] != plain["sha256"] and not changed["tuned"]


def test_a_file_among_methods_is_custom_under_its_own_name_with_the_same_identity(folder):
    shutil.copy(EXAMPLE, folder / "mine.py")
    (folder / "other.py").write_text(scorer())
    words = ["method=[snapkv,mine.py,other.py]", "baseline=none", "methods.mine.args.power=2", "mine.window=4"]
    config = compose(words)
    validate(config)
    _, mine, other = build_methods(method_entries(config.method_config))
    given = identity("methods.custom.path=mine.py", "methods.custom.args.power=2", "methods.custom.window=4")
    assert dict(mine.plain) | {"tuned": mine.tuned} == given
    assert (mine.name, mine.compressor.name, mine.compressor.scorer.power) == ("mine", "mine", 2.0)
    assert (other.name, other.tuned, mine.plain["base"]) == ("other", False, "custom")
    alone = compose(["method=mine.py"])
    validate(alone)
    assert [method.name for method in build_methods(method_entries(alone.method_config))] == ["full", "mine"]


def test_an_argument_without_a_default_is_asked_for_and_is_no_tuning(folder):
    (folder / "mine.py").write_text(scorer().replace("float = 1.0", "float"))
    with pytest.raises(ConfigError, match="needs a value for power; write methods.custom.args={power: <value>}"):
        build("methods.custom.path=mine.py")
    with pytest.raises(ConfigError, match="write variants.mine.args={power: <value>}"):
        build_methods(method_entries(compose(["method=mine.py"]).method_config))
    assert not identity("methods.custom.path=mine.py", "methods.custom.args.power=2")["tuned"]


# ---------------------------------------------------------------- through the engine and through runs


def test_the_example_answers_as_a_built_in_method_does_in_forks_and_alone():
    made = build(f"methods.custom.path={EXAMPLE}")
    for family in ("qwen2_5_vl", "llava_next"):
        model, prompt = zoo.model(family), common.encoded(family)
        results = common.assert_forks_equal_alone(
            model, family, prompt, [common.cell(made, b, p) for p in common.PROTOCOLS for b in (5, 12)]
        )
        assert all(result.entries_resident == result.entries_asked for result in results)


@pytest.mark.full
def test_an_edit_makes_new_rows_and_nothing_else_does(folder):
    shutil.copy(EXAMPLE, folder / "mine.py")
    command = ("method=custom", "methods.custom.path=mine.py", "budget=32", "limit=2", "dataset=pages_lookup")
    root = folder / "rows"
    assert done(root, *command).generated == 2
    before = commits(root)
    assert done(root, *command).generated == 0
    shutil.move(folder / "mine.py", folder / "moved.py")
    assert done(root, *command[:1], "methods.custom.path=moved.py", *command[2:]).generated == 0
    (folder / "mine.py").write_text(EXAMPLE.read_text().replace("norm(dim=-1)", "norm(dim=-1).neg().exp()"))
    assert done(root, *command).generated == 2
    assert before.items() <= commits(root).items(), "older rows are left alone"
    assert len([row for row in cells(root).values() if row["method"] == "custom"]) == 2


@pytest.mark.slow
@each(
    ("body", "words"),
    [
        ("return obs.key.float().norm(dim=-1).half()", "a score is torch.float32 or torch.float64 [2, "),
        ("return obs.key.float()[0, :, 0]", "a score is torch.float32 or torch.float64 [2, "),
        ("return None", "gave NoneType in layer 0"),
        ("return 1 / 0", "ZeroDivisionError"),
        ("return obs.column_sums", "its `needs` does not declare it"),
        (
            "import torch; return torch.load('w.pt') * obs.key.float().norm(dim=-1)",
            "which the cell's checksum would not cover",
        ),
    ],
)
def test_a_score_of_the_wrong_kind_is_its_own_cells_error_in_both_paths(folder, body, words):
    (folder / "mine.py").write_text(scorer(body))
    torch.save(torch.ones(()), folder / "w.pt")
    family = "qwen2_5_vl"
    made, fine = build("methods.custom.path=mine.py"), build(f"methods.custom.path={EXAMPLE}")
    cells_ = [common.cell(made, 9, name="broken"), common.cell(fine, 9, name="fine")]
    for run in (common.together, common.alone):
        broken, other = run(zoo.model(family), family, common.encoded(family), cells_)
        assert broken.status == "error" and words in broken.error and other.status == "ok"


# ---------------------------------------------------------------- refusals


def test_a_path_that_is_no_text_is_refused():
    with pytest.raises(ConfigError, match=r"methods.custom.path=3 is not a path; allowed: a .py file"):
        custom.load(3)


BAD = {
    "nothing": (None, "needs a file"),
    "missing": ("missing.py", "does not exist"),
    "a folder": (".", "is not a Python file"),
    "syntax": ("def x(:\n", "bad.py:1: the file is not valid Python: invalid syntax in `def x(:`; correct the line"),
    "import": (
        "import no_such_module\n",
        "bad.py:1: the file cannot be imported: ModuleNotFoundError: No module named 'no_such_module'; correct",
    ),
    "exception": ("x = 1\n\ny = x / 0\n", "bad.py:3: the file cannot be imported: ZeroDivisionError: division by zero"),
    "exit": ("import sys\nsys.exit('bye')\n", "bad.py:2: the file cannot be imported: SystemExit: bye"),
    "no scorer": ("from mmkv_bench.compression.scorers.window import WindowScorer\n", "defines no scorer"),
    "not finished": (
        HEAD + "class A(Scorer):\n    pass\n",
        "bad.py: A lacks key, score; write `def key(self, budget, length):`, which returns the tuple of all parameters that a "
        "score depends on",
    ),
    "several": (scorer() + "class Two(Mine):\n    pass\n", "several scorer classes (Mine, Two)"),
    "beside": ("import neighbour\n", "bad.py:1: imports neighbour, which the cell's checksum would not cover"),
    "elsewhere on the path": ("import far.away\n", "bad.py:1: imports far, which the cell's checksum would not cover"),
    "variable": (
        HEAD + "import os\nA = os.environ.get('A')\n",
        "bad.py:6: reads the environment (environ), which the cell's",
    ),
    "read in C": (HEAD + "import sqlite3\n", "bad.py:5: imports sqlite3, which the cell's checksum would not cover"),
    "mapped": (HEAD + "A = torch.UntypedStorage.from_file('a')\n", "bad.py:5: uses torch.UntypedStorage.from_file"),
    "dynamic": (HEAD + "import importlib\n", "bad.py:5: imports importlib, which the cell's checksum would not cover"),
    "executed": (HEAD + "exec(open('neighbour.py').read())\n", "bad.py:5: uses exec"),
    "unheard": (HEAD + "from safetensors import safe_open\n", "bad.py:5: imports safetensors"),
    "data at import": (
        HEAD + "X = open('neighbour.py').read()\n",
        "bad.py:5: the file cannot be imported: OwnFileReadError",
    ),
    "data when built": (
        scorer(fields="def __post_init__(self):\n        open('neighbour.py').close()"),
        "methods.custom.args: ",
    ),
    "relative": ("from . import neighbour\n", "imports a module by a relative path"),
    "arguments": (scorer(), "takes no 'pwoer'; did you mean 'power'"),
    "refused": (
        scorer(fields="def __post_init__(self):\n        raise ValueError('too much')"),
        "cannot be built: ValueError: too much",
    ),
    "not text": (b"\xff\xfe", "cannot be read"),
}


@pytest.mark.slow
@each("case", BAD)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(case, folder, monkeypatch):
    content, words = BAD[case]
    (folder / "neighbour.py").write_text("x = 1\n")
    (folder / "else" / "far").mkdir(parents=True, exist_ok=True)
    (folder / "else" / "far" / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder / "else")
    path = content if content in ("missing.py", ".") else "bad.py"
    if path == "bad.py" and content:
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    overrides = [] if content is None else [f"methods.custom.path={path}"]
    with pytest.raises(ConfigError) as refused:
        build(*overrides, *(["methods.custom.args={pwoer: 1}"] if case == "arguments" else []))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_refusal_is_one_sentence_without_a_trace_and_leaves_nothing_behind(folder, capsys):
    (folder / "bad.py").write_text("x = 1 / 0\n")
    assert main(["method=custom", "methods.custom.path=bad.py", "out=rows", "limit=1"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and refusal(said.err).startswith(
        "mmkv_bench: bad.py:1: the file cannot be imported: ZeroDivisionError"
    )
    assert refusal(said.err).count("\n") == 1 and sorted(path.name for path in folder.iterdir()) == ["bad.py"]


@each(
    ("overrides", "words"),
    [
        (
            ("methods.custom.path=mine.py", "methods.custom.name=Mnie"),
            "Mnie is not a part in mine.py; did you mean 'Mine'",
        ),
        (("methods.custom.path=mine.py", "methods.custom.args=3"), "but keys are needed"),
        (("methods.custom.pth=mine.py",), "unknown key 'pth'"),
        (("method=snapkv", "methods.snapkv.args.x=1"), "snapkv has no args"),
        (("method=snapkv", "methods.snapkv.scorer._target_=mine.Mine"), "outside this package"),
    ],
)
def test_other_requests_that_make_no_sense_are_refused(overrides, words, folder):
    (folder / "mine.py").write_text(scorer())
    with pytest.raises(ConfigError) as refused:
        config = compose(["method=custom", *overrides] if not overrides[0].startswith("method=") else overrides)
        build_methods(method_entries(config.method_config))
    assert words in str(refused.value)


# ---------------------------------------------------------------- the check of one's own file


def broken(folder: Path, text: str) -> list[str]:
    (folder / "mine.py").write_text(text)
    made = invariants.method("mine.py")
    return [check.__name__ for check in invariants.CHECKS[:7] if said(check, made) is not None]


def said(check, made) -> str | None:
    try:
        return check(made)
    except Exception as error:  # noqa: BLE001 - as the command does
        return str(error)


NORM = "obs.key.float().norm(dim=-1)"
GREEDY = """
from mmkv_bench.compression.allocators.base import Allocator
class Greedy(Allocator):
    def caps(self, scores, budget, layers, n_layers, context=None):
        import torch
        return [torch.full((score.shape[0],), score.shape[1]) for score in scores]
"""
CAUSES = {
    "an exception": (scorer("return 1 / 0"), "mine.py:13: ZeroDivisionError: division by zero", 6),
    "an undeclared need": (
        scorer("return obs.window_mass(8)"),
        "mine.py:13: RuntimeError: the scorer reads tail_queries >= 8 but its `needs` does not declare it; write `needs = "
        "Needs(tail_queries=8)` into the class Mine; docs/observation.md lists",
        6,
    ),
    "a need that follows a parameter": (
        scorer("w = min(self.window, 32)\n        return obs.window_mass(w)", fields="window: int = 16"),
        "mine.py:14: RuntimeError: the scorer reads tail_queries >= 16 but its `needs` does not declare it; write `@property` "
        "and `def needs(self): return Needs(tail_queries=self.window)` into the class Mine",
        6,
    ),
    "an attribute that obs lacks": (scorer("return obs.keys"), "no attribute 'keys'; docs/observation.md lists all", 6),
    "another dtype": (scorer(f"return {NORM}.half()"), "mine.py:12: ScoreError: Mine of custom gave torch.float16", 6),
    "infinity": (
        scorer(f"return {NORM} / 0"),
        "budget 1: NaN or infinity; return finite scores; `.clamp_min(1e-12)`",
        6,
    ),
    "a parameter missing in key": (
        scorer(key="()"),
        "mine.py:10: scores differ with self.power, and key returns ()",
        0,
    ),
    "the budget missing in key": (
        scorer(f"return {NORM} * (1 if budget > 5 else -1)"),
        "mine.py:10: scores differ with budget, and key returns (1.0,)",
        0,
    ),
    "torch's own stream": (
        scorer("import torch; return torch.rand(obs.key.shape[:2])"),
        "the second run selects other entries; draw with `generator=obs.generator(seed)`",
        3,
    ),
    "an undeclared seed": (
        scorer("import torch; return torch.rand(obs.key.shape[:2], generator=obs.generator(seed))"),
        "mine.py:7: 2 tokens, 1 KV heads, 2 query heads, budget 1: another seed gives other scores; write `stochastic = True`",
        0,
    ),
    "a declared one": (scorer(fields="stochastic = True"), "mine.py:9: no seed changes anything; take `stochastic", 0),
    "writing": (
        scorer(f"obs.key.mul_(2); return {NORM}"),
        "mine.py:12: 2 tokens, 1 KV heads, 2 query heads, budget 1: obs",
        2,
    ),
    "an allocator": (
        scorer() + GREEDY,
        "mine.py:17: OverBudgetError: custom kept",
        5,
    ),
}


def one_sentence(cause, folder, capsys, monkeypatch):
    text, words, waiting = CAUSES[cause]
    monkeypatch.setattr(invariants, "CHECKS", invariants.CHECKS[:7])
    (folder / "mine.py").write_text(text)
    assert main(["check", "mine.py"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (broken,) = (line for line in lines if line.startswith("BROKEN"))
    assert words in broken, broken
    assert lines[-1] == f"{6 - waiting} of 7 promises are kept" + f"; {waiting} wait for the line above" * bool(waiting)


@each("cause", ["an exception", "a need that follows a parameter", "another dtype", "infinity"])
def test_the_check_says_where_and_what_to_write_and_says_it_once(cause, folder, capsys, monkeypatch):
    one_sentence(cause, folder, capsys, monkeypatch)


@pytest.mark.full
@each("cause", CAUSES)
def test_every_cause_is_one_sentence_with_its_line(cause, folder, capsys, monkeypatch):
    one_sentence(cause, folder, capsys, monkeypatch)


@pytest.mark.full
def test_the_check_finds_each_broken_promise(folder):
    norm = "obs.key.float().norm(dim=-1)"
    assert broken(folder, scorer()) == []
    assert broken(folder, scorer(key="()")) == ["equal_keys_give_equal_scores"]
    assert broken(folder, scorer(f"return {norm} * (1 if budget > 5 else -1)")) == ["equal_keys_give_equal_scores"]
    assert "nothing_is_remembered" in broken(folder, scorer("import torch; return torch.rand(obs.key.shape[:2])"))
    assert "nothing_is_written_to" in broken(folder, scorer(f"obs.key.mul_(2); return {norm}"))
    assert broken(folder, scorer(f"return {norm} / 0 * 0")) != []
    draw = "import torch; return torch.rand(obs.key.shape[:2], generator=obs.generator(seed))"
    assert broken(folder, scorer(draw)) == ["seeds_matter_only_if_declared"]
    assert broken(folder, scorer(draw, fields="stochastic = True")) == []
    assert broken(folder, scorer(fields="stochastic = True")) == ["seeds_matter_only_if_declared"]
    greedy = """
from mmkv_bench.compression.selectors.topk import TopK
class All(TopK):
    def select(self, scores, caps, protected, order=None, types=None):
        return super().select(scores, caps * 0 + scores.shape[1] - 1, protected, order, types)
"""
    assert "the_budget_is_kept" in broken(folder, scorer() + greedy)


@pytest.mark.full
def test_the_check_runs_the_example_through_the_embedded_model(capsys):
    assert main(["check", str(EXAMPLE), "power=2"]) == 0
    text = capsys.readouterr().out
    assert "9 of 9 promises are kept" in text and "BROKEN" not in text and "ValueNormScorer(power=2.0)" in text


def test_the_check_refuses_what_is_no_method(capsys, folder):
    assert main(["check", "nothing.py"]) == 2
    assert main(["check", str(EXAMPLE), "power"]) == 2
    assert "does not exist" in (err := capsys.readouterr().err) and "'power' is not a setting" in err
    assert FOLDERS.keys() == {"scorer", "allocator", "selector", "reducer", "decoding"}
    assert torch.is_tensor(toy_layers.prompt(3, 1, 1, invariants.method(str(EXAMPLE)).needs)[0].key)

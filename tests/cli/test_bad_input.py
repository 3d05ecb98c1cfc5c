"""Every mistake costs one sentence on stderr and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest

from mmkv_bench.cli.main import main, run_guarded
from mmkv_bench.errors import ConfigError, StoreError
from tests.cli.setting import CHECKOUT, overrides, refusal
from tests.each import each
from tests.plan.setting import model_folder

HUB = ["model=hf", "model.path=org/name"]


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Every test runs in an empty folder, which must stay empty."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


@each(
    ("arguments", "words"),
    [
        (["method=snapvk"], "unknown method 'snapvk'; did you mean 'snapkv'"),
        (["method=[full,snapvk]"], "did you mean 'snapkv'"),
        (["dataset=page"], "did you mean 'pages'"),
        (["model=tinny"], "did you mean 'tiny'"),
        (["experiment=dmo"], "did you mean 'demo'"),
        ([*HUB, "keep=all"], "keep=all is unknown; allowed: counts, indices"),
        (["logger=wandbb"], "unknown logger 'wandbb'; did you mean 'wandb'"),
        ([*HUB, "projekt=x"], "unknown key 'projekt'; did you mean 'logger.project'"),
        ([*HUB, "logger.projekt=x"], "unknown key 'projekt' in logger; did you mean 'project'"),
        ([*HUB, "protocol=strct"], "did you mean 'strict'"),
        ([*HUB, "reading=relesed"], "did you mean 'released'"),
        ([*HUB, "budget=0"], "budget=0"),
        ([*HUB, "budget=-1"], "budget=-1"),
        ([*HUB, "budget=1.5"], "budget=1.5"),
        ([*HUB, "budget=abc"], "'abc' is not a budget"),
        ([*HUB, "sede=1"], "did you mean 'seed'"),
        ([*HUB, "+sede=1"], "did you mean 'seed'"),
        ([*HUB, "++sede=1"], "did you mean 'seed'"),
        ([*HUB, "methods.mmshift.gama=1"], "did you mean 'gamma'"),
        ([*HUB, "+methods.mmshift.gama=1"], "did you mean 'gamma'"),
        ([*HUB, "++methods.mmshift.gama=1"], "did you mean 'gamma'"),
        ([*HUB, "variants.a={base: mmshft}"], "did you mean 'mmshift'"),
        (["model=hf"], "needs model.path"),
        (["max_tokens=5", "temperature=0"], "write one of them; temperature=0: answers are decoded greedily"),
        (["model=hf", "model.path=/no/such/folder"], "model folder /no/such/folder does not exist"),
        ([*HUB, "shard=2/2"], "shard=2/2"),
        ([*HUB, "hydra.run.dir=x"], "the folder of a run's rows is `out=x`"),
        (["--jsn"], "unknown flag '--jsn' of `mmkv-bench run`; did you mean '--json'"),
        (["--config-dir", "/no/such/folder"], "--config-dir /no/such/folder is not a folder"),
        (["--cfg"], "--cfg/-c: expected one argument"),
        (
            ["-m", *HUB, "budget=16,abc"],
            "job model=hf model.path=org/name budget=abc of 2: budget='abc' is not a budget",
        ),
        (["-m", *HUB, "sede=1,2"], "did you mean 'seed'"),
        (["budget"], "'budget' is not a verb"),
        (["tabels"], "did you mean 'tables'"),
        (["snapkv", "64"], "write `mmkv-bench method=snapkv budget=64`"),
        (["plan", "method", "snapkv"], "write `mmkv-bench plan method=snapkv`"),
        (
            [
                "plan",
                "--tasks",
                "DocVQA",
                "--method",
                "snapkv",
                "--budget",
                "64,128",
                "--device-memory",
                "80",
                "limit=3",
            ],
            "write `mmkv-bench plan dataset=DocVQA method=snapkv 'budget=[64,128]' --device-memory 80 limit=3`",
        ),
        (["plan", "-m", "budget=16,32"], "write `mmkv-bench plan 'budget=[16,32]'`"),
        (["plan", "--batch", "16"], "write `mmkv-bench plan scenario=efficiency batch=16`"),
        (["eval", "method=snapkv"], "write `mmkv-bench run method=snapkv`"),
        (["methods"], "`mmkv-bench run --help` lists"),
        (["--list-tasks"], "`mmkv-bench run --help` lists"),
        (["report"], "for example `mmkv-bench report "),
        (["plan", "samples=[nope]"], "pages_small has none of these"),
        (["plan", "window=16"], "lists the keys"),
        (["plan", "method=snapkv", "window=16"], "write `snapkv.window=16`"),
        (["plan", "partition=gpu"], "write it with `launcher=slurm`"),
        (["run", "launcher=slurm", "partition=gpu"], "`mmkv-bench sweep launcher=slurm`"),
        (["plan", "experiment=mmshift_table1"], "`mmkv-bench papers mmshift_table01`"),
        (["show"], "the following arguments are required: rows"),
        (["run", "budget"], "cannot read the override 'budget'"),
        (["tables"], "the following arguments are required: rows"),
        (["tables", "x", "--format", "pdf"], "--format: invalid choice: 'pdf'"),
        (["score", "stage=generate"], "`score` generates nothing"),
        (["data", "list", "docvqa"], "list takes no names, but got 'docvqa'"),
        (["launch", "processes=2"], "write --processes 2"),
    ],
    keep=36,
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("mmkv_bench: ")
    assert words in err


@each(
    ("config", "words"),
    [
        ({"model_type": "bert"}, "'bert' is not supported"),
        ({"model_type": "no_such_family"}, "cannot be loaded"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            "full attention",
        ),
    ],
)
def test_a_family_that_is_not_supported_is_refused_before_anything_is_written(config, words, tmp_path_factory, capsys):
    folder = model_folder(tmp_path_factory.mktemp("elsewhere") / "model")
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["model=hf", f"model.path={folder}", "limit=1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert refusal(err).count("\n") == 1


@each(
    ("settings", "words"),
    [
        ([], "needs the package flash-attn, which is not installed"),
        (["scenario=efficiency", "model=qwen2_5_vl_3b", "model.weights=random", "model.layers=1"], "needs the package"),
    ],
)
def test_flash_attention_without_its_package_is_refused_before_a_model_is_loaded(
    settings, words, tmp_path_factory, capsys
):
    out = tmp_path_factory.mktemp("elsewhere") / "run"
    asked = ["method=snapkv", "budget=8", "limit=1", "model.attention=flash_attention_2", f"out={out}", *settings]
    assert main(asked) == 2
    printed, err = capsys.readouterr()
    assert words in err and refusal(err).count("\n") == 1 and not [*out.rglob("*.parquet")]


def test_with_json_the_last_line_of_stdout_says_what_was_wrong(capsys):
    assert main(["--json", *HUB, "budget=0"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert (document["status"], document["exit_code"]) == ("error", 2)
    assert document["error"] in err


@each("arguments", [["method=snapvk"], ["++sede=1"], ["--nonsense"]], keep=1)
def test_a_real_process_ends_with_2_and_without_a_traceback(arguments):
    ended = subprocess.run(
        [sys.executable, "-m", "mmkv_bench", *arguments], capture_output=True, text=True, check=False, env=CHECKOUT
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert "Traceback" not in ended.stderr


def test_a_full_disk_is_one_sentence_and_exit_code_2(capsys):
    def full(arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/default/journal")

    assert run_guarded([], full) == 2
    assert "no space left on the device of runs/default/journal" in capsys.readouterr().err


def test_a_full_disk_met_by_the_store_is_exit_code_2(capsys):
    def full(arguments):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise StoreError("rows cannot be written") from error

    assert run_guarded([], full) == 2
    assert capsys.readouterr().err == "mmkv_bench: rows cannot be written\n"


def test_a_failure_while_working_is_exit_code_1(capsys):
    def fails(arguments):
        raise StoreError("rows of another version")

    assert run_guarded([], fails) == 1
    assert capsys.readouterr().err == "mmkv_bench: rows of another version\n"


def test_ctrl_c_says_how_to_continue(capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    assert run_guarded(["--json"], interrupted) == 130
    out, err = capsys.readouterr()
    assert "run the same command again" in err
    assert json.loads(out)["status"] == "interrupted"


def test_defects_of_our_own_keep_their_traceback():
    def defect(arguments):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_guarded([], defect)


def test_a_command_line_is_split_into_overrides_and_flags(tmp_path):
    words = ["method=full", "--json", "-m", "seed=1", "-c", "job", "--config-dir", str(tmp_path)]
    assert overrides(words) == ["method=full", "seed=1", f"hydra.searchpath=['file://{tmp_path}']", "json=true"]
    with pytest.raises(ConfigError):
        overrides(["--config-dir"])


@each("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes")])
def test_memory_that_runs_out_before_any_row_is_a_sentence(error, capsys):
    def work(arguments):
        raise error

    assert run_guarded(["--json"], work) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "memory is too small" in said.err and type(error).__name__ in said.err
    assert json.loads(said.out)["status"] == "error"


@each(
    ("words", "closed"),
    [("mmkv_bench dataset=pages limit=1", ">&-"), ("mmkv_bench limit=1", ">&- 2>&-"), ("mmkv_bench tables x", ">&-")],
    keep=2,
)
def test_a_standard_output_that_is_closed_from_the_start_is_refused(words, closed):
    command = f"{sys.executable} -m {words} {closed}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=CHECKOUT)
    assert ended.returncode == 2
    assert (
        ended.stderr.count("standard output is closed") == (">&- 2" not in closed) and "Traceback" not in ended.stderr
    )

"""A model, a task and a method file that read in all ways, and the changes that can be made to each of their files."""

from __future__ import annotations

import json
import os
import py_compile
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from safetensors.torch import load_file, save_file

from mmkv_bench.tiny import WEIGHTS

VARIABLE = "MMKV_FUZZ_WORD"
_TASK = """
task: {name}
dataset_path: {kind}
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visual
doc_to_text: !function utils.text
doc_to_target: answer
process_results: !function utils.scored
generation_kwargs: {{max_new_tokens: 2}}
metric_list:
  - {{metric: right, aggregation: mean, higher_is_better: true}}
"""
_UTILS = """
import json
import os
import sys
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
TEMPLATE = (HERE.parent / "template.txt").read_text()
SUFFIX = "now"

def opened(path):
    {opened}

def visual(doc):
    beside = json.loads((HERE / "beside.json").read_text())
    return [opened(HERE / beside["folder"] / doc["file"])]

def text(doc):
    from words.first import WORD
    return " ".join([TEMPLATE, WORD, {listed} os.environ.get("MMKV_FUZZ_WORD", ""), doc["question"], SUFFIX])

def scored(doc, results):
    return {{"right": json.loads((HERE / "refs.json").read_text())[doc["answer"]]}}
"""
_OPENED = {
    "pil": 'return Image.open(path).convert("RGB")',
    "cv2": "import cv2\n    return Image.fromarray(cv2.imread(str(path)))",
}
_LISTED = {"none": "", "listing": '*sorted(os.listdir(HERE / "names")),'}
_METHOD = """
from dataclasses import dataclass
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.base import Scorer

@dataclass(frozen=True)
class Mine(Scorer):
    power: float = 1.0

    def key(self, budget, length):
        return (self.power,)

    def score(self, obs, budget, seed):
        return SIGN * obs.value.float().norm(dim=-1) ** self.power

SIGN = 1
"""


@dataclass(frozen=True)
class Kind:
    """What a world's task is like: how it opens pictures, whether it lists a folder, the format of its rows."""

    opener: str
    listing: str
    rows: str


KINDS = (Kind("pil", "none", "json"), Kind("cv2", "none", "parquet"), Kind("pil", "listing", "csv"))


class World:
    """Files below `root`; `command` runs them, `changes` names what can be changed."""

    def __init__(self, root: Path, kind: Kind) -> None:
        self.root, self.kind = root, kind
        self.task, self.model = root / "task", root / "model"
        self.name = f"fuzzed_{kind.opener}_{kind.listing}_{kind.rows}"
        shutil.copytree(WEIGHTS, self.model)
        self._sharded()
        (self.task / "pictures").mkdir(parents=True)
        (self.task / "words").mkdir()
        (self.task / "names").mkdir()
        (self.task / "names" / "a").touch()
        (self.task / "words" / "first.py").write_text('WORD = "one"\n')
        (self.task / "utils.py").write_text(_UTILS.format(opened=_OPENED[kind.opener], listed=_LISTED[kind.listing]))
        (self.task / "beside.json").write_text('{"folder": "pictures"}')
        (self.task / "refs.json").write_text('{"yes": 1.0, "no": 0.0}')
        (root / "template.txt").write_text("Say it:")
        (root / "mine.py").write_text(_METHOD)
        for number in range(2):
            pixels = np.random.default_rng(number).integers(0, 256, (56, 56, 3), np.uint8)
            Image.fromarray(pixels).save(self.task / "pictures" / f"{number}.bmp")
        self.rows = self.task / f"rows.{ {'json': 'jsonl'}.get(kind.rows, kind.rows) }"
        self._write_rows([{"question": f"What is {n}?", "answer": "yes", "file": f"{n}.bmp"} for n in range(2)])
        text = _TASK.format(name=self.name, kind=kind.rows, file=self.rows)
        (self.task / f"{self.name}.yaml").write_text(text)
        for code in ("utils.py", "words/first.py"):  # what another program that imported them left
            py_compile.compile(str(self.task / code), doraise=True)

    def _sharded(self) -> None:
        """The weights in two shards, one of them in a sub folder."""
        whole = load_file(self.model / "model.safetensors")
        names = sorted(whole)
        halves = {"model-1.safetensors": names[::2], "sub/model-2.safetensors": names[1::2]}
        (self.model / "model.safetensors").unlink()
        (self.model / "sub").mkdir()
        for file, part in halves.items():
            save_file({name: whole[name].contiguous() for name in part}, self.model / file, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
        (self.model / "model.safetensors.index.json").write_text(json.dumps(index))

    def _write_rows(self, rows: list[dict[str, str]]) -> None:
        if self.kind.rows == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), self.rows)
        elif self.kind.rows == "csv":
            lines = [",".join(rows[0])] + [",".join(row.values()) for row in rows]
            self.rows.write_text("\n".join(lines) + "\n")
        else:
            self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))

    @property
    def command(self) -> tuple[str, ...]:
        of_task = ("dataset=lmms_eval", f"dataset.task={self.name}", f"dataset.include_path={self.task}")
        of_model = ("model=hf", f"model.path={self.model}")
        return (*of_model, *of_task, f"method={self.root / 'mine.py'}", "budget=8", "fidelity=off")

    def without_bytecode(self) -> None:
        """As somebody has the task who never imported it."""
        for folder in self.task.rglob("__pycache__"):
            shutil.rmtree(folder)

    def changes(self) -> dict[str, Callable[[random.Random], object]]:
        """Name -> a change of that input. Times of files stay what they were where a program can keep them."""
        found: dict[str, Callable[[random.Random], object]] = {
            "rows": self._row,
            "picture": lambda rng: self._bytes(self.task / "pictures" / f"{rng.randrange(2)}.bmp", rng, 200, 4),
            "beside": lambda rng: self._moved(),
            "package": lambda rng: self._text(self.task / "words" / "first.py", '"one"', f'"{rng.choice(WORDS)}"'),
            "template": lambda rng: self._text(self.root / "template.txt", "Say", rng.choice(WORDS)),
            "utils": lambda rng: self._text(self.task / "utils.py", '"now"', f'"{rng.choice(WORDS)}"'),
            "yaml": lambda rng: self._text(
                self.task / f"{self.name}.yaml", "tokens: 2", f"tokens: {rng.choice((1, 3))}"
            ),
            "refs": lambda rng: self._text(self.task / "refs.json", "1.0", rng.choice(("0.0", "0.5"))),
            "variable": lambda rng: os.environ.update({VARIABLE: rng.choice(WORDS)}),
            "shard": lambda rng: self._bytes(self.model / "model-1.safetensors", rng, -4096, 64),
            "sub shard": lambda rng: self._bytes(self.model / "sub" / "model-2.safetensors", rng, -4096, 64),
            "chat template": lambda rng: self._text(
                self.model / "chat_template.jinja", "assistant", rng.choice(("user", "system")), last=True
            ),
            "config": lambda rng: self._text(
                self.model / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-01'
            ),
            "method": lambda rng: self._text(self.root / "mine.py", "SIGN = 1", f"SIGN = {rng.choice((-1, -2))}"),
        }
        if self.kind.listing == "listing":
            found["listing"] = lambda rng: (self.task / "names" / rng.choice(WORDS)).touch()
        return found

    def _row(self, rng: random.Random) -> None:
        rows = [{"question": f"What is {n}?", "answer": "yes", "file": f"{n}.bmp"} for n in range(2)]
        key = rng.choice(("question", "answer", "file"))
        rows[rng.randrange(2)][key] = {
            "question": rng.choice(WORDS),
            "answer": "no",
            "file": f"{rng.randrange(2)}.bmp",
        }[key]
        with kept_time(self.rows):
            self._write_rows(rows)

    def _moved(self) -> None:
        """The json beside names another folder of the same pictures, in the other order."""
        others = self.task / "others"
        others.mkdir()
        for number in range(2):
            shutil.copy(self.task / "pictures" / f"{number}.bmp", others / f"{1 - number}.bmp")
        self._text(self.task / "beside.json", "pictures", "others")

    def _text(self, file: Path, old: str, new: str, last: bool = False) -> None:
        text = file.read_text()
        assert old in text, (file, old)
        place = text.rindex(old) if last else text.index(old)
        with kept_time(file):
            file.write_text(text[:place] + new + text[place + len(old) :])

    def _bytes(self, file: Path, rng: random.Random, start: int, count: int) -> None:
        """Some bytes in place, from `start` on; of a file's weights the last ones are numbers."""
        raw = bytearray(file.read_bytes())
        for _ in range(count):
            raw[start + rng.randrange(2000)] ^= rng.choice((1, 64))
        with kept_time(file), file.open("r+b") as stream:
            stream.write(raw)


WORDS = ("two", "six", "ten", "red")
"""As long as what they replace, so that nothing but its content tells a file from the old one."""


class kept_time:
    """Puts a file's time of modification back, as cp -p and tar do."""

    def __init__(self, file: Path) -> None:
        self.file, self.before = file, file.stat()

    def __enter__(self) -> None:
        """The time is known."""

    def __exit__(self, *_: object) -> None:
        os.utime(self.file, ns=(self.before.st_atime_ns, self.before.st_mtime_ns))

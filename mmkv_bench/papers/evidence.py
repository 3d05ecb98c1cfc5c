"""Evidence for the papers' numbers: rows of the table `cells` of several stores, matched to addresses by parameters.

A row is a stored setting ("cell"): one model, dataset, method, budget, protocol and seed. Rows of the embedded model, of fixture
data and of random weights are no evidence; random weights do give times and bytes of made-up prompts, which do not depend on
weights. Only rows of the embedded model fill stand-ins.

A number is compared with a printed one only if its rows have the facts (such as dtype) that the address and the files of `conf`
require. Facts that neither a paper nor a file states, such as the commit of the weights, are reported as unstated.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmkv_bench.config.files import content, options
from mmkv_bench.errors import ConfigError
from mmkv_bench.models.files import hub_fingerprint
from mmkv_bench.papers.address import STAND_IN, SYNTHETIC, Address, canonical, file_of, samples_of
from mmkv_bench.papers.measurement import Measurement, Shared, State
from mmkv_bench.store.schema import NUMERICS_VERSION
from mmkv_bench.tables.stored_rows import CONTEXT, FIXTURE, config_of, with_limits

if TYPE_CHECKING:
    import pandas as pd

TINY = "mmkv_bench/tiny/weights"
VERSIONS = ("torch", "transformers", "dtype", "attention")
_MAY_DIFFER = (
    *(name for name in CONTEXT if name not in ("model", "dataset", "protocol")),
    *("method_version", "model_revision", "weights", "git_dirty", "device"),
)
"""Columns in which two rows of one address may differ."""
_SHOWN_LETTERS = 48  # printed characters of a difference


class RunFacts(NamedTuple):
    """Facts that the rows of one run share. A run is one measurement of a number, with all seeds.

    mismatches: texts on facts that contradict the paper. shared: facts that compared numbers must share. version: version of
    the method's code. libraries: versions of torch and transformers.
    """

    mismatches: tuple[str, ...]
    shared: Shared
    version: int
    libraries: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """Rows from several stores whose numbers may be compared with papers.

    roots: folders of the stores. cells: rows of the table `cells`, with the column `store`, a position in `roots`.
    refused: number of rows that are no evidence.
    stand_in: True if the rows are those of the embedded model, which fill stand-ins.
    """

    roots: tuple[Path, ...]
    cells: pd.DataFrame
    refused: int = 0
    stand_in: bool = False

    @classmethod
    def of(cls, roots: Sequence[Path], stand_in: bool = False) -> Evidence:
        """Read the evidence in `roots`, which are stores or contain stores. stand_in: as in the class.

        Raises:
            ConfigError: a folder does not exist or has no rows.
            StoreError: a store has another schema version.
        """
        import pandas as pd

        from mmkv_bench.store.store import Store

        stores = tuple(store for root in roots for store in _stores(root))
        frames = [Store(store).cells().to_pandas().assign(store=number) for number, store in enumerate(stores)]
        frames = [frame for frame in frames if len(frame)]
        if not frames:
            return cls(stores, pd.DataFrame(), stand_in=stand_in)
        cells = with_limits(pd.concat(frames, ignore_index=True))
        is_counted = cells["model"] == STAND_IN if stand_in else ~_stand_ins(cells)
        return cls(stores, cells[is_counted].reset_index(drop=True), int((~is_counted).sum()), stand_in)

    @cached_property
    def diagnostics(self) -> pd.DataFrame:
        """Rows of `diagnostics` in all stores without copies, with the column `store`."""
        import pandas as pd

        from mmkv_bench.store.store import Store

        tables = [Store(store).diagnostics(coded=True).to_pandas() for store in self.roots]
        frames = [table.assign(store=number) for number, table in enumerate(tables) if len(table)]
        if not frames:
            return pd.DataFrame()
        texts = [name for name in frames[0] if isinstance(frames[0][name].dtype, pd.CategoricalDtype)]
        rows = pd.concat([frame.astype(dict.fromkeys(texts, "object")) for frame in frames], ignore_index=True)
        return rows.drop_duplicates(["measurement", "sample_id", "layer", "head", "quantity", "part", "x"])

    def match(self, wanted: Address, like: Shared | None = None) -> Measurement:
        """Return a measurement without value, with the rows from which the number `wanted` is computed.

        If several runs measured the number, `_rank` chooses one. The state of the result is:
        - `measured`, or `part` if a required seed has no row;
        - `ambiguous` if the chosen run has several rows of one seed;
        - `not run` if there are no such rows.

        like: facts that the rows must have, an item of `Measurement.shared`; None: any rows.
        """
        rows = self.candidates(wanted)
        if not len(rows):
            return Measurement(State.NOT_RUN)
        seeds = self._seeds[rows]
        has_required_seed = np.isnan(seeds) | np.isin(seeds, wanted.seeds)
        if not has_required_seed.any():
            seeds_found, seeds_required = (
                ", ".join(f"{seed:g}" for seed in sorted({*values})) for values in (seeds, wanted.seeds)
            )
            return Measurement(State.NOT_RUN, f"there are rows of seed {seeds_found}, the table has {seeds_required}")
        rows_by_run: dict[RunFacts, list[int]] = {}
        for row in rows[has_required_seed].tolist():
            run_facts = self._facts[row]
            libraries = tuple(str(self._records[row][name]) for name in ("torch", "transformers"))
            shared_facts = tuple(
                (name, _text(value, None)) for name, value in sorted(run_facts.items()) if name not in _UNSHARED_FACTS
            )
            mismatches = contradictions(wanted, run_facts, CONDITIONS if self.stand_in else None)
            if like is None or shared_facts == like:
                rows_by_run.setdefault(
                    RunFacts(mismatches, shared_facts, run_facts["method version"], libraries), []
                ).append(row)
        if not rows_by_run:
            return Measurement(State.NOT_RUN)
        runs = {key: np.array(run) for key, run in rows_by_run.items()}
        best_run = max(runs, key=lambda key: self._rank(key, runs[key], wanted)) if len(runs) > 1 else next(iter(runs))
        _, first = np.unique(self.cells["cell"].to_numpy()[runs[best_run]], return_index=True)
        rows = runs[best_run][np.sort(first)]
        seeds = self._seeds[rows]
        if len(np.unique(seeds)) < len(rows):  # such as two calibrations under `auto`: their mean belongs to no seed
            return Measurement(State.AMBIGUOUS, self._differences(rows), rows=tuple(rows.tolist()))
        missing = [] if np.isnan(seeds).all() else [str(seed) for seed in wanted.seeds if seed not in seeds]
        passed_over = self._differences(np.concatenate([*runs.values()])) if len(runs) > 1 else ""
        unstated = () if self.stand_in else unstated_facts(wanted, self._facts[rows[0]])
        return Measurement(
            State.PART if missing else State.MEASURED,
            f"seeds {', '.join(missing)} missing" if missing else "",
            mismatches=best_run.mismatches,
            rows=tuple(rows.tolist()),
            unstated=unstated,
            shared=(best_run.shared,),
            passed=passed_over,
        )

    def candidates(self, wanted: Address) -> np.ndarray:
        """Return the positions of all rows with the model, data, method, protocol and budget of `wanted`, int [n]."""
        base, reading = wanted.method.base, wanted.reading
        method = base, wanted.method.parameters(reading), "" if base == "full" else reading
        key = (wanted.model, wanted.dataset, *method, wanted.protocol, wanted.budget_kind, wanted.budget)
        rows = self._by_key.get(key, np.array([], dtype=np.int64))
        return np.array([row for row in rows if self._has_calibration(row, wanted.method.calibrated)], dtype=np.int64)

    def _rank(self, key: RunFacts, rows: np.ndarray, wanted: Address) -> tuple[object, ...]:
        """Return the sort key of a run that measured the number at the address `wanted`. The run with the greatest key is used.

        Fewest mismatches come first, then the newest version of the method, the most answers, and the newest run. Scores
        are no part of the key.

        key: facts of the run. rows: positions of the run's rows.
        """
        size = samples_of(file_of(wanted.dataset)) or np.inf if wanted.dataset not in SYNTHETIC else 0
        answers_of_store: dict[str, float] = {}
        for record in (self._records[row] for row in rows.tolist()):
            n = min(self._answers[record["store"]].get(record["cell"], 0), size)
            answers_of_store[record["cell"]] = max(answers_of_store.get(record["cell"], 0), n)
        newest_time = max(self._records[row]["created_at"] for row in rows.tolist())
        return -len(key.mismatches), key.version, sum(answers_of_store.values()), newest_time

    def cell(self, row: int) -> tuple[int, str]:
        """Return (position of the store in `roots`, hash) of the row at position `row`."""
        return int(self.cells["store"].iloc[row]), str(self.cells["cell"].iloc[row])

    def source(self, row: int) -> str:
        """Return the arguments of `mmkv-bench show` for a row: rows folder and hash."""
        store, name = self.cell(row)
        return f"{self.folder(store)} {name}"

    def folder(self, store: int) -> Path:
        """Return the folder of a store, relative to the working folder if it lies below that."""
        root = self.roots[store].resolve()
        return root.relative_to(Path.cwd()) if root.is_relative_to(Path.cwd()) else root

    def versions(self, rows: Sequence[int]) -> dict[str, tuple[str, ...]]:
        """Return column of versions -> distinct values in `rows`, such as torch -> ("2.6.0",)."""
        cells = self.cells.iloc[list(rows)]
        return {name: tuple(sorted({str(value) for value in cells[name]})) for name in VERSIONS if name in cells}

    def _has_calibration(self, row: int, wanted: Mapping[str, Any]) -> bool:
        """Return True if a row's method read the required calibration.

        wanted: source of the calibration (`MethodSettings.calibrated`). If it is empty, the row must have no calibration, or the
            default calibration of the model.
        """
        calibration_checksums = json.loads(self.cells["parameters"].iloc[row]).get("calibration")
        if not isinstance(calibration_checksums, Mapping):
            return not wanted
        config = config_of(self.cells["config"].iloc[row])
        if not wanted:
            name = self.cells["method"].iloc[row]
            node = (config.get("variants") or {}).get(name) or (config.get("methods") or {}).get(name) or {}
            return node.get("calibration", "auto") in ("auto", None)
        files = [(config.get("calibrations") or {}).get(checksum) or {} for checksum in calibration_checksums.values()]
        return bool(files) and all(
            wanted.get("samples") in (None, one.get("samples"))
            and f" of {wanted['data']} (" in str(one.get("dataset", ""))
            and wanted.get("instruction") == one.get("instruction")
            for one in files
        )

    def _differences(self, rows: np.ndarray) -> str:
        """Return a text on how rows at one address differ, with the folders of the stores."""
        cells = self.cells.iloc[rows]
        parameters = [json.loads(text) for text in cells["parameters"]]
        columns = {name: [str(value) for value in cells[name]] for name in _MAY_DIFFER}
        for key in sorted({key for one in parameters for key in one}):
            columns[key] = [json.dumps(one.get(key, "not there"), sort_keys=True) for one in parameters]
        differing_values = {name: sorted({*values}) for name, values in columns.items() if len({*values}) > 1}
        difference_texts = [
            f"{name} {' | '.join(value[:_SHOWN_LETTERS] for value in values)}"
            for name, values in differing_values.items()
        ]
        stores = sorted({int(number) for number in cells["store"]})
        return "; ".join([*difference_texts, "in " + ", ".join(str(self.roots[number]) for number in stores)])

    @cached_property
    def _by_key(self) -> Mapping[tuple[str, ...], np.ndarray]:
        """Key of `candidates` -> positions of the rows."""
        rows_by_key: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for row, cell in enumerate(self._records):
            fraction, entries = cell["budget_fraction"], cell["budget_entries"]
            texts = [] if fraction is None else [f"{Decimal(fraction).normalize():f}"]  # as `address.budget_of` does
            budget = " ".join([*texts, *([] if entries is None else [str(int(entries))])])
            method = cell["base"], canonical(cell["base"], cell["parameters"]), cell["reading"] or ""
            rows_by_key[cell["model"], cell["dataset"], *method, cell["protocol"], cell["budget_kind"], budget].append(
                row
            )
        return {key: np.array(places) for key, places in rows_by_key.items()}

    @cached_property
    def _records(self) -> list[dict[str, Any]]:
        """Rows of `cells` as mappings, with null as None."""
        records: list[dict[str, Any]] = self.cells.astype(object).where(self.cells.notna(), None).to_dict("records")
        return records

    @cached_property
    def _seeds(self) -> np.ndarray:
        return self.cells["seed"].to_numpy(np.float64, na_value=np.nan)

    @cached_property
    def _facts(self) -> list[dict[str, Any]]:
        return [facts_of(record) for record in self._records]

    @cached_property
    def _answers(self) -> list[Mapping[str, int]]:
        """One mapping per store: hash -> upper bound of the number of answers."""
        from mmkv_bench.store.store import Store

        return [Store(root).counts("responses") for root in self.roots]


def _stores(root: Path) -> list[Path]:
    advice = "give folders that runs printed, or a folder that contains them"
    if not root.is_dir():
        raise ConfigError(f"there is no rows folder at '{root}'; {advice}")
    stores = sorted(mark.parent for mark in root.rglob("store.json"))
    if not stores:
        raise ConfigError(f"'{root}' has no result rows; {advice}")
    return stores


def _stand_ins(cells: pd.DataFrame) -> pd.Series:
    """Mask the rows that are no evidence: of fixture data, the embedded model, or random weights (unless of timed passes)."""
    weights = cells["weights"] if "weights" in cells else cells["model"].where(False)
    paths = {text: str((config_of(text).get("model") or {}).get("path") or "") for text in set(cells["config"])}
    uses_embedded_model = cells["config"].map(
        {text: TINY in path or path.endswith("tiny/weights") for text, path in paths.items()}
    )
    has_random_weights = (weights == "random").fillna(False) & ~cells["dataset"].isin(SYNTHETIC)
    return (
        has_random_weights | (cells["model"] == STAND_IN) | uses_embedded_model | cells["dataset"].str.endswith(FIXTURE)
    )


HUB, FOLDER, RANDOM = "hub", "folder", "random"
CONDITIONS = ("max_new_tokens", "cut_prompt", "frames")
"""Facts that a table may require."""
OF_DIAGNOSTICS = ("weights", "dtype", "attention", "min_pixels", "max_pixels", "video_max_pixels")
"""Facts that diagnostics state."""
CHANGED = "changed since its commit"
PROMPTS = "prompt_tokens"
"""Metric that does not depend on the length of the answers."""
_LIMITS = ("min_pixels", "max_pixels", "video_max_pixels", "max_prompt_tokens", "layers", "frames")
_DATA_KEYS = ("task", "split", "include_path", "placeholders", "cluster_key")
_TIMING_KEYS = ("profiles", "memory_limit")
_UNSHARED_FACTS = ("method version", "code", "weights")
"""Facts in which compared numbers may differ; another fact, the fingerprint, identifies the weights."""
_LONGEST_FACT = 60  # printed characters of a value


def facts_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> value of the facts (such as weights, dtype, pixel limits) of a row of `cells`; None if unrecorded.

    row: column -> value, None for null.
    """
    config = config_of(row["config"])
    model, data = config.get("model") or {}, (config.get("datasets") or {}).get(row["dataset"]) or {}
    generation = dict(json.loads(row["generation"]))
    stated_facts = {name: model.get(name) for name in ("path", "revision", *_LIMITS)}
    stated_facts |= {name: row.get(name) for name in ("weights", "dtype", "attention")}
    stated_facts |= {"commit": row.get("model_revision"), "fingerprint": row["model_fingerprint"]}
    stated_facts |= {"numerics": row["numerics_version"], "method version": int(row.get("method_version") or 1)}
    stated_facts |= {"code": CHANGED if row.get("git_dirty") else None}
    if row["dataset"] in SYNTHETIC:
        stated_facts |= _shape(model) if row.get("weights") == RANDOM else {}
        stated_facts |= {name: config.get(name) for name in _TIMING_KEYS} | {"decode": generation.get("decode")}
        return stated_facts | {"device": row["device"], "cpu": row.get("cpu") if row["device"] == "cpu" else None}
    stated_facts |= {name: generation.pop(name, None) for name in ("max_new_tokens", "cut_prompt")}
    stated_facts |= {"num_beams": generation.pop("num_beams", 1), "decoding": generation}
    local_folder = data.get("dataset_path") or (config.get("data") or {}).get("root")
    stated_facts |= {name: data.get(name) for name in _DATA_KEYS} | {"source": FOLDER if local_folder else HUB}
    return stated_facts | {"data": row["dataset_fingerprint"]}


def required_facts(address: Address, actual: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> value of the facts that rows must have to measure the number at `address`.

    actual: facts of the row. Its commit determines the required fingerprint of the weights.
    """
    model, data = _file("model", address.model), _file("dataset", file_of(address.dataset))
    is_timed = address.dataset in SYNTHETIC
    required = {name: model.get(name) for name in ("revision", *_LIMITS)} | {"code": None}
    required |= {"dtype": model["dtype"], "attention": model["attention"], "numerics": NUMERICS_VERSION}
    if address.frames is not None and not is_timed:  # made-up prompts have a length instead
        required["frames"] = address.frames
    required["method version"] = 1 if address.method.base == "full" else address.method.version(address.reading)
    if is_timed and actual["weights"] == RANDOM:
        required |= _shape(model)
    else:
        fingerprint = hub_fingerprint(model["path"], str(actual["commit"]))
        required |= {"weights": HUB, "path": model["path"], "fingerprint": fingerprint}
        required |= {"commit": model["revision"]} if model.get("revision") else {}
    if is_timed:
        return required | dict.fromkeys((*_TIMING_KEYS, "decode"))
    dataset_facts = data.get("about") or {}
    decoding = {"do_sample": False, "until": dataset_facts.get("until") or []} | dict(data.get("generation") or {})
    required |= {name: decoding.pop(name, None) for name in ("max_new_tokens", "cut_prompt")}
    conditions = {"max_new_tokens": address.max_new_tokens, "cut_prompt": address.cut_prompt}
    required |= {name: value for name, value in conditions.items() if value is not None}
    if address.metric == PROMPTS:
        required.pop("max_new_tokens")
    required |= {"num_beams": 1, "decoding": decoding} | {name: data.get(name) for name in _DATA_KEYS}
    if "fingerprint" in dataset_facts:
        return required | {"data": dataset_facts["fingerprint"]}
    return required if data.get("offline") else required | {"source": HUB}


def requirements(address: Address) -> str:
    """Return a text on the facts that rows must have to be compared with the paper's number at `address`."""
    all_requirements = required_facts(address, {"weights": HUB, "commit": None})
    requirement_texts = [
        f"{name} {_text(value)}"
        for name, value in all_requirements.items()
        if value is not None and name != "fingerprint"
    ]
    return f"{', '.join(requirement_texts)}; no {', '.join(name for name, value in all_requirements.items() if value is None)}"


def contradictions(address: Address, actual: Mapping[str, Any], only: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return texts on the facts that differ from the required ones, such as `max_pixels 50176, the table has none`.

    actual: facts of a row. only: names of the facts to check; None: all.
    """
    required = required_facts(address, actual).items()
    contradicted_facts = {
        name: value for name, value in required if actual.get(name) != value and (only is None or name in only)
    }
    return tuple(
        f"{name} {_text(actual.get(name))}, the table has {_text(value)}" for name, value in contradicted_facts.items()
    )


def unstated_facts(address: Address, actual: Mapping[str, Any]) -> tuple[str, ...]:
    """Return texts on the weights and data of a row, if neither the paper nor a file of `conf` states them."""
    required, unstated_texts = required_facts(address, actual), []
    if "commit" not in required and actual["weights"] != RANDOM:
        unstated_texts.append(f"weights {actual['path']} at {_text(actual['commit'])}")
    if "data" not in required and address.dataset not in SYNTHETIC:
        unstated_texts.append(f"{address.dataset} {actual['data']}")
    return tuple(unstated_texts)


def _shape(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that timed passes with random weights must share: the model's shape and processor.

    The number of positions is left out, because runs may raise it for longer prompts.
    """
    shape = json.loads(json.dumps(model.get("shape") or {}))
    (shape.get("text_config") or {}).pop("max_position_embeddings", None)
    return {"shape": shape, "processor": model.get("processor")}


@cache
def _file(group: str, name: str) -> Mapping[str, Any]:
    return content(group, name) if name in options(group) else {}


def _text(value: Any, length: int | None = _LONGEST_FACT) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text[:length]

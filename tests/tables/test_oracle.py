"""Promise: what tables print of a store is what a slow reference of dicts and loops makes of the same rows.

The reference follows the definitions (docs/statistics.md, docs/decisions.md), shares no code with the tables, and knows no
arrays: rows are dicts, sums are loops. Only the bootstrap's draws are taken from the code, being random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mmkv_bench.statistics.intervals import cluster_draws
from mmkv_bench.store.compact import pack
from mmkv_bench.store.store import Store
from mmkv_bench.tables.build import build
from mmkv_bench.tables.stored_rows import load
from tests.each import each
from tests.tables.examples import HEADS, PROMPT, Example, cell_row, markdown, response_rows

METHODS, BUDGETS = ("random", "alpha", "beta", "gamma", "delta"), (32, 64)
FALLS = "ppl"


# Random small stores


def random_example(seed: int) -> Example:
    """Cells of full, of four methods and of two seeds of random at two budgets; some samples fail or are missing."""
    rng = np.random.default_rng(seed)
    clusters = [f"page{i // (1 + seed % 2)}" for i in range(int(rng.integers(12, 15)) * (1 + seed % 2))]
    hard, tokens = rng.random(len(clusters)), rng.integers(1, 5, len(clusters))
    example = Example()
    plan = [("full", None, None), *((name, budget, None) for name in METHODS[1:] for budget in BUDGETS)]
    plan += [("random", budget, number) for budget in BUDGETS for number in (0, 1)]
    for method, budget, number in plan:
        row = cell_row(f"c{len(example.cells):02d}", method, budget, seed=number)
        skill = {"full": 0.95, "alpha": 0.97, "beta": 0.5, "gamma": 0.1}.get(method, 0.3)
        spoiled = method in ("delta", "full") and seed % 3 == 0 and budget != 32
        samples = []
        for i, cluster in enumerate(clusters):
            status = str(rng.choice(["ok", "oom", "nan", "timeout"], p=[0.85, 0.05, 0.05, 0.05])) if spoiled else "ok"
            if (spoiled or number == 1) and rng.random() < 0.1:
                continue  # not answered
            one = {
                "cell": row["cell"],
                "dataset": "walk3",
                "sample_id": f"s{i:03d}",
                "cluster": cluster,
                "status": status,
            }
            right, nll = float(rng.random() < skill), float(tokens[i] * (1 + hard[i] - skill + rng.normal(0, 0.05)))
            for metric, value, parts in (
                ("exact_match", right, None),
                ("exact_match_walk" if i % 2 else "exact_match_lookup", right, None),
                ("anls", float(np.clip(skill + rng.normal(0, 0.1), 0, 1)), None),
                (FALLS, math.exp(nll / tokens[i]), [nll, float(tokens[i])]),
            ):
                failed = {"value": None, "parts": None if parts is None else [0.0, 0.0]}
                good = {"value": value, "parts": parts}
                samples.append(one | {"metric": metric} | (good if status == "ok" else failed))
        example.cells.append(row)
        example.samples += samples
        answered = [one for one in samples if one["metric"] == "exact_match"]
        for response in response_rows(row, answered):
            example.responses.append(response | (_audited(rng, method, budget, response) if method != "full" else {}))
    return example


def _audited(rng: np.random.Generator, method: str, budget: int, response: dict) -> dict:
    if response["status"] != "ok":
        return {"fallback": ["short"] if rng.random() < 0.3 else []}
    found: dict = {"fallback": [name for name in ("wide", "short") if rng.random() < 0.1]}
    if (method, budget) == ("delta", 64):
        found["entries_resident"] = int(budget * HEADS * rng.choice([1, 1, 1.5]))
    if method == "beta" and rng.random() < 0.6:
        found["tokens_from_compressed"] = 1
    if method == "gamma" and rng.random() < 0.1:
        found["question_text_before_cut"] = 4
    kept = budget * HEADS
    bytes_of = {"bytes_full": PROMPT * HEADS * 8, "bytes_device": kept * 8, "bytes_host": 0, "bytes_metadata": kept}
    if (method, budget) == ("gamma", 32):
        bytes_of |= {"bytes_device": kept * 2} if rng.random() < 0.5 else {}
    reach = kept * 3 if (method, budget) == ("beta", 64) and rng.random() < 0.5 else found.get("entries_resident", kept)
    return found | bytes_of | {"entries_reachable": reach}


# The reference


def reference_table(example: Example, metric: str) -> dict[tuple[str, int | None], dict]:
    """(method, budget) -> what the table says of it."""
    cells: dict[tuple[str, int | None], list[dict]] = {}
    for row in example.cells:
        cells.setdefault((row["method"], row["budget_entries"]), []).append(row)
    table = {}
    for key, own in cells.items():
        names = [row["cell"] for row in own]
        rows = [row for row in example.samples if row["metric"] == metric and row["cell"] in names]
        entry = table[key] = {"rows": rows, "scores": {}, "cluster": {}, "n": 0}
        for sample in sorted({row["sample_id"] for row in rows}):
            mine = [row for row in rows if row["sample_id"] == sample]
            entry["cluster"][sample] = mine[0]["cluster"]
            good = all(row["status"] == "ok" and row["value"] is not None for row in mine)
            parts = [row["parts"] for row in mine] if metric == FALLS else [[row["value"], 1.0] for row in mine]
            entry["scores"][sample] = [sum(p[k] for p in parts) / len(parts) for k in (0, 1)] if good else None
        entry["n"] = len(entry["scores"])
        entry["ok"] = [sample for sample, score in entry["scores"].items() if score is not None]
        entry["audit"] = reference_audit(example, names, {row["sample_id"] for row in rows})
    common = set.intersection(*(set(entry["ok"]) for entry in table.values()))
    for entry in table.values():
        scores = entry["scores"]
        entry["value"] = headline(metric, scores.values()) if len(entry["ok"]) == entry["n"] else None
        zeros = [score or [0.0, 1.0] for score in scores.values()]
        entry["zero"] = None if metric == FALLS and entry["value"] is None else headline(metric, zeros)
        entry["common"] = headline(metric, [scores[sample] for sample in common]) if common else None
    return table


def headline(metric: str, scores) -> float:
    total, size = (sum(score[k] for score in scores) for scores in [list(scores)] for k in (0, 1))
    return math.exp(total / size) if metric == FALLS else total / size


def reference_audit(example: Example, cells: Sequence[str], samples: set[str]) -> dict:
    found = {"n": 0, "over": [], "prefill": 0, "cut": 0, "packed": 0, "reach": 0, "fallbacks": {}}
    for row in example.responses:
        if row["cell"] not in cells or row["sample_id"] not in samples or row["status"] != "ok":
            continue
        found["n"] += 1
        asked, resident = row["entries_asked"], row["entries_resident"]
        if asked and resident > asked:
            found["over"].append(resident / asked - 1)
        decoded = row["tokens_from_compressed"] - (row["finish_reason"] == "eos")
        found["prefill"] += decoded <= 0 and row["tokens_from_compressed"] < row["n_tokens"]
        found["cut"] += row["question_text_before_cut"] > 0
        if asked and "bytes_full" in row:
            whole = asked * row["context_tokens"] / min(row["budget_entries"], row["context_tokens"])
            found["packed"] += row["bytes_device"] < 0.9 * row["bytes_full"] * resident / whole
            found["reach"] += row["entries_reachable"] > resident
        for reason in row["fallback"]:
            found["fallbacks"][reason] = found["fallbacks"].get(reason, 0) + 1
    return found


def wilson_of(scores: dict[str, list[float]], cluster: dict[str, str]) -> tuple[float, float]:
    """Where the score test of the mean, at the effective number of samples, is exactly rejected at 5 %; with clusters by
    Student's t of as many equal ones, and by the jackknife's variance."""
    values = {sample: score[0] for sample, score in scores.items()}
    n, mean, clusters = len(values), sum(values.values()) / len(values), set(cluster.values())
    effective, z = float(n), stats.norm.ppf(0.975)
    if len(clusters) < n:
        pages = [[v for s, v in values.items() if cluster[s] == page] for page in clusters]
        equal = n**2 / sum(len(page) ** 2 for page in pages)
        z = stats.t.ppf(0.975, equal - 1)
        if mean in (0, 1):
            effective = equal
        else:
            left_out = [(sum(values.values()) - sum(page)) / (n - len(page)) for page in pages]
            pulls = [(n - len(page)) / n * (mean - out) for page, out in zip(pages, left_out, strict=True)]
            scaled = [
                pull / (1 - len(page) / n) * (1 - 1 / len(pages)) for pull, page in zip(pulls, pages, strict=True)
            ]
            effective = min(n, mean * (1 - mean) / sum(pull**2 for pull in scaled))
    a, b, c = 1 + z * z / effective, -(2 * mean + z * z / effective), mean * mean
    root = math.sqrt(max(b * b - 4 * a * c, 0))
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def bootstrap_of(metric: str, entry: dict) -> tuple[float, float]:
    """The 2.5 % and 97.5 % order statistics over draws of whole clusters."""
    pages = sorted(set(entry["cluster"].values()))
    sums = [[0.0, 0.0] for _ in pages]
    for sample, score in entry["scores"].items():
        for k in (0, 1):
            sums[pages.index(entry["cluster"][sample])][k] += score[k]
    drawn = []
    for block in cluster_draws("walk3", len(pages)):
        for counts in block.tolist():
            total = sum(count * own[0] for count, own in zip(counts, sums, strict=True))
            size = sum(count * own[1] for count, own in zip(counts, sums, strict=True))
            drawn.append(math.exp(total / size) if metric == FALLS else total / size)
    drawn.sort()
    skip = math.floor(0.05 * (len(drawn) + 1) / 2 + 1e-9) - 1
    return drawn[skip], drawn[-1 - skip]


def cluster_differences(a: dict, b: dict) -> dict[str, list[float]]:
    """Cluster -> [difference summed, size], over the samples ok in both."""
    found: dict[str, list[float]] = {}
    for sample in set(a["ok"]) & set(b["ok"]):
        own = found.setdefault(a["cluster"][sample], [0.0, 0.0])
        own[0] += a["scores"][sample][0] - b["scores"][sample][0]
        own[1] += a["scores"][sample][1]
    return {page: [0.0 if abs(d) < 1e-9 else d, size] for page, (d, size) in found.items()}


def decidable(clusters: dict[str, list[float]]) -> bool:
    """True if no cluster holds more than a tenth of the samples."""
    return bool(clusters) and max(size for _, size in clusters.values()) * 10 <= sum(n for _, n in clusters.values())


def paired(clusters: dict[str, list[float]], share: bool) -> float:
    """The t test, to whose variance two clusters are added that differ wholly (four, by the largest rate seen, of nats)."""
    if not decidable(clusters):
        return 1.0
    total, count = sum(size for _, size in clusters.values()), len(clusters)
    mean = sum(d for d, _ in clusters.values()) / total
    usual = sum(size**2 for _, size in clusters.values()) / count
    rates = [abs(d) / size for d, size in clusters.values()]
    unseen = 2 * max([1.0, *rates]) ** 2 * usual if share else 4 * max(rates) ** 2 * usual
    spread = sum((d - mean * size) ** 2 for d, size in clusters.values()) + unseen
    error = math.sqrt(spread * count / (count - 1)) / total
    return 2 * stats.t.sf(abs(mean) / error, count - 1) if mean else 1.0


def column_of(table: dict, metric: str, budget: int) -> tuple[dict, set[str], dict[str, tuple[int, int]]]:
    """(pair -> p, the bold ones, their ranks) of those that compete at a budget; neither where nobody beats anybody."""
    entries = {method: table[method, budget] for method in METHODS}
    rivals = [m for m, e in entries.items() if not (e["audit"]["over"] or e["audit"]["packed"] or e["audit"]["reach"])]
    pairs = {pair: cluster_differences(*(entries[m] for m in pair)) for pair in combinations(rivals, 2)}
    p = {pair: paired(clusters, metric != FALLS) for pair, clusters in pairs.items()}
    every = [score[0] for m in rivals for score in entries[m]["scores"].values() if score]
    alone = all(len(set(entries[m]["cluster"].values())) == entries[m]["n"] for m in rivals)
    for (a, b), clusters in pairs.items():
        own = [s[0] for m in (a, b) for s in entries[m]["scores"].values() if s]
        if alone and metric != FALLS and every and set(own) <= {0.0, 1.0} and decidable(clusters):
            up, down = (sum(sign * d > 0 for d, _ in clusters.values()) for sign in (1, -1))
            p[a, b] = stats.binomtest(up, up + down).pvalue if up + down else 1.0
    beats: dict[str, set[str]] = {m: set() for m in rivals}
    open_, ordered = True, sorted(p, key=p.get)
    for k, (a, b) in enumerate(ordered):
        open_ = open_ and p[a, b] <= 0.05 / (len(ordered) - k)
        if open_ or p[a, b] <= 0.05 / (len(rivals) - 1):
            a_wins = (sum(d for d, _ in pairs[a, b].values()) > 0) != (metric == FALLS)
            beats[a if a_wins else b].add(b if a_wins else a)
    same = len({tuple(entries[m]["ok"]) for m in rivals}) == 1
    if not any(beats.values()) or not same or any(len(entries[m]["ok"]) < entries[m]["n"] for m in rivals):
        return p, set(), {}
    lost = {m: sum(m in own for own in beats.values()) for m in rivals}
    ranks = {m: (1 + lost[m], len(rivals) - len(beats[m])) for m in rivals}
    return p, {m for m in rivals if not lost[m]}, ranks


def marks_of(method: str, audit: dict, letters: dict[str, str]) -> str:
    found = "†" * bool(audit["over"]) + "§" * (method != "full" and 2 * audit["prefill"] > audit["n"])
    found += "¶" * bool(audit["cut"]) + "‡" * bool(audit["packed"]) + "◊" * bool(audit["reach"])
    return found + "".join(letters[reason] for reason in sorted(audit["fallbacks"]))


def printed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# What the tables say


def grid_after(text: str, start: str) -> dict[str, list[str]]:
    """First column -> the others, of the first printed grid after `start`."""
    lines = iter(text[text.index(start) :].splitlines())
    grid = list(iter_grid(lines))
    return {cells[0]: cells[1:] for cells in grid[2:]}


def iter_grid(lines):
    begun = False
    for line in lines:
        if line.startswith("|"):
            begun = True
            yield [cell.strip() for cell in line.strip("|").split("|")]
        elif begun:
            return


@pytest.mark.full
@each("seed", range(4))
def test_tables_are_what_dicts_and_loops_make_of_random_small_stores(seed: int, tmp_path: Path):
    example = random_example(seed)
    if seed < 2:  # through a store on disk, packed or not
        example.write(tmp_path)
        pack(Store(tmp_path)) if seed else None
    tables = {t.metric: t for t in build(load(tmp_path) if seed < 2 else example.rows())}
    text = markdown(list(tables.values()))
    assert set(tables) == {"exact_match", "exact_match_walk", "exact_match_lookup", "anls"} | {FALLS}
    for metric, table in tables.items():
        wanted = reference_table(example, metric)
        letters = {
            r: chr(97 + i) for i, r in enumerate(sorted({r for e in wanted.values() for r in e["audit"]["fallbacks"]}))
        }
        columns = {budget: column_of(wanted, metric, budget) for budget in BUDGETS}
        lines = grid_after(text, f"**walk3, {metric}**")
        assert list(lines) == ["full", "random", "alpha", "beta", "delta", "gamma"]
        sampled = False
        for (method, budget), entry in wanted.items():
            found = table.entries[method, "" if budget is None else str(budget)]
            assert (found.scores.n, found.scores.n_ok) == (entry["n"], len(entry["ok"]))
            for name in ("value", "zero", "common"):
                assert getattr(found, name) == (
                    entry[name] if entry[name] is None else pytest.approx(entry[name], rel=1e-12)
                )
            audit, said = entry["audit"], found.audit
            assert (said.n, said.over, said.fallbacks) == (audit["n"], len(audit["over"]), audit["fallbacks"])
            assert said.excess_mean == pytest.approx(sum(audit["over"]) / max(len(audit["over"]), 1), rel=1e-12)
            assert (said.from_prefill, said.text_before_cut) == (audit["prefill"], audit["cut"])
            assert (said.packed, said.retrievable) == (audit["packed"], audit["reach"])
            binary = metric != FALLS and {s[0] for s in entry["scores"].values() if s} <= {0.0, 1.0}
            if entry["value"] is not None and binary:
                assert (found.low, found.high) == pytest.approx(wilson_of(entry["scores"], entry["cluster"]), abs=1e-9)
            elif entry["value"] is not None and not sampled:
                sampled = True
                assert (found.low, found.high) == pytest.approx(bootstrap_of(metric, entry), rel=1e-9)
            shown = f"{len(entry['ok'])}/{entry['n']} ok: {printed(entry['zero'])} / {printed(entry['common'])}"
            if entry["value"] is not None:
                shown = f"{printed(entry['value'])} [{printed(found.low)}, {printed(found.high)}]"
            for place, column in enumerate(BUDGETS):
                if budget in (None, column):
                    bold = method in columns[column][1]
                    number, _, rest = shown.partition(" ")
                    line = f"**{number}** {rest}" if bold else shown
                    marks = marks_of(method, audit, letters)
                    assert lines[method][place] == (f"{line} {marks}" if marks else line)
        ranks = (
            grid_after(text[text.index(f"**walk3, {metric}**") :], "Ranks")
            if any(c[2] for c in columns.values())
            else {}
        )
        for budget, (p, _, ranked) in columns.items():
            column = table.columns[str(budget)]
            given = {
                frozenset((column.names[a], column.names[b])): q
                for a, b, q in zip(column.a, column.b, column.p, strict=True)
            }
            assert given == pytest.approx({frozenset(pair): q for pair, q in p.items()}, rel=1e-6)
            place = [b for b in BUDGETS if columns[b][2]].index(budget) if ranked else None
            for method, ends in ranked.items():
                assert ranks[method][place] == "-".join(map(str, dict.fromkeys(ends)))

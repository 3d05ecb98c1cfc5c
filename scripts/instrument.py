"""Report which methods the reader's rows separate, and whether other models and the papers agree (docs/findings.md).

    python scripts/instrument.py                # all parts
    python scripts/instrument.py power          # one part: power, tasks, models, papers
    python scripts/instrument.py predict FILE   # writes the predictions for SmolVLM-256M
    python scripts/instrument.py score FILE STORE   # counts the predictions that the rows of STORE prove

Scores are exact match under `protocol=paper`. A pair of methods is proven if the tables' paired test separates it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from findings import tables

RESULTS = Path(__file__).parents[1] / "results"
BUDGET = "0.2"
"""Budget of the primary endpoint, a fraction of the prompt."""
DRAWS = 1000
PROJECTED = 500
"""Documents of a task's test split."""
CONTROLS = ("random", "oracle", "blind")
NEXT_MODEL = "smolvlm_256m"
ASKED = ("reader_value", "reader_row", "reader_second")
"""Data sets of experiment=first_pages."""
PAIRS_OF_MODELS = {
    "SmolLM2, english_records at 20 %": ("real", "english_records", "smollm2_135m_q4_1_english", "0.2"),
    "SmolLM2, english_records at 40 %": ("real", "english_records", "smollm2_135m_q4_1_english", "0.4"),
    "embedded, pages_lookup_large at 64": ("tiny/methods", "pages_lookup_large", "tiny", "64"),
    "embedded, pages_walk_large at 128": ("tiny/methods", "pages_walk_large", "tiny", "128"),
}
"""Name -> store, dataset, model and budget of other tables that are compared with the reader's."""


def paper_tables(store: Path) -> list[Any]:
    """Build a store's tables of exact match under `paper`, one per dataset, model and kind of budget."""
    built = tables(store.name, store.parent)
    return [table for table in built if table.context["protocol"] == "paper" and table.axis != "none"]


def readers(results: Path) -> dict[str, Any]:
    """Return dataset -> the reader's table."""
    return {table.dataset: table for table in paper_tables(results / "reader")}


def compared(table: Any, budget: str) -> dict[str, Any]:
    """Return label -> scores [n] of the compared methods at a budget, without controls."""
    entries = {method.label: table.entries.get((method.label, budget)) for method in table.methods if method.budgeted}
    return {label: e.scores.values for label, e in entries.items() if e and not label.startswith(CONTROLS)}


def proven(table: Any, budget: str) -> dict[tuple[str, str], str | None]:
    """Map each pair of methods, in alphabetical order, to the method proven better, or None if neither is."""
    from mmkv_bench.tables.compare import every_pair

    pairs = [pair for pair in every_pair(table) if pair.budget == budget and pair.level is not None]
    rivals = (pair for pair in pairs if not {pair.a, pair.b} & {*CONTROLS})
    return {(min(pair.a, pair.b), max(pair.a, pair.b)): pair.better for pair in rivals}


def power(results: Path) -> Iterator[str]:
    """Yield the shares of pairs separated, measured and projected, and the reliability of the methods' order."""
    for dataset, table in readers(results).items():
        for budget in table.budgets:
            scores, decided = compared(table, budget), proven(table, budget)
            n = len(next(iter(scores.values())))
            separated = sum(better is not None for better in decided.values())
            yield (
                f"{dataset} at {budget}, n = {n}: {separated} of {len(decided)} pairs separated "
                f"({separated / len(decided):.0%}), {PROJECTED} documents with the same shares would separate "
                f"{projected(scores, PROJECTED):.0%}, reliability {reliability(scores):.2f}"
            )


def projected(scores: Mapping[str, Any], documents: int) -> float:
    """Return the share of pairs that the tables' test would separate, had so many documents the measured documents' scores.

    Scores are repeated to that number, so the measured shares are taken for the true ones: a projection, no measurement.
    """
    import numpy as np

    from mmkv_bench.statistics.cluster_sums import Samples
    from mmkv_bench.statistics.paired_tests import compare_pairs

    measured = np.stack([*scores.values()])
    repeated = measured[:, np.arange(documents) * measured.shape[1] // documents]
    pairs = np.triu_indices(len(measured), 1)
    column = compare_pairs([*scores], Samples(repeated, np.arange(documents)), *pairs)
    return float(np.mean(column.separated))


def reliability(scores: Mapping[str, Any]) -> float:
    """Return the mean correlation of the methods' means on two random halves of the samples, corrected to all samples.

    The correction is Spearman-Brown's. The result is NaN if all methods have the same mean in a half.
    """
    import numpy as np

    matrix, rng = np.stack([*scores.values()]), np.random.default_rng(0)
    values = []
    for _ in range(DRAWS):
        order = rng.permutation(matrix.shape[1])
        halves = [matrix[:, half].mean(1) for half in np.array_split(order, 2)]
        if min(half.std() for half in halves) == 0:
            return math.nan  # a half in which all methods are equal
        r = np.corrcoef(halves)[0, 1]
        values.append(2 * r / (1 + r))
    return float(np.mean(values))


def tasks(results: Path) -> Iterator[str]:
    """Yield the agreement of two tasks about the order of methods, with a bootstrap interval over both tasks' documents."""
    import numpy as np

    rng = np.random.default_rng(0)
    for (one, first), (other, second) in combinations(readers(results).items(), 2):
        for budget in first.budgets:
            sides = [compared(table, budget) for table in (first, second)]
            labels = [label for label in sides[0] if label in sides[1]]
            pair = [np.stack([side[label] for label in labels]) for side in sides]
            drawn = []
            for _ in range(DRAWS):
                means = [m[:, rng.integers(m.shape[1], size=m.shape[1])].mean(1) for m in pair]
                drawn.append(tau_b(*means))
            low, high = np.nanquantile(drawn, (0.025, 0.975))
            tau = tau_b(*(m.mean(1) for m in pair))
            yield f"{one} and {other} at {budget}: tau-b {tau:+.2f} [{low:+.2f}, {high:+.2f}], {len(labels)} methods"


def tau_b(one: Any, other: Any) -> float:
    """Return Kendall's tau-b of two orders."""
    from scipy.stats import kendalltau

    return float(kendalltau(one, other).statistic)


def models(results: Path) -> Iterator[str]:
    """Yield how decisions of the reader's tasks agree with those of SmolLM2 on text and of the embedded model."""
    others = {}
    for name, (store, dataset, model, budget) in PAIRS_OF_MODELS.items():
        (table,) = (
            t
            for t in paper_tables(results / store)
            if (t.dataset, t.context["model"]) == (dataset, model) and budget in t.budgets
        )
        others[name] = proven(table, budget)
    own = {f"reader, {dataset}": proven(table, BUDGET) for dataset, table in readers(results).items()}
    for (one, first), (other, second) in [
        *((a, b) for a in own.items() for b in others.items()),
        *combinations(own.items(), 2),
    ]:
        common = [pair for pair in first if pair in second]
        words = Counter(agreement(first[pair], second[pair]) for pair in common)
        yield (
            f"{one} beside {other}: of {len(common)} pairs {words['same']} are proven the same way, {words['opposite']} the "
            f"other way, {words['one']} by one of them, {words['none']} by none"
        )


def agreement(one: str | None, other: str | None) -> str:
    """Return how two decisions about a pair agree: `same`, `opposite`, `one` or `none`."""
    if one is None or other is None:
        return "none" if one is other else "one"
    return "same" if one == other else "opposite"


def printed() -> Iterator[tuple[str, tuple[str, ...], int, dict[str, float]]]:
    """Yield paper, setting, samples and method -> score [%] of every printed column of shares whose samples are known."""
    from mmkv_bench.papers.address import is_group, samples_of
    from mmkv_bench.papers.layout import table_ids
    from mmkv_bench.papers.printed import load, of_table

    shares = {id for id, unit in load()[["id", "unit"]].drop_duplicates().itertuples(index=False) if unit == "%"}
    for name in sorted(shares & {*table_ids()}):
        settings: dict[tuple[str, ...], dict[str, float]] = {}
        for (model, dataset, metric, method, minus, kind, budget, *_), value in of_table(name).items():
            if value.number is None or value.unit != "%" or minus or kind == "none" or " " in method or "{" in method:
                continue
            settings.setdefault((name, model, dataset, metric, budget), {})[method] = value.number
        for setting, scores in settings.items():
            n = 0 if is_group(setting[2]) or setting[2] == "mean" else samples_of(setting[2])
            if n and len(scores) > 1:
                yield name.partition("_")[0], setting, n, scores


def clear(scores: Mapping[str, float], n: int) -> Iterator[tuple[str, str, int]]:
    """Yield pairs of methods whose printed gap exceeds two standard errors, with 1 if the first is better, else -1."""
    for one, other in combinations(sorted(scores), 2):
        shares = [min(max(scores[method] / 100, 0.0), 1.0) for method in (one, other)]
        error = 100 * math.sqrt(sum(p * (1 - p) for p in shares) / n)
        gap = scores[one] - scores[other]
        if abs(gap) > 2 * error:
            yield one, other, 1 if gap > 0 else -1


def papers(results: Path) -> Iterator[str]:
    """Yield the tau-b of predictors with each paper's clear pairs; the paper's own method is left out.

    The predictors are the reader, two trivial rules and other papers.
    """
    import numpy as np

    guesses: dict[str, dict[str, float]] = {
        f"reader, {dataset} at {BUDGET}": {label: float(v.mean()) for label, v in compared(table, BUDGET).items()}
        for dataset, table in readers(results).items()
    }
    guesses["year of the paper"] = years()
    everything = list(printed())
    for paper in sorted({paper for paper, *_ in everything}):
        pairs = [pair for name, _, n, scores in everything if name == paper for pair in clear(scores, n)]
        others = [pair for pair in pairs if not any(method.startswith(paper) for method in pair[:2])]
        for name, guess in guesses.items():
            yield f"{paper}: {name}: {agreement_with(others, guess)}"
        first = {method: float(method.startswith(paper)) for pair in pairs for method in pair[:2]}
        yield f"{paper}: its own method first (own method left in): {agreement_with(pairs, first)}"
        elsewhere: dict[tuple[str, str], list[int]] = {}
        for name, _, n, scores in everything:
            for one, other, sign in clear(scores, n) if name != paper else ():
                elsewhere.setdefault((one, other), []).append(sign)
        signs = [
            sign * np.sign(np.mean(elsewhere[one, other])) for one, other, sign in others if (one, other) in elsewhere
        ]
        yield f"{paper}: other papers: {tau(signs)}"


def years() -> dict[str, float]:
    """Map each method to year and month of its paper, from the arXiv number."""
    import re

    from mmkv_bench.config.files import content, options

    sources = {name: str((content("method", name).get("about") or {}).get("source")) for name in options("method")}
    numbers = {name: re.search(r"arXiv (\d{4})\.", source) for name, source in sources.items()}
    return {name: float(number[1]) for name, number in numbers.items() if number}


def agreement_with(pairs: list[tuple[str, str, int]], guess: Mapping[str, float]) -> str:
    """Return how a guess of scores agrees with printed pairs, as text."""
    import numpy as np

    known = [pair for pair in pairs if pair[0] in guess and pair[1] in guess]
    return tau([float(sign * np.sign(guess[one] - guess[other])) for one, other, sign in known])


def tau(signs: list[float]) -> str:
    """Return tau-b of pairs that no paper ties, as text. signs: +1 same order, -1 opposite order, 0 tied in the guess."""
    untied = sum(sign != 0 for sign in signs)
    if not untied:
        return f"no pair ({len(signs)} ties)"
    return f"tau-b {sum(signs) / math.sqrt(len(signs) * untied):+.2f} over {len(signs)} pairs"


def predict(results: Path, file: Path) -> None:
    """Write the pairs that SmolVLM-256M is predicted to prove on the reader's pages: those that the reader proves."""
    predictions = {
        "model": NEXT_MODEL,
        "rows": "make first-real asks them; python scripts/instrument.py score FILE STORE counts what is proven",
        "rule": "a pair that the reader's rows prove is predicted to be proven the same way",
        "pairs": {
            f"{dataset} at {budget}": [
                f"{better} > {one if better == other else other}"
                for (one, other), better in sorted(proven(table, budget).items())
                if better is not None
            ]
            for dataset, table in readers(results).items()
            for budget in table.budgets
            if dataset in ASKED
        },
    }
    file.write_text(json.dumps(predictions, indent=1) + "\n")


def score(file: Path, store: Path) -> Iterator[str]:
    """Yield, per dataset and budget, how many predicted pairs the rows of a store prove."""
    asked = json.loads(file.read_text())
    decided = {table.dataset: table for table in paper_tables(store) if table.context["model"] == asked["model"]}
    for column, pairs in asked["pairs"].items():
        dataset, _, budget = column.partition(" at ")
        table = decided.get(dataset)
        better = proven(table, budget) if table and budget in table.budgets else {}
        words: Counter[str] = Counter()
        for pair in pairs:
            first, _, second = pair.partition(" > ")
            key = (min(first, second), max(first, second))
            words[agreement(first, better[key]) if key in better else "no rows"] += 1
        yield (
            f"{column}: of {len(pairs)} predicted pairs {words['same']} proven so, {words['opposite']} the other way, "
            f"{words['one']} not proven, {words['no rows']} without rows"
        )


PARTS = {"power": power, "tasks": tasks, "models": models, "papers": papers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "part", nargs="?", choices=[*PARTS, "predict", "score"], help="what is printed; all unless given"
    )
    parser.add_argument("file", nargs="?", type=Path, help="the predictions")
    parser.add_argument("store", nargs="?", type=Path, help="rows that the predictions are compared with")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the stores")
    asked = parser.parse_args()
    if asked.part == "predict":
        predict(asked.results, asked.file)
        return
    if asked.part == "score":
        lines = score(asked.file, asked.store)
    else:
        lines = (line for name in ([asked.part] if asked.part else PARTS) for line in PARTS[name](asked.results))
    for line in lines:
        print(line)


if __name__ == "__main__":
    main()

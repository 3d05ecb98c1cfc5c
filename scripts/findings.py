"""Recompute numbers that docs/findings.md quotes, from the committed rows.

    python scripts/findings.py            # all of them
    python scripts/findings.py pairs      # one part: sinks, stability, agreement, pairs, host, expansion, leads, free

Each line ends with the heading of the finding that quotes the number. Run this script after rows changed, and correct the text.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "tiny"


def tables(store: str, results: Path) -> list[Any]:
    """Return the tables of exact match of a store below a folder."""
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.stored_rows import load

    return build(load(results / store), metrics=["exact_match"])


def pairs(results: Path) -> Iterator[str]:
    """Yield how many pairs of methods are separated on the large pages."""
    for table in tables("large", results):
        for budget, column in table.columns.items():
            yield (
                f"{table.dataset} at {budget}: {int(column.separated.sum())} of {len(column.p)} pairs of methods "
                "separated | Seven methods on large pages"
            )


def host(results: Path) -> Iterator[str]:
    """Yield HybridKV's bytes on the host over full's bytes, mean over answers, per variant and kind of budget."""
    from mmkv_bench.store.store import Store

    for store in ("ablations", "methods"):
        rows = Store(results / store)
        cells = rows.cells().to_pandas()
        cells = cells[(cells["base"] == "hybridkv") & (cells["protocol"] == "paper")]
        columns = ("cell", "status", "bytes_host", "bytes_full")
        answers = rows.responses(cells["cell"], columns).to_pandas().merge(cells, on="cell")
        answers = answers[answers["status"] == "ok"]
        share = answers["bytes_host"] / answers["bytes_full"]
        means = share.groupby([answers["method"], answers["budget_kind"], answers["dataset"], answers["cell"]]).mean()
        for (method, kind), group in means.groupby(level=[0, 1]):
            told = f"{store}: {method}, budgets in {kind}: {group.min():.1%} to {group.max():.1%} of full's bytes on the host"
            yield f"{told} | All methods on six small tasks"


def expansion(results: Path) -> Iterator[str]:
    """Yield scores of MM-ShiftKV without votes, with and without expansion, minus the whole method's.

    Differences are paired by sample; seeds are averaged.
    """
    from mmkv_bench.tables.compare import every_pair, samples_of

    for table in tables("mmshift_ablations", results):
        tested = {(pair.budget, pair.a, pair.b): pair for pair in every_pair(table)}
        for budget in table.budgets:
            for other in ("t5_samp", "t5_var_exp"):
                both = [table.entry(label, budget).scores for label in (other, "mmshift")]
                scores = samples_of(both, table.metric).scores
                low, high = _bootstrap(scores[0] - scores[1])
                pair = tested[budget, "mmshift", other]
                low_a, high_a = (math.nan if end is None else -end for end in (pair.high, pair.low))
                yield (
                    f"{table.dataset} at {budget}: {other} minus mmshift {-pair.difference:+.3f}, bootstrap [{low:+.3f}, "
                    f"{high:+.3f}], tables' test [{low_a:+.3f}, {high_a:+.3f}] (n = {pair.n}) | MM-ShiftKV's ablations"
                )


def _bootstrap(differences) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of the differences."""
    import numpy as np

    drawn = np.random.default_rng(0).integers(len(differences), size=(10_000, len(differences)))
    return tuple(np.quantile(differences[drawn].mean(axis=1), (0.025, 0.975)))


def leads(results: Path) -> Iterator[str]:
    """Yield in how many columns methods with SparseMM's calibrated budgets have the highest score."""
    alone = shared = whole = 0
    for table in tables("methods", results):
        for budget in table.budgets:
            lines = [method for method in table.methods if method.budgeted and not method.cheats]
            scored = {m: e.value for m in lines if (e := table.entries.get((m.label, budget))) and e.value is not None}
            best = [method for method, value in scored.items() if value == max(scored.values())]
            ours = [method.base in ("sparsemm", "mmshift_sparsemm") for method in best]
            alone += all(ours)
            shared += any(ours) and not all(ours)
            whole += 1
    yield (
        f"methods with SparseMM's budgets lead {alone} of {whole} columns and share the lead in {shared} more | All "
        "methods on six small tasks"
    )


def free(results: Path) -> Iterator[str]:
    """Yield the share of the answers' tokens that comes from the full prefill under `paper`."""
    seen = {}
    for table in tables("methods", results):
        if table.free is not None:
            seen[table.dataset] = table.free
    for dataset, share in sorted(seen.items()):
        yield f"{dataset}: {share:.0%} of the tokens come from the full prefill | All methods on six small tasks"


READER = "smollm2_135m_q4_1_english"
COMPARED = {"english_records": ("0.1", "0.4"), "english_needles": ("0.4",), "english_passages": ("0.4",)}
"""Task of results/real -> budgets at which at least one method scores above the floor."""


def agreement(results: Path) -> Iterator[str]:
    """Yield Kendall's tau-b between twelve methods' scores on pretrained weights and on the embedded model's large pages."""
    import numpy as np
    from scipy.stats import kendalltau

    real = {
        table.dataset: table
        for table in tables("../real", results)
        if table.axis == "fraction" and (table.context["protocol"], table.context["model"]) == ("paper", READER)
    }
    embedded = [t for t in tables("methods", results) if t.context["protocol"] == "paper" and t.axis == "entries"]
    pages = {table.dataset: table for table in embedded if table.dataset.endswith("large")}
    rng = np.random.default_rng(0)
    for task, budgets in COMPARED.items():
        for budget in budgets:
            for name, table in pages.items():
                places = [(real[task], budget), (table, "64" if budget == "0.1" else "128")]
                labels = [m.label for m in real[task].methods if m.budgeted and table.entries.get((m.label, "64"))]
                labels = [label for label in labels if label not in ("random", "oracle (ceiling)", "oracle")]
                scores = [np.array([t.entry(label, at).scores.values for label in labels]) for t, at in places]
                tau = kendalltau(*(values.mean(1) for values in scores)).statistic
                drawn = []
                for _ in range(1000):
                    picked = [rng.integers(values.shape[1], size=values.shape[1]) for values in scores]
                    means = [values[:, place].mean(1) for values, place in zip(scores, picked, strict=True)]
                    drawn.append(kendalltau(*means).statistic)
                low, high = np.nanquantile(drawn, (0.025, 0.975))
                yield (
                    f"{task} at {budget} and {name} at {places[1][1]}: tau-b {tau:+.2f}, bootstrap [{low:+.2f}, {high:+.2f}], "
                    f"{len(labels)} methods | Pretrained weights"
                )


def stability(results: Path) -> Iterator[str]:
    """Yield how many of the pairs proven in results/real under `paper` are also proven under other settings, per budget."""
    from mmkv_bench.tables.compare import every_pair

    real = [table for table in tables("../real", results) if table.axis == "fraction"]
    settings = {(t.dataset, *(str(t.context[key]) for key in ("protocol", "model", "dtype"))): t for t in real}
    decided = {
        key: {(one.budget, frozenset((one.a, one.b))): one for one in every_pair(table) if one.level is not None}
        for key, table in settings.items()
    }
    for (dataset, *setting), pairs in decided.items():
        base = decided.get((dataset, "paper", READER, "float32"), {})
        for budget in dict.fromkeys(budget for budget, _ in pairs):
            both = [(base[key], one) for key, one in pairs.items() if key[0] == budget and key in base]
            proven = [(first, one) for first, one in both if first.better]
            if pairs is base or not both:
                continue
            same = sum(first.better == one.better for first, one in proven)
            turned = sum(one.better not in (None, first.better) for first, one in proven)
            signs = sum(
                one.difference * first.difference * (1 if one.a == first.a else -1) > 0 for first, one in proven
            )
            yield (
                f"{dataset} at {budget}, {', '.join(setting)} (n = {both[0][1].n}) beside paper (n = {both[0][0].n}): of "
                f"{len(both)} pairs {len(proven)} are proven under paper, {same} of these the same way here, {turned} the "
                f"other way; {signs} differences have the same sign | Pretrained weights"
            )


def sinks(results: Path) -> Iterator[str]:
    """Yield the effect of sinks at equal entries: a setting of a method minus its default, paired by sample."""
    from mmkv_bench.tables.compare import every_pair

    for table in tables("../real_sinks", results):
        for pair in every_pair(table):
            first, second = sorted((pair.a, pair.b), key=len)
            if (
                pair.low is None
                or pair.high is None
                or (second.partition("_sinks")[0] != first and pair.budget != "0.99")
            ):
                continue
            sign = 1 if second == pair.a else -1
            ends = sorted((sign * pair.low, sign * pair.high))
            yield (
                f"{table.context['model']}, {table.dataset} at {pair.budget}: {second} minus {first} "
                f"{sign * pair.difference + 0.0:+.2f} [{ends[0]:+.2f}, {ends[1]:+.2f}] (n = {pair.n}) | First entries"
            )


PARTS = {
    "sinks": sinks,
    "stability": stability,
    "agreement": agreement,
    "pairs": pairs,
    "host": host,
    "expansion": expansion,
    "leads": leads,
    "free": free,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="which numbers; all unless given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the stores")
    asked = parser.parse_args()
    for name in asked.part or PARTS:
        for line in PARTS[name](asked.results):
            print(line)


if __name__ == "__main__":
    main()

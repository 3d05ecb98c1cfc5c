"""Renderings of small, hand-checked tables. Made-up rows: nothing here is a result."""

from __future__ import annotations

import csv
import io

import pytest

from mmkv_bench.tables.build import build
from mmkv_bench.tables.latex import escape
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.text import score, signed_score
from tests.each import each
from tests.tables.examples import HEADS, PROMPT, Example, csv_cells, csv_pairs, latex, markdown, zeros_and_ones


def small() -> list[ScoreTable]:
    """full 19/20, random 2/20 and 4/20, a tuned snapkv 15/20 and 18/20 that reports a fallback at budget 128."""
    example = Example()
    tuned = {"parameters": {"window": 8}, "tuned": True}
    example.add("full", None, zeros_and_ones(19, 20))
    example.add("random", 64, zeros_and_ones(2, 20))
    example.add("snapkv", 64, zeros_and_ones(15, 20), **tuned)
    example.add("random", 128, zeros_and_ones(4, 20))
    example.add("snapkv", 128, zeros_and_ones(18, 20), **tuned, answer={"fallback": ["window_reduced"]})
    return build(example.rows())


def marked() -> list[ScoreTable]:
    """Released reading: mmshift over its budget (576 of 512 entries) with a failed sample; one-token answers."""
    example = Example()
    example.add("full", None, [1.0, 1, 1, 1])
    example.add("mmshift", 64, [1.0, None, 1, 0], reading="released", answer={"entries_resident": 576})
    one_token = {"n_tokens": 2, "tokens_from_compressed": 1, "token_ids": [9, 1]}
    example.add("streamingllm", 64, [0.0, 0, 1, 0], reading="released", answer=one_token)
    return build(example.rows())


NOTES = """\
- Bold: not significantly worse than any other method (alpha 0.05, corrected for m = 2). The best method is among \
them with 95% confidence.
- Marks: a = fallback window_reduced.
- Smallest difference that could be detected: 0.45 at 64, 0.5 at 128.
- Under protocol=paper the first token comes from the full cache: 8% of the answer tokens cannot be affected by any \
method.
- Ranks run from 1 + the number of methods proven better to m - the number proven worse, with m methods compared. A \
method is proven worse by a paired test at p <= 0.05 / (m - 1), or in a pair separated by Holm. Not bold is no proof\
 of being worse.
- a fallback window_reduced: snapkv at 128 (20 of 20).
- snapkv (tuned): window=8.
"""

# Wilson's 95% intervals of 19, 2, 15, 4 and 18 out of 20 are in many a textbook. Discordant: 17, 4, 13, 15, 1, 14 of 20.
MARKDOWN = (
    """\
**walk3, exact_match**: budget: entries kept per KV head; model=tiny; protocol=paper; reading=paper; n=20; 95% \
intervals (wilson)

| method         | 64                    | 128                     |
|----------------|-----------------------|-------------------------|
| full           | 0.95 [0.76, 0.99]     | 0.95 [0.76, 0.99]       |
| random         | 0.10 [0.03, 0.30]     | 0.20 [0.08, 0.42]       |
| snapkv (tuned) | **0.75** [0.53, 0.89] | **0.90** [0.70, 0.97] a |

*Ranks among the compared methods (95%)*

| method         | 64  | 128 |
|----------------|-----|-----|
| random         | 2   | 2   |
| snapkv (tuned) | 1   | 1   |

"""
    + NOTES
)

# Worked by hand: low ends by .025^(1/13) and .025^(1/14), high ends by t of 19 degrees and two unseen clusters.
MARKDOWN_PAIRS = (
    """\
**walk3, exact_match**: budget: entries kept per KV head; model=tiny; protocol=paper; reading=paper; n=20

| method         | 64       | 128        |
|----------------|----------|------------|
| full           | 0.95     | 0.95       |
| random         | 0.10     | 0.20       |
| snapkv (tuned) | **0.75** | **0.90** a |

*Paired differences whose interval, Holm-corrected within the budget, excludes 0*

| budget | better | worse  | difference | Holm interval | Holm p | n   |
|--------|--------|--------|------------|---------------|--------|-----|
| 64     | snapkv | random | +0.65      | [0.33, 0.92]  | <0.001 | 20  |
| 128    | snapkv | random | +0.70      | [0.38, 0.97]  | <0.001 | 20  |

- Separated pairs of the compared methods: 1 of 1 at 64, 1 of 1 at 128.
"""
    + NOTES
)

LATEX = r"""% needs booktabs
\begin{table}
\centering
\caption{walk3, exact\_match. budget: entries kept per KV head; model=tiny; protocol=paper; reading=paper; n=20; 95\% intervals (wilson)}
\label{tab:walk3-exact-match-paper-paper-entries}
\begin{tabular}{lcc}
\toprule
method & 64 & 128 \\
\midrule
full & \multicolumn{2}{c}{0.95 {\scriptsize [0.76, 0.99]}} \\
random & 0.10 {\scriptsize [0.03, 0.30]} & 0.20 {\scriptsize [0.08, 0.42]} \\
snapkv (tuned) & \textbf{0.75} {\scriptsize [0.53, 0.89]} & \textbf{0.90} {\scriptsize [0.70, 0.97]}\textsuperscript{a} \\
\midrule
\multicolumn{3}{l}{Ranks among the compared methods (95\%)} \\
random & 2 & 2 \\
snapkv (tuned) & 1 & 1 \\
\bottomrule
\end{tabular}
\par\smallskip\footnotesize\raggedright Bold: not significantly worse than any other method (alpha 0.05, corrected for m = 2). The best method is among them with 95\% confidence. \\ Marks: a = fallback window\_reduced. \\ Smallest difference that could be detected: 0.45 at 64, 0.5 at 128. \\ Under protocol=paper the first token comes from the full cache: 8\% of the answer tokens cannot be affected by any method. \\ Ranks run from 1 + the number of methods proven better to m - the number proven worse, with m methods compared. A method is proven worse by a paired test at p \textless{}= 0.05 / (m - 1), or in a pair separated by Holm. Not bold is no proof of being worse. \\ a fallback window\_reduced: snapkv at 128 (20 of 20). \\ snapkv (tuned): window=8.
\end{table}
"""  # noqa: E501

MARKED = """\
**walk3, exact_match**: budget: entries kept per KV head; model=tiny; protocol=paper; reading=released; n=4; 95% \
intervals (wilson)

| method       | 64                    |
|--------------|-----------------------|
| full         | 1.00 [0.51, 1.00]     |
| mmshift      | 3/4 ok: 0.50 / 0.67 † |
| streamingllm | 0.25 [0.05, 0.70] §   |

*The same over the 3 samples ok in every cell*

| method       | 64   |
|--------------|------|
| full         | 1.00 |
| mmshift      | 0.67 |
| streamingllm | 0.33 |

- Cells with failures show samples ok / samples, the score with failures as 0 / the score over the 3 samples ok in \
every cell.
- Marks: † = more entries than the budget; § = most answers have no token from the compressed cache (protocol=paper).
- Under protocol=paper the first token comes from the full cache: 8% of the answer tokens cannot be affected by any \
method.
- † mmshift at 64 by 12.5%, at most 12.5% (3 of 3).
- § streamingllm at 64 (4 of 4).
"""


def test_markdown_of_a_small_table() -> None:
    assert markdown(small()) == MARKDOWN


def test_markdown_without_intervals_and_with_pairs() -> None:
    assert markdown(small(), intervals=False, pairs=True) == MARKDOWN_PAIRS


def test_markdown_of_failures_excess_and_untested_answers() -> None:
    assert markdown(marked()) == MARKED


def test_latex_of_a_small_table() -> None:
    assert latex(small()) == LATEX


def test_latex_of_marks_failures_and_pairs() -> None:
    text = latex(marked(), intervals=False, pairs=True)
    assert r"mmshift & 3/4 ok: 0.50 / 0.67\textsuperscript{\dag{}} \\" in text
    assert r"streamingllm & 0.25\textsuperscript{\S{}} \\" in text
    assert "mmshift & 0.67 \\\\\nstreamingllm & 0.33 \\\\\n\\bottomrule" in text
    assert text.isascii()
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 1
    pairs = latex(small(), pairs=True)
    assert r"64 & snapkv & random & +0.65 & [0.33, 0.92] & \textless{}0.001 & 20 \\" in pairs


def test_latex_special_characters_are_escaped_once() -> None:
    assert escape(r"a_b 5% {x} \y ^~ < †") == (
        r"a\_b 5\% \{x\} \textbackslash{}y \textasciicircum{}\textasciitilde{} \textless{} \dag{}"
    )


def test_csv_holds_raw_numbers_and_leaves_nulls_empty() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_cells(small()))))
    assert [(r["method"], r["budget_kind"], r["budget"], r["n"], r["n_ok"], r["best"]) for r in rows] == [
        ("full", "none", "", "20", "20", "False"),
        ("random", "entries", "64", "20", "20", "False"),
        ("random", "entries", "128", "20", "20", "False"),
        ("snapkv", "entries", "64", "20", "20", "True"),
        ("snapkv", "entries", "128", "20", "20", "True"),
    ]
    numbers = [[float(r[name]) for name in ("value", "low", "high")] for r in rows]
    # (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with z = 1.959964, worked by hand
    assert numbers[0] == pytest.approx([0.95, 0.763869, 0.991119], abs=1e-6)
    assert numbers[3] == pytest.approx([0.75, 0.531299, 0.888138], abs=1e-6)
    last = rows[-1]
    assert (last["tuned"], last["parameters"], last["fallbacks"]) == ("True", '{"window": 8}', "window_reduced=20")
    assert (last["competes"], last["rank_low"], last["rank_high"], rows[0]["rank_low"]) == ("True", "1", "1", "")
    assert (last["dataset"], last["protocol"], last["reading"], last["lmms_eval"]) == ("walk3", "paper", "paper", "")
    broken = list(csv.DictReader(io.StringIO(csv_cells(marked()))))[1]
    assert (broken["method"], broken["value"], broken["low"], broken["n_ok"]) == ("mmshift", "", "", "3")
    assert (broken["value_failures_zero"], float(broken["value_common"])) == ("0.5", pytest.approx(2 / 3))
    assert (broken["over_budget"], broken["excess_mean"], broken["best"]) == ("3", "0.125", "False")


def test_csv_of_pairs_has_all_of_them_with_their_tests() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_pairs(small()))))
    told = [(r["budget"], r["a"], r["b"], r["compete"], r["separated"], r["better"]) for r in rows]
    assert told == [
        ("64", "full", "random", "False", "", ""),
        ("64", "full", "snapkv", "False", "", ""),
        ("64", "random", "snapkv", "True", "True", "snapkv"),
        ("128", "full", "random", "False", "", ""),
        ("128", "full", "snapkv", "False", "", ""),
        ("128", "random", "snapkv", "True", "True", "snapkv"),
    ]
    # 13 of 20 discordant, all for snapkv.
    inner = rows[2]
    assert float(inner["p"]) == float(inner["p_holm"]) == pytest.approx(2 / 2**13)
    assert (float(inner["holm_level"]), float(inner["difference"])) == (0.05, -0.65)
    # 4 of 20 discordant.
    assert (float(rows[1]["p"]), rows[1]["p_holm"], rows[1]["holm_level"]) == (0.125, "", "")
    assert float(rows[1]["low"]) < 0 < float(rows[1]["high"])
    assert csv_pairs([]) == csv_cells([]) == ""


def test_more_entries_than_asked_by_a_papers_own_formula_are_marked_and_no_defect() -> None:
    example = Example()
    example.add("look_m", 64, [1.0, 0], answer={"entries_resident": 520}, parameters={"over_budget": True})
    text = markdown(build(example.rows()))
    assert (
        "Marks: † = more entries than the budget." in text and "† look_m at 64 by 1.6%" in text and "Defect" not in text
    )


def test_pictures_that_cannot_be_small_enough_have_a_legend_of_their_own_and_are_no_defect() -> None:
    example = Example()
    example.add("pixels", 64, [1.0, 0], answer={"entries_resident": 520})
    text = markdown(build(example.rows()))
    assert (
        "† = more entries than the budget, even with the smallest pictures" in text and "† pixels at 64 by 1.6%" in text
    )
    assert "pixels: a control that evicts nothing" in text and "Defect" not in text


def test_more_entries_than_asked_under_reading_paper_are_called_a_defect() -> None:
    example = Example()
    example.add("snapkv", 64, [1.0, 0], answer={"entries_resident": 520})
    assert "- Defect: snapkv at 64 over the budget, which reading=released" in markdown(build(example.rows()))


def test_question_text_in_the_compressed_context_is_marked() -> None:
    example = Example()
    example.add("snapkv", 64, [1.0, 0], protocol="query_agnostic", answer={"question_text_before_cut": 4})
    text = markdown(build(example.rows()))
    assert "0.50 [0.09, 0.91] ¶ |" in text
    assert "Marks: ¶ = the compressed context held question text." in text and "- ¶ snapkv at 64 (2 of 2)." in text


@each(
    ("protocol", "tokens", "compressed", "flagged"),
    [("paper", 2, 1, True), ("paper", 3, 2, False), ("strict", 2, 2, False), ("strict", 1, 1, False)],
)
def test_one_token_answers_are_marked_only_where_their_token_comes_from_the_full_prefill(
    protocol: str, tokens: int, compressed: int, flagged: bool
) -> None:
    example = Example()
    answer = {"n_tokens": tokens, "tokens_from_compressed": compressed, "token_ids": [9] * tokens}
    example.add("full", None, [1.0, 1], protocol=protocol, answer=answer)
    example.add("snapkv", 64, [1.0, 1], protocol=protocol, answer=answer)
    text = markdown(build(example.rows()))
    assert ("§" in text) == flagged
    assert "full at" not in text  # the full cache has nothing to test


def test_captions_name_what_tells_two_tables_apart() -> None:
    example = Example()
    example.add("full", None, [1.0, 1], dtype="bfloat16")
    example.add("full", None, [1.0, 1])
    example.add("full", None, [1.0, 1], dataset="lookup", dataset_fingerprint="e" * 16)
    text = markdown(build(example.rows()))
    assert text.count("dtype=float32") == 2 and text.count("dtype=bfloat16") == 1
    assert "fingerprint" not in text  # another dataset has another fingerprint anyway
    example.add("full", None, [1.0, 1], dataset_fingerprint="e" * 16)
    assert "dataset_fingerprint=eeeeeeeeeeee" in markdown(build(example.rows()))
    assert latex(build(example.rows())).count(r"\label{tab:walk3-exact-match-paper-none-2}") == 1


def test_lmms_evals_own_aggregate_is_held_against_ours() -> None:
    example = Example()
    cells = [example.add("snapkv", 64, [1.0, 0]), example.add("keydiff", 64, [1.0, 1])]
    example.metrics = [
        {"cell": c, "metric": "exact_match", "lmms_eval": v} for c, v in zip(cells, (0.5, 1.0), strict=True)
    ]
    assert "lmms-eval's own aggregate is the same in all 2 cells that have one." in markdown(build(example.rows()))
    example.metrics[0]["lmms_eval"] = 0.75
    text = markdown(build(example.rows()))
    assert "lmms-eval's own aggregate differs, most for snapkv at 64: 0.7500 against 0.5000 here." in text


def test_a_note_over_many_cells_gives_their_range() -> None:
    example = Example()
    for i, budget in enumerate((8, 16, 32, 64, 128, 256, 512)):
        example.add("snapkv", budget, [1.0, 0], answer={"fallback": ["window_reduced"]} if i else {"fallback": ["x"]})
    text = markdown(build(example.rows()))
    assert "- a fallback window_reduced: snapkv at 16 (2 of 2); snapkv at 32 (2 of 2)" in text
    example.responses[0]["fallback"] = ["window_reduced"]
    text = markdown(build(example.rows()))
    assert "- a fallback window_reduced: 7 cells, 1 to 2 answers each of 2." in text


def test_numbers_have_two_decimals_and_no_minus_zero() -> None:
    assert [score(x) for x in (None, -0.001, 0.005, 1612.345)] == ["-", "0.00", "0.01", "1612.35"]
    assert [signed_score(x) for x in (-0.001, 0.004, 0.1, -0.1)] == ["0.00", "0.00", "+0.10", "-0.10"]


def stored(entries: int, share: float = 1.0, *, host: float = 0.0, reachable: int | None = None) -> dict:
    """Counted storage of a prompt of 300 tokens in 8 heads, 100 bytes an entry."""
    full = PROMPT * HEADS * 100
    return {
        "entries_resident": entries * HEADS,
        "entries_reachable": (entries if reachable is None else reachable) * HEADS,
        "bytes_device": int(full * entries / PROMPT * share),
        "bytes_host": int(full * host),
        "bytes_metadata": entries * HEADS * 4,
        "bytes_full": full,
    }


def test_quantised_and_retrieval_methods_are_marked_in_a_column_of_entries_and_win_nothing() -> None:
    example = Example()
    example.add("full", None, zeros_and_ones(100, 100), answer=stored(PROMPT))
    example.add("kivi", None, zeros_and_ones(100, 100), answer=stored(PROMPT, 0.2))
    example.add("kivi_snapkv", 64, zeros_and_ones(95, 100), answer=stored(64, 0.25))
    example.add("hybridkv", 64, zeros_and_ones(99, 100), answer=stored(64, host=0.4, reachable=192))
    example.add("ragged", 64, zeros_and_ones(80, 100), answer=stored(64, 1.3))
    example.add("snapkv", 64, zeros_and_ones(20, 100), answer=stored(64))
    (table,) = build(example.rows())
    assert table.best("64") == ("ragged",)
    text = markdown([table])
    line = {row.split("|")[1].strip(): row for row in text.splitlines() if row.startswith("| ")}
    assert all(("‡" in line[name]) == (name in ("kivi", "kivi_snapkv")) for name in line)
    assert all(("◊" in line[name]) == (name == "hybridkv") for name in line)
    assert "kivi (24% of full's bytes on the device)" in text  # 20% and 4 of 100 bytes per entry of metadata
    assert "hybridkv at 64 (reaches 3.0 times as many; 22% of full's bytes on the device and 40% on the host)" in text


def test_bytes_are_those_that_are_held_where_the_rows_tell_them() -> None:
    whole = PROMPT * HEADS * 100
    example = Example()
    example.add("full", None, zeros_and_ones(100, 100), answer=stored(PROMPT) | {"bytes_held": int(1.1 * whole)})
    example.add("kivi", None, zeros_and_ones(100, 100), answer=stored(PROMPT, 0.2) | {"bytes_held": int(0.31 * whole)})
    hybrid = stored(64, host=0.4, reachable=192) | {"bytes_held": int(0.75 * whole)}
    example.add("hybridkv", 64, zeros_and_ones(99, 100), answer=hybrid)
    text = markdown(build(example.rows()))
    assert "kivi (holds 31% of full's bytes)" in text
    assert "hybridkv at 64 (reaches 3.0 times as many; holds 75% of full's bytes, 40% on the host)" in text
    assert "Rows without" not in text

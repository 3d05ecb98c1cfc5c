"""Caption metrics of single samples, which lmms-eval scores only over a corpus.

All scorers are from pycocoevalcap, over its tokeniser (METEOR and the tokeniser are Java programs).

- CIDEr (Vedantam et al. 2015) uses inverse document frequencies over the references of all documents of the dataset,
  answered or not. The corpus values of CIDEr and ROUGE-L are means over samples.
- BLEU and METEOR (1.5) of a corpus are not means. Each sample has a score, and `parts` from which
  statistics/metric_kinds.py computes corpus scores. BLEU: words, words of the closest reference, matched n-grams,
  n-grams. METEOR: its 23 counts.
"""

from __future__ import annotations

import atexit
import re
import shutil
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from mmkv_bench.errors import ScoringError

_TOKENISED: dict[str, str] = {}  # shared, because all cells of a process have the same references
NAMES = re.compile(r"(?:[a-z]+_)?(Bleu_[1-4]|METEOR|ROUGE_L|CIDEr)")  # textcaps_CIDEr, vatex_Bleu_4, coco_METEOR, ...
EMPTY = ""


class Captioned(NamedTuple):
    """A document's caption (None if it has no answer) and its references."""

    caption: str | None
    references: tuple[str, ...]


class CaptionScore(NamedTuple):
    """A document's score, and the numbers (`parts`) from which the corpus score is computed.

    A document without an answer has the value None and the parts of an empty caption.
    """

    value: float | None
    parts: tuple[float, ...] | None


def kind_of(metric: str) -> str | None:
    """Return the kind of a caption metric (`Bleu_4` of `vatex_Bleu_4`); None for other metrics."""
    name_match = NAMES.fullmatch(metric)
    return name_match[1] if name_match else None


def holds_caption(value: Any) -> bool:
    """Return True if a scorer's value for a sample is a caption with references."""
    return isinstance(value, Mapping) and {"answer", "pred"} <= value.keys() and isinstance(value["answer"], list)


def caption_scores(
    kinds: Iterable[str], captions: Mapping[int, Captioned], others: Mapping[int, Captioned] | None = None
) -> dict[str, dict[int, CaptionScore]]:
    """Return kind of metric -> doc_id -> score, for all documents in `captions`.

    kinds: kinds to compute, such as `CIDEr`.
    others: captioned documents of the rest of the dataset, which count in CIDEr's document frequencies but get no
        scores.

    Raises:
        ScoringError: there is no Java, or METEOR's program ends.
    """
    if shutil.which("java") is None:
        raise ScoringError(
            "caption metrics need Java, because pycocoevalcap's tokeniser and METEOR are Java programs, but PATH "
            "has none; install a Java runtime and score the stored answers with stage=score"
        )
    kinds = set(kinds)
    references = _tokens({doc: captioned.references for doc, captioned in captions.items()})
    candidates = _tokens({doc: (captioned.caption or EMPTY,) for doc, captioned in captions.items()})
    scored: dict[str, dict[int, CaptionScore]] = {}
    if orders := sorted(int(kind[-1]) for kind in kinds if kind.startswith("Bleu")):
        scored |= _bleu(orders, references, candidates)
    if "METEOR" in kinds:
        scored["METEOR"] = _meteor(references, candidates)
    if "ROUGE_L" in kinds:
        from pycocoevalcap.rouge.rouge import Rouge

        scored["ROUGE_L"] = _means(Rouge(), references, candidates)
    if "CIDEr" in kinds:
        from pycocoevalcap.cider.cider import Cider

        other_captions = others or {}
        all_references = references | _tokens({doc: captioned.references for doc, captioned in other_captions.items()})
        cider_scores = _means(Cider(), all_references, _tokens(dict.fromkeys(other_captions, (EMPTY,))) | candidates)
        scored["CIDEr"] = {doc: cider_scores[doc] for doc in references}
    docs_without_caption = [doc for doc, captioned in captions.items() if captioned.caption is None]
    for of_kind in scored.values():
        for doc in docs_without_caption:
            of_kind[doc] = CaptionScore(None, of_kind[doc].parts)
    return scored


def _tokens(texts: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
    # One line each: the tokeniser takes \r, \f, U+2028 and others for line ends, and would return the wrong captions.
    lines = {doc: [" ".join(text.split()) for text in of_doc] for doc, of_doc in texts.items()}
    new_lines = list(dict.fromkeys(line for of_doc in lines.values() for line in of_doc if line not in _TOKENISED))
    if new_lines:
        from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

        tokenised = PTBTokenizer().tokenize({number: [{"caption": line}] for number, line in enumerate(new_lines)})
        _TOKENISED.update((line, tokenised[number][0]) for number, line in enumerate(new_lines))
    return {doc: [_TOKENISED[line] for line in of_doc] for doc, of_doc in lines.items()}


def _means(scorer: Any, references: dict[int, list[str]], candidates: dict[int, list[str]]) -> dict[int, CaptionScore]:
    _, values = scorer.compute_score(references, candidates)
    return {doc: CaptionScore(float(value), None) for doc, value in zip(references, values, strict=True)}


def _bleu(
    orders: list[int], references: dict[int, list[str]], candidates: dict[int, list[str]]
) -> dict[str, dict[int, CaptionScore]]:
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.bleu.bleu_scorer import cook_refs, cook_test

    _, values = Bleu(4).compute_score(references, candidates, verbose=0)
    ngram_counts = {doc: cook_test(candidates[doc][0], cook_refs(references[doc])) for doc in references}
    scores: dict[str, dict[int, CaptionScore]] = {}
    for order in orders:
        scores[f"Bleu_{order}"] = of_order = {}
        for (doc, counts), value in zip(ngram_counts.items(), values[order - 1], strict=True):
            caption_words = counts["testlen"]
            closest_length = min((abs(length - caption_words), length) for length in counts["reflen"])[1]
            bleu_counts = (caption_words, closest_length, *counts["correct"][:order], *counts["guess"][:order])
            of_order[doc] = CaptionScore(float(value), tuple(map(float, bleu_counts)))
    return scores


def _meteor(references: dict[int, list[str]], candidates: dict[int, list[str]]) -> dict[int, CaptionScore]:
    try:
        meteor = _meteor_program()
        _, values = meteor.compute_score(references, candidates)
        counts = [
            _corpus_counts(map(float, meteor._stat(candidates[doc][0], references[doc]).split())) for doc in references
        ]
    except (OSError, ValueError) as error:
        release()
        raise ScoringError(
            f"METEOR's Java program ended ({error!r}); it needs up to 2 GB of memory; free memory and score the "
            "stored answers with stage=score"
        ) from error
    return {doc: CaptionScore(value, parts) for doc, value, parts in zip(references, values, counts, strict=True)}


@cache
def _meteor_program() -> Any:
    """Start METEOR's Java program once for all cells: loading its paraphrases takes 10 s and 1 GB of memory."""
    from pycocoevalcap.meteor.meteor import Meteor

    atexit.register(release)
    return Meteor()


def release() -> None:
    """End METEOR's Java program, which otherwise runs until the process ends."""
    _meteor_program.cache_clear()


def _corpus_counts(counts: Iterable[float]) -> tuple[float, ...]:
    """Return METEOR's counts of a sample as METEOR adds them up over a corpus: 0 chunks if the whole caption matches
    its whole reference in one chunk."""
    caption_words, reference_words, *statistics = counts
    *statistics, chunks, matched, reference_matched = statistics
    is_unbroken = chunks == 1 and (matched, reference_matched) == (caption_words, reference_words)
    return (caption_words, reference_words, *statistics, 0.0 if is_unbroken else chunks, matched, reference_matched)

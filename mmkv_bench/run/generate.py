"""The generate stage: lmms-eval's loop makes requests, `Answering` answers them with every cell, the store writes the
rows.

A cell is one method at one budget, with a protocol, a reading and a seed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mmkv_bench.datasets.messages import with_question
from mmkv_bench.devices.requirements import COMPILED
from mmkv_bench.errors import DataError, UnsupportedError
from mmkv_bench.generation.decode import CompiledStep, config_of
from mmkv_bench.generation.encode import (
    DocumentPrompts,
    EncodedPrompt,
    encode,
    reference_tokens,
    same_context,
    turn_tokens,
)
from mmkv_bench.generation.engine import Engine, as_row
from mmkv_bench.generation.fidelity import ExtraMeasures
from mmkv_bench.generation.processed_media import SharedMedia
from mmkv_bench.generation.result import CellSpec, ForkResult, describe, status_of
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.generation.smaller_prompts import SmallerPrompts, answered, fitted, middle, prompt_limit, resampled
from mmkv_bench.plan.planner import select_samples
from mmkv_bench.plan.validate import bytes_of
from mmkv_bench.protocols import protocol
from mmkv_bench.secrecy import without_secrets
from mmkv_bench.signals import time_limit
from mmkv_bench.store.response import COUNTED

if TYPE_CHECKING:
    from mmkv_bench.config.schema import AnswerConfig
    from mmkv_bench.evaluation.samples import Request, SampleRef
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.folder import Writer

CONTEXT_END, CONTROLS = "context_end", "control_token_in_text"
"""Fallbacks that this file reports. All others come from methods."""
LEAST_TEXT = 8  # tokens of a prompt's text that `cut_prompt` keeps at any budget

log = logging.getLogger(__name__)


def decode_rules(loaded: LoadedModel, settings: Mapping[str, Any]) -> DecodeRules:
    """Return the decode rules (such as the number of new tokens and stop texts) for a dataset's generation settings.

    Raises UnsupportedError: sampling, beam search, or a setting that is not supported.
    """
    return DecodeRules.read(loaded.model.generation_config, dict(settings), loaded.tokenizer)


def encode_request(
    loaded: LoadedModel,
    config: AnswerConfig,
    request: Request,
    identity: str,
    device: Any,
    share: float = 1.0,
    tokens: int | None = None,
    shared: SharedMedia | None = None,
    replays: bool = False,
) -> EncodedPrompt:
    """Encode a request (a sample's question with its media) as prompt tokens, within `timeout_s`.

    A prompt that is too long for the model is cut if its dataset allows a cut.

    Args:
        identity: name of the sample, which seeds random streams.
        tokens: cut the middle of the text to this number of tokens, but to no fewer than `LEAST_TEXT`.
        share, shared, replays: see `encode`.

    Raises:
        GenerationTimeout: the chat template or processor takes longer. Also raises the errors of `encode`.
    """
    model = config.model
    with time_limit(config.timeout_s, "making the prompt"):
        length = int(request.generation.get("max_new_tokens") or 0)
        limit = prompt_limit(model.max_prompt_tokens, loaded.family.max_context, length)
        prompt_parts = request.messages, request.images, request.generation
        messages, images = fitted(loaded.processor, *prompt_parts, limit, request.instruction)
        if tokens is not None:
            messages = middle(loaded.processor, messages, tokens, LEAST_TEXT)
        return encode(
            loaded.processor,
            loaded.family,
            identity,
            messages,
            images,
            request.videos,
            device,
            model.max_prompt_tokens,
            frames=model.frames,
            video_max_pixels=model.video_max_pixels,
            share=share,
            context=request.context,
            shared=shared,
            replays=replays,
        )


def compiled_step(loaded: LoadedModel, config: AnswerConfig) -> CompiledStep | None:
    """Return the compiled decode step if `decode=compiled`, else None. It compiles slowly, so a run calls this once."""
    return CompiledStep(loaded.model) if config.decode == COMPILED else None


@dataclass(eq=False)
class Answering:
    """Answers the requests of one dataset. Each request (a sample's question) is answered by all cells without its row.

    The rows of a sample are committed together, or one by one if cells do not share a prefill.

    Args:
        loaded: the model.
        cells: the dataset's cells.
        done: cell to ids of samples with stored rows.
        writer: writer of rows; None stores nothing.
        after: called with all new rows of a sample, once they are committed.
        measures: further measures of the dataset (`specs.MEASURES`). Like fidelity, these are null under `sharing=off`.
        step: the result of `compiled_step`.
        watch: called with a request, its prompt and the results, before rows are stored.
        committed: called with the number of rows of each commit.
    """

    loaded: LoadedModel
    config: AnswerConfig
    cells: Sequence[Cell]
    done: Mapping[str, set[str]]
    writer: Writer | None
    after: Callable[[list[dict[str, Any]]], None]
    measures: Sequence[str] = ()
    step: CompiledStep | None = None
    watch: Callable[[Request, EncodedPrompt, Sequence[ForkResult]], None] | None = None
    committed: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.measures and not self.config.shares_prefill:
            log.warning("sharing=off measures no %s; run these with sharing=on", " and no ".join(self.measures))
        keeps_indices = self.config.keeps_indices
        self.specs = {
            one.cell: CellSpec(
                one.cell, one.compressor, one.budget, one.protocol, one.seed or 0, keeps_indices, one.stream
            )
            for one in self.cells
        }
        needs_replay = any(cell.compressor.needs.replay for cell in self.cells)
        self._encoded = partial(encode_request, self.loaded, self.config, replays=needs_replay)
        self._engine: Engine | None = None
        self._rules: tuple[str, DecodeRules] | None = None
        self._visual: list[float] | None = None  # of the current sample
        self._rendered: str | None = None
        self._document: DocumentPrompts | None = None  # of the last sample, if its dataset has several questions

    def pending(self, sample_id: str) -> int:
        """Return the number of cells that lack a row of this sample."""
        return sum(sample_id not in self.done[cell.cell] for cell in self.cells)

    def wants(self, sample: SampleRef) -> bool:
        """Tell whether a sample is in this run's selection (ids and shard) and lacks a row in some cell."""
        is_selected = bool(select_samples([sample], self.config.selection))
        return is_selected and self.pending(sample.sample_id) > 0

    @property
    def asks_groups(self) -> bool:
        """Tell whether all questions about a document are asked together, as protocols that cut the prompt require."""
        return any(cell.rule.cuts for cell in self.cells)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.__exit__(None, None, None)
            self._engine = None

    def __call__(self, request: Request) -> str:
        """Answer a request with every cell that lacks its row, and commit the rows. Return one of the answers.

        The returned text is what lmms-eval's loop expects. The score stage reads the stored rows instead.
        """
        pending_cells = [cell for cell in self.cells if request.sample_id not in self.done[cell.cell]]
        specs = [self.specs[cell.cell] for cell in pending_cells]
        identity = f"{request.dataset}/{request.sample_id}"
        rows, self._visual, self._rendered = list[dict[str, Any]](), None, None
        for results in self._results(request, identity, specs):
            ready_rows = [self._row(request, pending_cells[0].dataset, result) for result in results]
            row_of_prompt = prompt_row(
                request, pending_cells[0].dataset, pending_cells[0].model_fingerprint, self._visual, self._rendered
            )
            if self.writer is not None:
                self.writer.commit(ready_rows, None if rows or request.error is not None else row_of_prompt)
            if self.committed is not None:
                self.committed(len(ready_rows))
            rows += ready_rows
        self.after(rows)
        return rows[0]["answer"] or ""

    def _results(self, request: Request, identity: str, specs: Sequence[CellSpec]) -> Iterator[list[ForkResult]]:
        """Yield lists of results to commit together, one result per cell of `specs`.

        Cells that share a prefill are in one list; other cells have a list each. An exception becomes the status of all
        cells without a result.
        """
        unfinished_specs = list(specs)
        try:
            for results in self._answer(request, identity, specs):
                finished_cells = {result.cell for result in results}
                unfinished_specs = [spec for spec in unfinished_specs if spec.cell not in finished_cells]
                yield results
        except Exception as error:  # noqa: BLE001 - a sample's failure becomes its rows' status; the run goes on
            log.warning("%s: %s", identity, without_secrets(describe(error)))
            measured_scope = "group" if self.config.shares_prefill else "own"
            yield [
                ForkResult(spec.cell, status_of(error), describe(error), measured=measured_scope)
                for spec in unfinished_specs
            ]

    def _answer(self, request: Request, identity: str, specs: Sequence[CellSpec]) -> Iterator[list[ForkResult]]:
        if request.error is not None:
            raise DataError(request.error)
        self._rules_for(request)  # report unsupported settings before pictures are read
        prompt = self._prompt(request, identity, specs)
        self._rendered = prompt.rendered
        extras = self._extras(request)
        if self.config.keeps_indices:
            self._visual = visual_places(self.loaded, prompt, request)
        resampled_specs = resampled(specs, prompt, self.loaded.family)
        shared_specs = [spec for spec in specs if spec not in resampled_specs]
        if shared_specs:
            yield from self._answer_prompt(request, prompt, shared_specs, extras)
        encode_again = partial(self._encoded, request, identity, self.loaded.device)
        cut_text = [spec for spec in resampled_specs if not spec.compressor.needs_visual]
        smaller_pictures = [spec for spec in resampled_specs if spec not in cut_text]
        specs_with_encoders = (
            (cut_text, lambda share: encode_again(tokens=int(share * prompt.length))),
            (smaller_pictures, lambda share: encode_again(share=share)),
        )
        for group, encode_share in specs_with_encoders:
            yield from answered(
                SmallerPrompts(encode_share, prompt, self.loaded.family),
                group,
                # The smaller prompt has other distributions: no noise floor, no sampled reference.
                lambda small, own: self._answer_prompt(request, small, own, ExtraMeasures(reference=extras.reference)),
            )

    def _prompt(self, request: Request, identity: str, specs: Sequence[CellSpec]) -> EncodedPrompt:
        """Encode a request's prompt. If a cell compresses a document once for several questions, all of them are
        encoded too."""
        asked_document, device = request.document, self.loaded.device
        if asked_document is None or not any(protocol(spec.protocol).knows != "own" for spec in specs):
            return self._encoded(request, identity, device)
        document_name = f"{request.dataset}/{asked_document.name}"
        if self._document is None or self._document.identity != document_name:
            shared_media = SharedMedia(self.loaded.processor)

            def encode_question(text: str, name: str) -> EncodedPrompt:
                messages = with_question(request.messages, request.context, text)
                question = replace(request, messages=messages)
                return self._encoded(question, name, device, shared=shared_media)

            sample_names = [f"{request.dataset}/{name}" for name in asked_document.sample_ids]
            known_questions = {protocol(cell.protocol).knows for cell in self.cells}
            paraphrases = asked_document.paraphrases if "paraphrase" in known_questions else ()
            document_prompts = DocumentPrompts(
                document_name,
                asked_document.number,
                tuple(
                    encode_question(text, name) for text, name in zip(asked_document.texts, sample_names, strict=True)
                ),
                asked_document.first,
                encode_question(asked_document.generic, f"{document_name}/generic")
                if asked_document.generic and "generic" in known_questions
                else None,
                tuple(
                    encode_question(text, f"{name}/paraphrase")
                    for text, name in zip(paraphrases, sample_names, strict=False)
                ),
            )
            if "turns" in known_questions:
                first_messages = with_question(
                    request.messages, request.context, asked_document.texts[asked_document.first]
                )
                later_texts = [asked_document.texts[number].strip() for number in document_prompts.order[1:]]
                turn_token_ids = tuple(turn_tokens(self.loaded.processor, first_messages, text) for text in later_texts)
                document_prompts = replace(document_prompts, turns=turn_token_ids)
            other_prompts = (
                *document_prompts.paraphrases,
                *([document_prompts.generic] if document_prompts.generic else []),
            )
            same_context((*document_prompts.questions, *other_prompts), self.loaded.family)
            self._document = document_prompts  # set after the check, so the document's next question needs none
        waiting_questions = self._waiting(request, self._document)
        own_prompt = self._document.questions[asked_document.number]
        return replace(
            own_prompt, document=replace(self._document, number=asked_document.number, waiting=waiting_questions)
        )

    def _waiting(self, request: Request, document: DocumentPrompts) -> tuple[int, ...]:
        """Return the numbers of the document's questions that come later with the same cells and decode rules."""
        if request.document is None:
            return ()
        rules, own_number, sample_ids = self._rules_for(request), request.document.number, request.document.sample_ids
        done_by_question = [[name in self.done[cell.cell] for cell in self.cells] for name in sample_ids]
        fits_context = [self._limit_to_context(rules, prompt) is rules for prompt in document.questions]
        return tuple(
            other
            for other in request.waiting
            if done_by_question[other] == done_by_question[own_number]
            and fits_context[other]
            and fits_context[own_number]
        )

    def _answer_prompt(
        self, request: Request, prompt: EncodedPrompt, specs: Sequence[CellSpec], extras: ExtraMeasures
    ) -> Iterator[list[ForkResult]]:
        """Answer an encoded prompt with the cells `specs`. Yield lists of results to commit together."""
        rules = self._limit_to_context(self._rules_for(request), prompt)
        for results in self._generate(prompt, specs, rules, extras):
            if rules is not self._rules_for(request):
                for result in results:
                    result.fallback += [CONTEXT_END] * (result.finish_reason == "length")
            for result in results:
                result.fallback += [CONTROLS] * bool(prompt.controls)
            if self.watch is not None:
                self.watch(request, prompt, results)
            yield results

    def _limit_to_context(self, rules: DecodeRules, prompt: EncodedPrompt) -> DecodeRules:
        """Limit the number of new tokens to the model's free positions. The last token needs none."""
        max_context = self.loaded.family.max_context
        free_positions = rules.max_new_tokens if max_context is None else max_context - prompt.length + 1
        return rules if free_positions >= rules.max_new_tokens else rules.shortened(free_positions)

    def _generate(
        self, prompt: EncodedPrompt, specs: Sequence[CellSpec], rules: DecodeRules, extras: ExtraMeasures
    ) -> Iterator[list[ForkResult]]:
        if not self.config.shares_prefill:
            yield from ([self._generate_alone(prompt, spec, rules)] for spec in specs)
            return
        if self._engine is None or self._engine.rules is not rules:
            self.close()
            self._engine = Engine(
                self.loaded.model,
                self.loaded.family,
                rules,
                self.loaded.tokenizer,
                fork_batch=self.config.fork_batch,
                fork_memory=bytes_of(self.config.fork_memory),
                timeout_s=self.config.timeout_s,
                attention=self.config.model.attention,
                step=self.step,
            ).__enter__()
        yield self._engine.answer(prompt, specs, extras)

    def _extras(self, request: Request) -> ExtraMeasures:
        """Return what to measure for a request besides its answer, such as the likelihood of the reference answer.

        If the reference answer cannot be tokenized, a warning is logged, and measures that need this answer are left
        out.
        """
        reference_ids: tuple[int, ...] = ()
        continuation = "continuation" in self.measures
        if "ppl" in self.measures or continuation:
            try:
                with time_limit(self.config.timeout_s, "making the reference answer's prompt"):
                    reference_ids = reference_tokens(
                        self.loaded.processor, request.messages, request.reference or "", continuation
                    )
            except Exception as error:  # noqa: BLE001 - templates are foreign programs; the answers are not affected
                error_text = without_secrets(describe(error))
                log.warning("%s/%s: no ppl: %s", request.dataset, request.sample_id, error_text)
        measures_fidelity = self.config.fidelity and (bool(reference_ids) or not continuation)
        return ExtraMeasures(measures_fidelity, reference_ids, "self_rouge" in self.measures, continuation)

    def _generate_alone(self, prompt: EncodedPrompt, spec: CellSpec, rules: DecodeRules) -> ForkResult:
        from mmkv_bench.generation.unshared_generation import run_alone

        loaded, config = self.loaded, self.config
        return run_alone(
            loaded.model,
            loaded.family,
            rules,
            loaded.tokenizer,
            prompt,
            spec,
            timeout_s=config.timeout_s,
            attention=config.model.attention,
            compile_config=config_of(next(loaded.model.parameters()).device) if config.decode == COMPILED else None,
        )

    def _rules_for(self, request: Request) -> DecodeRules:
        """Return the decode rules of a request, cached because all samples of a task share them."""
        key = repr(sorted(request.generation.items(), key=lambda item: item[0]))
        if self._rules is None or self._rules[0] != key:
            self._rules = (key, decode_rules(self.loaded, request.generation))
        return self._rules[1]

    def _row(self, request: Request, dataset: str, result: ForkResult) -> dict[str, Any]:
        row = as_row(result) | {
            "dataset": dataset,
            "sample_id": request.sample_id,
            "doc_id": request.doc_id,
            "cluster": request.cluster,
            "prompt_hash": request.prompt_hash,
            "question_number": None if request.document is None else request.document.number,
            "shard": self.config.selection.shard,
            "chosen": True if self.config.selection.samples is not None else None,
        }
        return row if row["status"] == "ok" else failure_row(row, row["status"], row["error"])


def failure_row(row: Mapping[str, Any], status: str, error: str | None) -> dict[str, Any]:
    """Return a response row changed to a failure with `status` and `error`, without answer and measures."""
    failure_values: dict[str, Any] = {
        "status": status,
        "error": error,
        "answer": None,
        "token_ids": [],
        "n_tokens": 0,
        "finish_reason": None,
    }
    unset_measures = dict.fromkeys(("forced_kl", "forced_agree", "reference_nll", "reference_samples"))
    known_counts = {name: row[name] or None for name in COUNTED}  # 0 means that it was never counted
    return {**row, **failure_values, **unset_measures, **known_counts}


# ---------------------------------------------------------------------- rows of the table prompts
def prompt_row(
    request: Request, dataset: str, fingerprint: str, visual: Sequence[float] | None, rendered: str | None
) -> dict[str, Any]:
    """Return a sample's row of the table `prompts`.

    dataset: name of the dataset in rows.
    fingerprint: checksum of the model.
    visual: the result of `visual_places`.
    rendered: text of the whole prompt.
    """
    return {
        "prompt_hash": request.prompt_hash,
        "model_fingerprint": fingerprint,
        "dataset": dataset,
        "sample_id": request.sample_id,
        "doc_id": request.doc_id,
        "question": question_text(request.messages),
        "rendered": rendered,
        "reference": request.target,
        "media": len(request.images) + len(request.videos),
        "images": request.files or None,
        "visual": None if visual is None else list(visual),
    }


def question_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of chat messages, with `<image>` and `<video>` for media. Several turns begin with their role."""
    turn_texts = []
    for turn in messages:
        part_texts = [part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in turn["content"]]
        turn_texts.append((turn["role"], "\n".join(part_texts)))
    return "\n\n".join(text if len(turn_texts) == 1 else f"{role}: {text}" for role, text in turn_texts)


def visual_places(loaded: LoadedModel, prompt: EncodedPrompt, request: Request) -> list[float] | None:
    """Return where each visual token is in the prompt and in its image: a flat list with six numbers per token.

    The numbers are: index in the prompt, number of the image, and the box's top, bottom, left and right. The last five
    are -1 for a token that shows no part of an image. Return None for prompts with videos or without images, and for
    families whose rule is unknown.
    """
    from mmkv_bench.families.registry import token_boxes

    if request.videos or not request.images:
        return None
    visual_positions = prompt.types[0].nonzero().flatten().tolist()
    image_sizes = [image.size for image in request.images]
    try:
        box_of_token = token_boxes(
            loaded.model.config, loaded.processor, prompt.inputs, image_sizes, len(visual_positions)
        )
    except UnsupportedError:
        return None
    flat_numbers: list[float] = []
    for place, box in zip(visual_positions, box_of_token, strict=True):
        flat_numbers += [float(place), *((-1.0,) * 5 if box is None else (float(part) for part in box))]
    return flat_numbers

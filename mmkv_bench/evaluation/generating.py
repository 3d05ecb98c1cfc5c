"""Generation: lmms-eval's loop asks about a task's samples, and a function of this package answers."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from mmkv_bench.datasets.messages import (
    Conversation,
    prompt_hash,
    stated,
    to_prompt,
    with_placeholders,
)
from mmkv_bench.datasets.specs import TaskSpec
from mmkv_bench.errors import DataError, MMKVError
from mmkv_bench.evaluation.documents import Documents, documents, generation_settings, task_config
from mmkv_bench.evaluation.environment import lmms_eval, task_environment, task_errors
from mmkv_bench.evaluation.fingerprints import Memory, memory_of
from mmkv_bench.evaluation.question_groups import QuestionGroups, lists_texts
from mmkv_bench.evaluation.samples import DocumentQuestions, Request, SampleRef
from mmkv_bench.evaluation.task_code import of_one_sample, opened

if TYPE_CHECKING:
    from lmms_eval.api.instance import Instance


PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


def generate(
    spec: TaskSpec,
    answer: Callable[[Request], str],
    limit: int | None = None,
    wanted: Callable[[SampleRef], bool] | None = None,
    groups: bool = False,
) -> int:
    """Call `answer` once for each of the first `limit` samples, and return the number of calls.

    A sample whose images, videos or fields cannot be read is asked with `Request.error` set, so that it gets a row. An
    exception of `answer` ends the loop and is raised unchanged, including KeyboardInterrupt and SystemExit.

    wanted: function that returns whether to ask a sample (shards, resuming). The images of other samples are not decoded.
    groups: attach to each request all questions about its document, if `spec.questions_key` groups them, and ask these one
        after another. Otherwise samples are asked in their order. Questions listed in the row are always attached.

    Raises:
        ConfigError, UnsupportedError, DataError: the task cannot run at all.
    """
    if wanted is not None:  # a question is asked for twice, but a dispatcher gives a sample out once
        wanted = functools.cache(wanted)
    docs = documents(spec, limit)
    memory = None if spec.is_pages else memory_of(spec)
    module = lmms_eval(spec.offline)
    settings = generation_settings(spec)
    config = task_config(spec)
    calls = 0
    is_grouped = spec.questions_key and (groups or lists_texts(spec, docs.full[docs.split]))
    questions = QuestionGroups(spec, docs.full[docs.split], docs.bare[docs.split]) if is_grouped else None

    refs_left = {ref.sample_id: ref for ref in docs.refs} if questions is not None else {}
    with module.quiet() as loud:

        def respond(instance: Instance) -> str:
            nonlocal calls
            ref = docs.refs[instance.doc_id]
            if wanted is not None and not wanted(ref):
                return ""
            with task_errors(spec.name, folder=spec.dataset_path):
                request = _request(spec, docs, ref, instance, settings, memory, questions)
                if request.error is None:
                    request.target = _target(spec, task, docs.bare[docs.split][ref.doc_id])
                if spec.needs_reference:
                    request.reference = request.target
            refs_left.pop(ref.sample_id, None)
            if request.document is not None:
                others = [refs_left.get(name) for name in request.document.sample_ids]
                request.waiting = tuple(
                    number for number, one in enumerate(others) if one is not None and (wanted is None or wanted(one))
                )
            calls += 1
            with loud():
                return answer(request)

        order = None if questions is None else lambda instance: questions.order(instance.doc_id)
        respondent = module.Respondent(respond, order)
        error_context = task_errors(spec.name, ours=respondent.raised, folder=spec.dataset_path)
        with error_context, task_environment(spec.media_root):
            task = module.AskingTask(config, docs.full, docs.bare)
            try:
                module.run_loop(task, respondent, limit=len(docs.refs))
            finally:
                if memory is not None:
                    memory.save()
    return calls


def prompt_hashes(spec: TaskSpec, doc_ids: Collection[int], limit: int | None, anew: bool = False) -> dict[int, str]:
    """Return document -> hash of its prompt for the present data, "" if media or fields cannot be read.

    Prompts are made again, without asking a model, unless they provably have not changed (see fingerprints.py).

    limit: the documents are among the first `limit`.
    anew: check files again that this process has checked already.
    """
    if spec.is_pages:
        hashes = documents(spec, limit).prompt_hashes
        return {doc_id: hashes[doc_id] for doc_id in doc_ids}
    memory = memory_of(spec)
    docs_without_hash = memory.look(doc_ids if anew else set(doc_ids) - memory.looked.keys())
    if docs_without_hash:
        generate(spec, lambda request: "", limit, wanted=lambda ref: ref.doc_id in docs_without_hash)
    return {doc_id: memory.looked[doc_id] for doc_id in doc_ids}


def _target(spec: TaskSpec, task: Any, doc: Any) -> str | None:
    """Return the reference answer: the task's target, the first of several targets, or the choice with the target's
    index.

    If the target cannot be read, return None, or raise if the dataset needs a reference.
    """
    try:
        target = task.doc_to_target(doc)
        if isinstance(target, int) and task.config.doc_to_choice is not None:
            target = task.doc_to_choice(doc)[target]
        if isinstance(target, (list, tuple)):
            target = target[0] if target else None
        return None if target is None else str(target).strip() or None
    except (Exception, SystemExit):
        if spec.needs_reference:
            raise
        return None


def _request(
    spec: TaskSpec,
    docs: Documents,
    ref: SampleRef,
    instance: Instance,
    settings: dict[str, Any],
    memory: Memory | None,
    questions: QuestionGroups | None = None,
) -> Request:
    _, doc_to_messages, _, doc_id, _, split = instance.args
    prompt, error = Conversation([], [], []), None
    context = str(docs.bare[split][doc_id][spec.context_key] or "") if spec.context_key else ""
    document_questions: DocumentQuestions | None = None

    def made(number: int) -> Conversation:
        message = to_prompt(doc_to_messages(docs.full[split][number]), spec.name)
        return with_placeholders(message, spec.placeholders, spec.dataset)

    def fault(broken: BaseException) -> str:
        if not of_one_sample(broken):
            raise broken
        return (
            str(broken) if isinstance(broken, MMKVError) else f"sample {ref.sample_id} cannot be read: {stated(broken)}"
        )

    with opened() as heard:
        try:
            prompt = made(doc_id)
        except (Exception, SystemExit) as broken:  # noqa: BLE001 - raised again unless it concerns only this sample
            error = fault(broken)
        hash_of_prompt = "" if error else prompt_hash(prompt)
    if questions is not None and not error:  # this may read other samples of the document
        try:
            document_questions = questions.of(ref, prompt.messages, context, lambda number: made(number).messages)
        except (Exception, SystemExit) as broken:  # noqa: BLE001 - as above
            error, hash_of_prompt = fault(broken), ""
    if (
        questions is not None and questions.listed and document_questions is not None
    ):  # protocols score entries by all questions
        texts = json.dumps([document_questions.texts, document_questions.paraphrases, document_questions.generic])
        hash_of_prompt = hashlib.sha256(f"{hash_of_prompt}/{texts}".encode()).hexdigest()
    if memory is not None:
        memory.note(doc_id, hash_of_prompt, prompt, heard)
    elif hash_of_prompt != docs.prompt_hashes[doc_id] and not error:
        raise DataError(
            f"the prompt of sample {ref.sample_id} differs from the prompt for which its data were made: task and "
            "data have different versions; install mmkv_bench again"
        )
    images = [path for path in heard.files if path.lower().endswith(PICTURES)]
    videos = [video["video"] if isinstance(video, dict) else video for video in prompt.videos]
    files = [*images, *(str(video) for video in videos if isinstance(video, str | os.PathLike))]
    has_all_files = len(images) == len(prompt.images) and len(files) == len(images) + len(videos)
    text, instruction_starts = "", tuple[str, ...]()
    if settings.get("cut_prompt") == "left":
        text = next(
            (part["text"] for turn in prompt.messages[:1] for part in turn["content"][:1] if "text" in part), ""
        )
        instruction = str(docs.bare[split][doc_id].get("instruction") or "")
        instruction_starts = (f"{instruction}\n", instruction) if instruction else ()
    return Request(
        dataset=spec.dataset,
        sample_id=ref.sample_id,
        doc_id=doc_id,
        cluster=ref.cluster,
        kind=ref.kind,
        messages=prompt.messages,
        images=prompt.images,
        videos=prompt.videos,
        generation=copy.deepcopy(settings),
        prompt_hash=hash_of_prompt,
        error=error,
        instruction=next((start for start in instruction_starts if start and text.startswith(start)), ""),
        context=context,
        document=document_questions,
        files=files if has_all_files else [],
    )

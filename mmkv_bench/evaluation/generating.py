"""Generation: lmms-eval's own loop goes through a task's samples and asks; a function of ours answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import DataError, MMKVError
from mmkv_bench.evaluation.contract import Request, SampleRef, TaskSpec
from mmkv_bench.evaluation.documents import Documents, documents, generation_settings, task_config
from mmkv_bench.evaluation.environment import harness, task_environment
from mmkv_bench.evaluation.messages import Prompt, prompt_hash, stated, to_prompt, with_placeholders
from mmkv_bench.evaluation.task_errors import of_one_sample, task_errors

if TYPE_CHECKING:
    from lmms_eval.api.instance import Instance


def generate(
    spec: TaskSpec,
    answer: Callable[[Request], str],
    limit: int | None = None,
    wanted: Callable[[SampleRef], bool] | None = None,
) -> int:
    """Call `answer` once for each of the first `limit` samples, in order, and return the number of calls.

    wanted: tells which samples to ask (shards, resuming); the others' images are not even decoded.

    A sample whose images, videos or fields cannot be read is asked with `Request.error` set, so that it can have a row of
    its own. What `answer` raises ends the loop and arrives unchanged, KeyboardInterrupt and SystemExit included.
    Raises ConfigError, UnsupportedError or DataError when the task cannot be run at all.
    """
    docs = documents(spec, limit)
    module = harness(spec.offline)
    settings = generation_settings(spec)
    config = task_config(spec)
    calls = 0

    with module.quiet() as loud:

        def respond(instance: Instance) -> str:
            nonlocal calls
            ref = docs.refs[instance.doc_id]
            if wanted is not None and not wanted(ref):
                return ""
            with task_errors(spec.name, folder=spec.dataset_path):
                request = _request(spec, docs, ref, instance, settings)
                if "ppl" in spec.measures and request.error is None:
                    request.reference = _reference(task, docs.bare[docs.split][ref.doc_id])
            calls += 1
            with loud():
                return answer(request)

        respondent = module.Respondent(respond)
        failures = task_errors(spec.name, ours=respondent.raised, folder=spec.dataset_path)
        with failures, task_environment(spec.media_root):
            task = module.AskingTask(config, docs.full, docs.bare)
            module.run_loop(task, respondent, limit=len(docs.refs))
    return calls


def expected_prompts(spec: TaskSpec, docs: Documents, doc_ids: set[int]) -> dict[int, str]:
    """Prompt hashes of documents: pages carry theirs, and prompts made in this process are known.

    For the others the prompts are made again, with no one to answer; that decodes each image once in a process.
    """
    missing = doc_ids - docs.prompt_hashes.keys()
    if missing:
        generate(spec, lambda request: "", len(docs.refs), wanted=lambda ref: ref.doc_id in missing)
    return {doc_id: docs.prompt_hashes[doc_id] for doc_id in doc_ids}


def _reference(task: Any, doc: Any) -> str | None:
    """The document's reference answer: the task's target, the first of several, the choice that an index names."""
    target = task.doc_to_target(doc)
    if isinstance(target, int) and task.config.doc_to_choice is not None:
        target = task.doc_to_choice(doc)[target]
    if isinstance(target, (list, tuple)):
        target = target[0] if target else None
    return None if target is None or not str(target).strip() else str(target).strip()


def _request(spec: TaskSpec, docs: Documents, ref: SampleRef, instance: Instance, settings: dict[str, Any]) -> Request:
    _, doc_to_messages, _, doc_id, _, split = instance.args
    prompt, error = Prompt([], [], []), None
    try:
        prompt = to_prompt(doc_to_messages(docs.full[split][doc_id]), spec.name)
        prompt = with_placeholders(prompt, spec.placeholders, spec.dataset)
    except (Exception, SystemExit) as broken:
        if not of_one_sample(broken):
            raise
        ours = isinstance(broken, MMKVError)
        error = str(broken) if ours else f"sample {ref.sample_id} cannot be read: {stated(broken)}"
    found = "" if error else prompt_hash(prompt)
    if found != docs.prompt_hashes.setdefault(doc_id, found) and not error:
        raise DataError(
            f"the prompt of sample {ref.sample_id} is not the one its data were made for; the task's prompt and its "
            "data are of different versions: install mmkv_bench again"
        )
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
        prompt_hash=found,
        error=error,
    )

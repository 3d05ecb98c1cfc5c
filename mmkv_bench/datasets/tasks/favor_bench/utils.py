"""What the YAML file of this folder calls."""

from __future__ import annotations

from mmkv_bench.datasets.tasks.favor_bench.choice import chosen, released
from mmkv_bench.datasets.tasks.favor_bench.reading import read_questions
from mmkv_bench.datasets.tasks.files import media_file, video_then


def read(folder, config):
    """One document a question; see `reading`."""
    return read_questions(folder)


def doc_to_messages(doc, lmms_eval_specific_kwargs=None):
    """The video, then the question with its options."""
    return video_then(doc, doc_to_text(doc, lmms_eval_specific_kwargs))


def doc_to_visual(doc):
    """The video's file."""
    return [media_file(doc["video"])]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    """The question between the texts of the YAML, in which {options} stands for the list of options."""
    around = lmms_eval_specific_kwargs or {}
    options = ", ".join(f'"{option}"' for option in doc["options"])
    before, after = around.get("pre_prompt", ""), around.get("post_prompt", "{options}")
    return f"{before}{doc['question']}{after.replace('{options}', options)}"


def process_results(doc, results):
    """Accuracy of the sample, over all and under its sub-task; whether an option could be read; the released rule's verdict."""
    option = chosen(results[0], doc["options"])
    right = float(option == doc["answer"])
    return {
        "favor_acc": right,
        f"favor_acc_{doc['task_type']}": right,
        "parse_failed": float(option is None),
        "favor_acc_released": float(released(results[0], doc["options"], doc["answer"])),
    }

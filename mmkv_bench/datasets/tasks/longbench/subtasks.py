"""The 16 tasks of LongBench v1 in English (Bai et al. 2023, arXiv 2308.14508), code included.

Names, metrics and answer lengths are those of the benchmark's own code (config/dataset2maxlen.json, eval.py of
github.com/THUDM/LongBench). The prompts have its formats in our words: what stands before and after the context, what is
repeated after it, and how the answer is asked for. A folder with the benchmark's config/dataset2prompt.json has its words:
see `reading`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.errors import ConfigError, nearest

SHORT = "Give the shortest answer that is right, a single phrase where one will do, and no explanation."
ONLY = "Give the answer alone, without any other words."
QASPER = (
    "Answer as briefly as you can, with one phrase or sentence. Where the article does not tell, answer "
    '"unanswerable"; answer a question for yes or no with "yes", "no" or "unanswerable". Do not explain.'
)


@dataclass(frozen=True)
class Subtask:
    """One task.

    scorer          name of a function in `metrics`
    max_new_tokens  longest answer
    prompt          with {context} and {input}
    first_line      only the answer's first line is scored
    """

    scorer: str
    max_new_tokens: int
    prompt: str
    first_line: bool = False


def _passages(length: int = 32) -> Subtask:
    ask = f"Answer the question from the passages. {ONLY}"
    return Subtask("qa_f1", length, f"{ask}\n\nThe passages:\n{{context}}\n\n{ask}\n\nQuestion: {{input}}\nAnswer:")


SUBTASKS = {
    "narrativeqa": Subtask(
        "qa_f1",
        128,
        f"Below are a story, from a novel or a film script, and a question about it. {SHORT}\n\nStory: {{context}}\n\n"
        f"Answer the question about the story. {SHORT}\n\nQuestion: {{input}}\n\nAnswer:",
    ),
    "qasper": Subtask(
        "qa_f1",
        128,
        f"Below are a scientific article and a question about it. {QASPER}\n\nArticle: {{context}}\n\n"
        f"Answer the question about the article. {QASPER}\n\nQuestion: {{input}}\n\nAnswer:",
    ),
    "multifieldqa_en": Subtask(
        "qa_f1",
        64,
        f"Read this text and answer a question about it in a few words.\n\n{{context}}\n\nAnswer from the text. {ONLY}\n\n"
        "Question: {input}\nAnswer:",
    ),
    "hotpotqa": _passages(),
    "2wikimqa": _passages(),
    "musique": _passages(),
    "gov_report": Subtask(
        "rouge",
        512,
        "Below is a report of a government agency. Summarise it on one page.\n\nReport:\n{context}\n\nWrite the summary of "
        "the report, one page long.\n\nSummary:",
    ),
    "qmsum": Subtask(
        "rouge",
        512,
        "Below are the transcript of a meeting and a query, which is a question or an instruction. Answer it in one or more "
        "sentences.\n\nTranscript:\n{context}\n\nAnswer the query from the transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
    ),
    "multi_news": Subtask(
        "rouge",
        512,
        "Below are several news articles. Summarise all of them on one page.\n\nNews:\n{context}\n\nWrite the summary of all "
        "articles, one page long.\n\nSummary:",
    ),
    "trec": Subtask(
        "classification",
        64,
        "Name the type of the last question. The questions before it show how.\n\n{context}\n{input}",
        first_line=True,
    ),
    "triviaqa": Subtask(
        "qa_f1",
        32,
        f"Answer the last question from its passage. {ONLY} The examples show how.\n\n{{context}}\n\n{{input}}",
        first_line=True,
    ),
    "samsum": Subtask(
        "rouge",
        128,
        "Summarise the last dialogue in a few short sentences. The examples show how.\n\n{context}\n\n{input}",
        first_line=True,
    ),
    "passage_count": Subtask(
        "count",
        32,
        "Below are paragraphs of Wikipedia; some of them appear more than once. How many different paragraphs are there, "
        "each counted once?\n\n{context}\n\nGive the number of different paragraphs, and nothing but the number, for example "
        "1, 2 or 3.\n\nThe final answer is: ",
    ),
    "passage_retrieval_en": Subtask(
        "retrieval",
        32,
        "Below are 30 paragraphs of Wikipedia and an abstract of one of them. Which one is it?\n\n{context}\n\nThe "
        'abstract:\n\n{input}\n\nGive the number of its paragraph in the form "Paragraph 1", "Paragraph 2" and so on.\n\n'
        "The answer is: ",
    ),
    "lcc": Subtask("code_sim", 64, "Write the line that comes next in this code.\n{context}Next line of code:\n"),
    "repobench-p": Subtask(
        "code_sim", 64, "Write the line that comes next in this code.\n{context}{input}Next line of code:\n"
    ),
}


def subtask(task: str) -> Subtask:
    """The sub-task of an lmms-eval name (`longbench_repobench_p`) or of the benchmark's own (`repobench-p`)."""
    name = own_name(task)
    if name not in SUBTASKS:
        raise ConfigError(f"LongBench has no English task {task!r}; {nearest(name, SUBTASKS)}")
    return SUBTASKS[name]


def own_name(task: str) -> str:
    """`longbench_repobench_p` -> `repobench-p`: what its file is called."""
    return task.removeprefix("longbench_").replace("repobench_p", "repobench-p")

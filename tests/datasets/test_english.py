"""Documents of the English tasks: the same everywhere, one right answer each, no word of training in what is asked."""

from __future__ import annotations

import hashlib
import re
from itertools import product

from mmkv_bench.datasets.tasks.english import utils
from mmkv_bench.datasets.tasks.english.documents import SIZES, TASKS, document, prompt
from mmkv_bench.datasets.tasks.english.vocabulary import SPLITS, words

LISTS = ("first_names", "last_names", "places", "things", "people", "actions", "circumstances")


def test_documents_are_the_same_on_every_machine():
    texts = "".join(
        prompt(page.context, f"{page.questions}")
        for page in (document(task, split, 7, size) for task, split, size in product(TASKS, SPLITS, SIZES))
    )
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "1d330b5caacd460a"


def test_train_shares_no_word_with_the_others_and_they_no_document():
    for name, split in product(LISTS, ("dev", "test")):
        assert words(name, split) and not set(words(name, "train")) & set(words(name, split)), name
    pages = [{document(task, split, number).context for number in range(50)} for task in TASKS for split in SPLITS]
    assert sum(map(len, pages)) == len(set().union(*pages)) == 50 * len(pages)


def test_the_text_holds_each_answer_and_for_its_question_alone():
    for split, number in product(("test", "dev"), range(20)):
        for task in TASKS:
            page = document(task, split, number)
            asked = [question for question, _ in page.questions]
            assert len(set(asked)) == len(asked)
            assert all(answer in page.context for _, answer in page.questions)
        needles = dict(document("needles", split, number).questions)
        assert len(needles) == len(set(needles.values())) == 4
        parts = [re.fullmatch(r"What is the code for the (.+) of (.+)\?", question).groups() for question in needles]
        for place in (0, 1):  # every person and every thing has a twin
            assert {[part[place] for part in parts].count(part[place]) for part in parts} == {2}


def test_an_answer_is_right_word_for_word_and_a_full_stop_is_nothing():
    score = lambda answer, gold: utils.process_results({"answer": gold}, [answer])["exact_match"]  # noqa: E731
    assert [score("712.72", "712.72"), score(" The cook sang.", "The cook sang."), score("Kiel.", "Kiel")] == [1, 1, 1]
    assert [score("712.7", "712.72"), score("Kiel and Bonn", "Kiel"), score("", "Kiel")] == [0, 0, 0]


def test_a_task_reads_its_own_documents():
    splits = utils.read(None, {"task": "english_passages_4k"})
    assert {name: len(rows) for name, rows in splits.items()} == {"test": 500, "dev": 200}
    page = document("passages", "dev", 3, "4k")
    row = splits["dev"][3]
    assert (row["context"], row["question"], row["answer"]) == (page.context, *page.questions[0])
    assert utils.doc_to_text(row) == prompt(page.context, page.questions[0][0])

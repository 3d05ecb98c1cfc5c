"""Groups of samples about one document, and the questions of all samples in a group.

`datasets.<name>.questions_key` names a field of the documents. Either the field lists the texts of all questions (a document's
samples then follow each other), or samples with an equal value (a name, a picture) ask about one document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.datasets.messages import question_text, with_question
from mmkv_bench.errors import ConfigError, DataError, MissingDataError
from mmkv_bench.evaluation.samples import DocumentQuestions, SampleRef
from mmkv_bench.protocols import protocol

if TYPE_CHECKING:
    import datasets

    from mmkv_bench.datasets.specs import TaskSpec

Messages = Sequence[dict[str, Any]]
FIELDS = {"generic": "a fixed instruction in place of a question", "paraphrase": "each question in other words"}
"""The field of a document that a value of `Protocol.knows` needs, with its meaning."""


def lists_texts(spec: TaskSpec, docs: datasets.Dataset) -> bool:
    """Return True if the field `questions_key` contains a list of questions' texts, False if equal values group samples."""
    from datasets import Value

    item_feature = getattr(docs.features[spec.questions_key], "feature", None)
    return isinstance(item_feature, Value) and item_feature.dtype == "string"


def check_order(spec: TaskSpec, docs: datasets.Dataset, refs: Sequence[SampleRef]) -> None:
    """Check that consecutive samples ask the questions that a document lists, in the order of the list.

    Raises:
        MissingDataError: the samples are not numbered.
        DataError: another order, or documents with different numbers of questions or none.
    """
    if not lists_texts(spec, docs):
        return
    if "question_number" not in docs.column_names:
        raise MissingDataError(
            f"datasets.{spec.dataset}.questions_key names a list of questions, which needs the field "
            f"question_number too, but task {spec.name} has no such field; add it, or leave questions_key out"
        )
    columns = docs.select_columns([spec.questions_key, "question_number"])[: len(refs)]
    questions_per_document = len(columns[spec.questions_key][0])
    if {len(texts) for texts in columns[spec.questions_key]} != {questions_per_document}:
        raise DataError(
            f"documents of {spec.dataset} have different numbers of questions; give each document the same number"
        )
    if not questions_per_document:
        raise DataError(
            f"{spec.questions_key} lists no question for a document of {spec.dataset}; give each document at least one"
        )
    clusters = [
        {ref.cluster for ref in refs[begin : begin + questions_per_document]}
        for begin in range(0, len(refs), questions_per_document)
    ]
    is_ordered = columns["question_number"] == [place % questions_per_document for place in range(len(refs))]
    if not is_ordered or any(len(names) > 1 for names in clusters):
        raise DataError(
            f"the questions of a document of {spec.dataset} do not follow each other, numbered from 0, with one "
            "value of cluster_key; sort them"
        )


def check_questions(spec: TaskSpec, bare: datasets.Dataset, count: int | None, names: Collection[str]) -> None:
    """Check that a dataset with several questions per document has the fields that the protocols need.

    Args:
        bare: the dataset's documents without media.
        count: the number of samples of the run; None: all.
        names: the names of the protocols.

    Raises:
        ConfigError: a field is missing by which a protocol scores entries, or the first `count` samples end within a
            document whose questions are listed.
    """
    for name in names:
        known_questions = protocol(name).knows
        if known_questions in FIELDS and not {known_questions, f"{known_questions}s"} & set(bare.column_names):
            raise ConfigError(
                f"protocol={name} scores by {FIELDS[known_questions]}, but {spec.dataset} has no such field; leave the "
                "protocol out"
            )
    if count is None or spec.questions_key not in bare.column_names or not lists_texts(spec, bare):
        return
    questions_per_document, taken_rows = len(bare[0][spec.questions_key]), min(count, len(bare))
    whole_documents = taken_rows // questions_per_document * questions_per_document
    if taken_rows > whole_documents:
        raise ConfigError(
            f"limit={count} ends within a document of {spec.dataset}, which has {questions_per_document} questions; give "
            f"{f'limit={whole_documents} or ' if whole_documents else ''}limit={whole_documents + questions_per_document}"
        )


class QuestionGroups:
    """Groups of samples that ask about the same document.

    Samples beyond a run's limit are included, so that the compression of a document does not depend on the limit.

    Args:
        spec: a task with a `questions_key`.
        full: the documents with media.
        bare: the documents without media.
    """

    def __init__(self, spec: TaskSpec, full: datasets.Dataset, bare: datasets.Dataset):
        self.spec, self.bare = spec, bare
        self.listed = lists_texts(spec, full)
        self.groups = {} if self.listed else _groups(full, str(spec.questions_key))
        self._last: tuple[int, DocumentQuestions] | None = None  # of the last document

    def order(self, doc_id: int) -> tuple[int, int]:
        """Return a sort key that puts the questions about one document next to each other."""
        return (doc_id if self.listed else self.groups[doc_id][1][0]), doc_id

    def of(
        self, ref: SampleRef, messages: Messages, context: str, messages_of: Callable[[int], Messages]
    ) -> DocumentQuestions:
        """Return all questions about a sample's document.

        Args:
            ref: the sample.
            messages: the sample's own messages.
            context: the document's text, or "" if pictures or videos are the document.
            messages_of: function that returns the messages of another sample by its doc_id.

        Raises:
            DataError: the sample's question differs from the one in the document's list, or cannot be put behind its document;
                or text before the end of the document differs between its samples.
        """
        document_questions = (
            self._from_list(ref) if self.listed else self._from_group(ref, messages, context, messages_of)
        )
        if with_question(messages, context, document_questions.texts[document_questions.number]) != list(messages):
            raise DataError(
                f"sample {ref.sample_id} should ask question {document_questions.number} of its document, "
                f"{document_questions.texts[document_questions.number]!r}, but its prompt does not; "
                "correct the question's text or its number in the data"
            )
        return document_questions

    def _from_list(self, ref: SampleRef) -> DocumentQuestions:
        row = self.bare[ref.doc_id]
        texts, question_number = tuple(row[self.spec.questions_key]), int(row["question_number"])
        first_doc_id = ref.doc_id - question_number
        names = tuple(self.spec.sample_id(first_doc_id + place) for place in range(len(texts)))
        rewordings = tuple(row.get("paraphrases") or ()), str(row.get("generic") or "")
        return DocumentQuestions(ref.cluster, question_number, first_doc_id // len(texts), texts, names, *rewordings)

    def _from_group(
        self, ref: SampleRef, messages: Messages, context: str, messages_of: Callable[[int], Messages]
    ) -> DocumentQuestions:
        position, members = self.groups[ref.doc_id]
        question_number = members.index(ref.doc_id)
        if self._last is None or self._last[0] != position:
            message_lists = [messages if one == ref.doc_id else messages_of(one) for one in members]
            texts = tuple(question_text(one, context) for one in message_lists)
            for other, text, own in zip(members, texts, message_lists, strict=True):
                if with_question(message_lists[0], context, text) != list(own):
                    raise DataError(
                        f"samples {self.spec.sample_id(members[0])} and {self.spec.sample_id(other)} have one value of "
                        f"{self.spec.questions_key}, so one document, but different text before its end; put the question "
                        "behind the last image or video and behind the context_key, or leave questions_key out"
                    )
            rows = [self.bare[one] for one in members]
            paraphrases = tuple(str(row["paraphrase"]) for row in rows if row.get("paraphrase"))
            names = tuple(self.spec.sample_id(one) for one in members)
            generic_instruction = str(rows[0].get("generic") or "")
            document_questions = DocumentQuestions(
                names[0], question_number, position, texts, names, paraphrases, generic_instruction
            )
            self._last = position, document_questions
        return self._last[1].asking(question_number)


def _groups(docs: datasets.Dataset, key: str) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Group samples by equal values of the column `key`. Return doc_id -> (number of the group, doc_ids of its
    samples), both in the order of the dataset."""
    key_column = docs.select_columns([key]).with_format("arrow")
    members: dict[str, list[int]] = {}
    for doc_id in range(len(docs)):
        members.setdefault(_digest(key_column[doc_id].column(0)[0].as_py()), []).append(doc_id)
    return {one: (place, tuple(group)) for place, group in enumerate(members.values()) for one in group}


def _digest(value: Any) -> str:
    if isinstance(value, Mapping) and value.get("bytes"):
        return hashlib.sha256(value["bytes"]).hexdigest()
    if isinstance(value, list):
        return hashlib.sha256("".join(map(_digest, value)).encode()).hexdigest()
    return hashlib.sha256(repr(value).encode()).hexdigest()

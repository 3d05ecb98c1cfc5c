"""Documents with questions, and their content as text.

A document is a list of pages, a page a list of lines, a line a list of cells. `render` draws a document, and `as_text` writes its
content as text. `form` is one of `FORMS`:

    page     one page for 448 px: 7 to 14 lines of up to 21 characters
    pages    two pages like `page`, with different entries
    receipt  one page for 336 px: 6 to 11 lines of up to 16 characters
    video    8 frames for 224 px: a title and 3 entries of up to 12 characters, one of which changes at one frame
"""

from __future__ import annotations

from dataclasses import dataclass

FORMS = {"page": (448, 1), "pages": (448, 2), "receipt": (336, 1), "video": (224, 8)}
"""Form -> side of its square pictures in pixels, and their number."""

PATCH = 14
"""Side of a patch in pixels; a patch is one visual token."""
WIDTH = {448: 21, 336: 16, 224: 12}
"""Side of the picture -> largest number of characters in a line."""


@dataclass(frozen=True)
class Line:
    """A line of a page, as text in cells.

    heading: the line is drawn larger or bold. indent: the line is drawn further to the right.
    """

    cells: tuple[str, ...]
    heading: bool = False
    indent: bool = False

    @property
    def text(self) -> str:
        return " ".join(self.cells)


@dataclass(frozen=True)
class Question:
    """A question with its only right answer.

    Attributes:
        task: value, row or change.
        entry: number of the document's entry that is asked about.
    """

    task: str
    text: str
    answer: str
    entry: int


@dataclass(frozen=True)
class Document:
    """Pages (or frames) of lines, with all questions about them. Two documents have an equal question only by chance."""

    form: str
    kind: str
    pages: tuple[tuple[Line, ...], ...]
    questions: tuple[Question, ...]


def as_text(paper: Document) -> str:
    """Return a document's content as plain text, in reading order.

    In a video, each frame follows the time that the video prompt states for it.
    """
    bodies = ["\n".join(line.text for line in page) for page in paper.pages]
    if paper.form == "video":
        return "\n\n".join(f"Frame from 00:{place:02d}:\n{body}" for place, body in enumerate(bodies))
    if len(bodies) > 1:
        return "\n\n".join(f"Page {place}:\n{body}" for place, body in enumerate(bodies, 1))
    return bodies[0]


def tokens_about(text: str) -> int:
    """Estimate how many tokens SmolLM2's tokenizer makes of a text.

    Counted as one token each: a digit, a sign, a space before a digit, four letters of a word.
    """
    total = 0
    for word in text.split():
        letters = sum(sign.isalpha() for sign in word)
        total += len(word) - letters + (letters + 3) // 4 + word[0].isdigit()
    return total

"""The kinds of documents, from invoices to notice boards that change: their content and their questions."""

from __future__ import annotations

from collections.abc import Sequence

from mmkv_bench.reader.documents import FORMS, WIDTH, Document, Line, Question, tokens_about
from mmkv_bench.reader.draw import Draw

# kind: (title words, kind of the key, {field: maker}); the key is first or second in a row
TABLES = {
    "invoice": (("Invoice", "Bill", "Order"), "goods", {"quantity": "count", "price": "sum", "code": "code"}),
    "stock": (("Stock", "Store", "Depot"), "goods", {"stock": "count", "code": "code", "shelf": "place_code"}),
    "timetable": (
        ("Trains", "Departures", "Coaches"),
        "places",
        {"time": "time", "platform": "place_code", "train": "code"},
    ),
    "contacts": (("Contacts", "Staff", "Members"), "person", {"phone": "phone", "room": "place_code", "code": "code"}),
    "appointments": (
        ("Visits", "Clinic", "Meetings"),
        "person",
        {"time": "time", "room": "place_code", "date": "date"},
    ),
}
FORM_FIELDS = {
    "Name": "person",
    "Client": "person",
    "Agent": "person",
    "Date": "date",
    "Due": "date",
    "Issued": "date",
    "Born": "date",
    "City": "places",
    "From": "places",
    "Port": "places",
    "Time": "time",
    "Opens": "time",
    "Total": "sum",
    "Tax": "sum",
    "Balance": "sum",
    "Number": "code",
    "Ref": "code",
    "Account": "code",
    "Phone": "phone",
    "Fax": "phone",
    "Room": "place_code",
    "Seat": "place_code",
    "Item": "goods",
    "Pieces": "count",
}
ASK = (
    "What is the {field} of {key}?",
    "Which {field} does {key} have?",
    "Give the {field} of {key}.",
    "{key}: what is the {field}?",
)
ASK_FIELD = (
    "What does the page give as {field}?",
    "What is the entry under {field}?",
    "Read the value of {field}.",
    "{field}?",
)
ASK_ROW = ("Copy the whole entry of {key}.", "Write out the row of {key}.", "Copy the row that has {key}.")
BOARDS = {
    "departures": ("Gates", "places", "gate", "place_code"),
    "times": ("Times", "places", "time", "time"),
    "prices": ("Prices", "goods", "price", "sum"),
    "levels": ("Stock", "goods", "stock", "count"),
    "rooms": ("Rooms", "last_names", "room", "place_code"),
}


def _make(draw: Draw, kind: str, longest: int = 9) -> str:
    """Draw a random text of a kind: a word, a name or a value. A word has at most `longest` characters."""
    if kind in ("goods", "places", "first_names", "last_names"):
        return draw.word(kind, longest)
    return (
        draw.person(longest + 5)
        if kind == "person"
        else draw.sum(2)
        if kind == "sum" and longest < 9
        else getattr(draw, kind)()
    )


def document(split: str, number: int, form: str, extra: Sequence[str] = ()) -> Document:
    """Return document `number` of a split; equal arguments give equal documents.

    form: one of `FORMS`. extra: further words of the split that may replace names, see `Draw`.
    """
    draw = Draw(f"reader {split} {number} {form}", split, extra)
    return board(draw) if form == "video" else paper(draw, form)


def paper(draw: Draw, form: str) -> Document:
    """Draw the pages of an invoice, list, form, receipt or notes, with all questions about the pages."""
    side, pages = FORMS[form]
    width, kinds = (
        WIDTH[side],
        (*TABLES, "form", "notes", "form") if form != "receipt" else ("receipt", "receipt", "form"),
    )
    kind = draw.one(kinds)
    lines: list[list[Line]] = []
    questions: list[Question] = []
    used_keys: set[str] = set()
    fields = draw.shuffled(tuple(TABLES[kind][2] if kind in TABLES else FORM_FIELDS))
    key_first, two_lines = draw.share() < 0.5, draw.share() < 0.3 or kind in ("contacts", "appointments")
    for page in range(pages):
        body: list[Line] = []
        if kind in TABLES:
            body.append(
                Line((draw.one(TABLES[kind][0]), *((draw.code(),) if draw.share() < 0.5 else ())), heading=True)
            )
            rows = (4 + draw.below(3)) if two_lines else 6 + draw.below(4)
            for _ in range(rows):
                _row(draw, body, questions, used_keys, kind, fields, key_first, two_lines, width)
        elif kind == "receipt":
            body.append(Line((draw.made_up(), draw.one(("Shop", "Store", "Ltd", "Market"))), heading=True))
            for label, value in (("Date", draw.date()), ("Time", draw.time()))[: 1 + draw.below(2)]:
                _field(draw, body, questions, label, value, width)
            for _ in range(4 + draw.below(2)):
                _row(draw, body, questions, used_keys, "receipt", ["price"], True, False, width)
            for label, value in (("Total", draw.sum()), ("Card", draw.code()))[: 1 + draw.below(2)]:
                _field(draw, body, questions, label, value, width)
        elif kind == "form":
            body.append(Line((draw.made_up(), draw.one(("Form", "Permit", "Ticket", "Pass"))), heading=True))
            for label in fields[page * 9 : page * 9 + (5 if form == "receipt" else 6) + draw.below(4)]:
                _field(draw, body, questions, label, _make(draw, FORM_FIELDS[label]), width)
        else:
            body.append(Line(("Notes", draw.date()), heading=True))
            for _ in range(4 + draw.below(3)):
                _note(draw, body, questions, used_keys)
        lines.append(body)
    return Document(form, kind, tuple(tuple(body) for body in lines), tuple(questions))


def _row(draw, body, questions, taken, kind, fields, key_first, two_lines, width) -> None:
    """Add an entry with a key and one to three values to `body`, on one to three lines, and its questions to `questions`.

    Both lists, and the set `taken` of used keys, are changed in place.
    """
    key_kind, makers = ("goods", {"price": "sum"}) if kind == "receipt" else TABLES[kind][1:]
    key = _make(draw, key_kind)
    while key.lower() in taken:
        key = _make(draw, key_kind)
    taken.add(key.lower())
    values = {field: _make(draw, makers[field]) for field in fields}
    shown = list(fields)
    if not two_lines:
        while len(shown) > 1 and len(key) + sum(len(values[field]) + 1 for field in shown) > width:
            shown.pop()
    parts = [values[field] for field in shown]
    cells = [key, *parts] if key_first or kind == "receipt" else [parts[0], key, *parts[1:]]
    entry = len(taken)
    if two_lines:
        body += [Line((key,)), Line(tuple(parts), indent=True)]
        cells = [key, *parts]
        if len(" ".join(parts)) > width:
            body[-1:] = [Line(tuple(parts[:2]), indent=True), Line(tuple(parts[2:]), indent=True)]
    else:
        body.append(Line(tuple(cells)))
    for field in shown:
        questions.append(Question("value", draw.one(ASK).format(field=field, key=key), values[field], entry))
    if 12 <= tokens_about(" ".join(cells)) <= 24:
        questions.append(Question("row", draw.one(ASK_ROW).format(key=key), " ".join(cells), entry))


def _field(draw, body, questions, label, value, width) -> None:
    """Add a label with its value to `body`, on one line or two, and a question about it to `questions`, in place."""
    entry = 100 + len(body)
    if len(label) + len(value) + 2 <= width and draw.share() < 0.8:
        body.append(Line((label + draw.one((":", "")), value)))
    else:
        body += [Line((label,)), Line((value,), indent=True)]
    questions.append(Question("value", draw.one(ASK_FIELD).format(field=label), value, entry))


def _note(draw, body, questions, taken) -> None:
    """Add a note on two lines (whom to see, when and where) to `body`, and its questions to `questions`, in place."""
    person = draw.person(13)
    while person.lower() in taken:
        person = draw.person(13)
    taken.add(person.lower())
    verb, time, meeting_place = draw.word("verbs"), draw.time(), draw.word("places")
    body += [Line((verb, person)), Line(("at", time, "in", meeting_place), indent=True)]
    whole, entry = f"{verb} {person} at {time} in {meeting_place}", len(taken)
    questions += [
        Question("value", f"At what time is the note about {person}?", time, entry),
        Question("value", f"In which place is the note about {person}?", meeting_place, entry),
        Question("row", f"Copy the whole note about {person}.", whole, entry),
    ]


def board(draw: Draw) -> Document:
    """Draw a notice board of three entries in eight frames, and the questions about it. One entry changes once."""
    kind = draw.one(tuple(BOARDS))
    title, key_kind, field, maker = BOARDS[kind]
    rows: list[list[str]] = []
    while len(rows) < 3:
        key, value = _make(draw, key_kind, 7), _make(draw, maker, 4)
        if len(key) + len(value) < WIDTH[224] and key.lower() not in (row[0].lower() for row in rows):
            rows.append([key, value])
    changed_index, change_frame = draw.below(3), 1 + draw.below(7)
    key, first = rows[changed_index]
    new_value = _make(draw, maker, 4)
    while new_value == first or len(key) + len(new_value) >= WIDTH[224]:
        new_value = _make(draw, maker, 4)
    frames = []
    for frame in range(8):
        shown = [(name, new_value if frame >= change_frame and name == key else value) for name, value in rows]
        frames.append((Line((title,), heading=True), *(Line(cells) for cells in shown)))
    changed_row = draw.below(8)
    questions = [
        Question("change", f"What was the {field} of {key} at first?", first, changed_index),
        Question("change", f"What is the {field} of {key} at the end?", new_value, changed_index),
        Question(
            "change",
            f"What was the {field} of {key} at 00:{changed_row:02d}?",
            new_value if changed_row >= change_frame else first,
            changed_index,
        ),
    ]
    others = [row for row in rows if row[0] != key]
    questions += [
        Question("value", f"What is the {field} of {name}?", value, 10 + n) for n, (name, value) in enumerate(others)
    ]
    return Document("video", kind, tuple(frames), tuple(questions))

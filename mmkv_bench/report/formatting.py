"""Numbers as text, and HTML tables with sorting, search and filters (DataTables, written by itables)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    import pandas as pd


def number(value: Any) -> float | int | None:
    """Return a number rounded to six significant digits; whole ones stay whole. None, NaN and infinities give None."""
    if value is None or isinstance(value, bool | int):
        return value
    value = float(value)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")


def numbers(values: Iterable[Any]) -> list[float | int | None]:
    """Return `number` of each value."""
    return [number(value) for value in values]


def score(value: float | None) -> str:
    """Return a score as text with three decimals, or with one decimal from 100 on; `-` for None."""
    return "-" if value is None else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"


def interval(low: float | None, high: float | None) -> str:
    """Return an interval as text: `[0.710, 0.800]`; "" if an end is None."""
    return "" if low is None or high is None else f"[{score(low)}, {score(high)}]"


def budget_words(axis: str, budget: str) -> str:
    """Return a budget as text: `64 entries` or `20 %`; "" if there is none. axis: kind of budget."""
    if not budget:
        return ""
    return f"{float(budget) * 100:.4g} %" if axis == "fraction" else f"{budget} entries"


def byte_words(count: float) -> str:
    """Return a number of bytes as text: `256.0 KiB`."""
    unit_power = min(3, max(0, math.floor(math.log2(max(count, 1)) / 10)))
    return f"{count / 1024**unit_power:.{min(unit_power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[unit_power]}"


def number_words(value: float) -> str:
    """Return a number as text: `1,024` or `63.5`."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


Field = tuple[str, Any]
"""A text or markup, and its sort key. Fields with key None come first."""
_LINK_RENDERER = (
    "function (name, type) { return type !== 'display' ? name : "
    "`<a href=\"%s${name}.html\">${name.split('-')[1].slice(0, 12)}</a>`; }"
)
_NOTEBOOK_ARGUMENTS = ("dt_url", "connected", "display_logo_when_loading")


def text_field(text: str | None, markup: str | None = None) -> Field:
    """Return a field that sorts by its text in natural order (`m2` before `m10`). markup: shown instead of the text."""
    return (text or "") if markup is None else markup, _order(text or "")


@lru_cache(1 << 16)
def _order(text: str) -> tuple[Any, ...]:
    return tuple((part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", text))


def datatable(
    name: str, columns: Mapping[str, Sequence[Field]], filtered: Collection[str] = (), link: str = ""
) -> Markup:
    """Return the HTML of a table that can be sorted, searched and filtered.

    Args:
        name: id of the table.
        columns: header -> one field per row.
        filtered: headers with a list of values to choose from.
        link: folder of the pages that the first column links to; "": no links.
    """
    import pandas as pd
    from itables import JavascriptFunction
    from itables.javascript import get_itable_arguments, html_table_from_template

    frame = pd.DataFrame({str(escape(header)): _sortable_column(fields) for header, fields in columns.items()})
    if link:
        frame[frame.columns[0]] = frame[frame.columns[0]].astype(str)
    paging_layout = {"bottomStart": "pageLength", "bottomEnd": "paging"} if len(frame) > 50 else {}
    filtered_columns = [place for place, header in enumerate(columns) if header in filtered]
    arguments = get_itable_arguments(
        frame,
        table_id=name,
        allow_html=True,  # every text is escaped, and markup is made by this package
        maxBytes=0,
        showIndex=False,
        classes="display compact",
        style="width:100%",
        columnControl=["order"],
        columnDefs=[
            {"targets": "_all", "type": "num", "className": "dt-left"},
            *([{"targets": 0, "type": "string", "render": JavascriptFunction(_LINK_RENDERER % link)}] if link else []),
            {"targets": filtered_columns, "columnControl": ["order", ["searchList"]]},
        ],
        ordering={"indicators": False, "handler": False},
        layout={"topStart": "info", "topEnd": "search"}
        | dict.fromkeys(("bottomStart", "bottomEnd"), None)
        | paging_layout,
        lengthMenu=[25, 50, 100, 500],
        pageLength=50,
        stateSave=True,
        stateDuration=-1,  # as long as the tab is open, so filters survive when a reader comes back
    )
    arguments["data_json"] = json.dumps(json.loads(arguments["data_json"]), separators=(",", ":"), ensure_ascii=False)
    options: dict[str, Any] = {key: value for key, value in arguments.items() if key not in _NOTEBOOK_ARGUMENTS}
    return Markup(html_table_from_template(name, "", False, False, options))  # type: ignore[arg-type]  # noqa: S704


def _sortable_column(fields: Sequence[Field]) -> pd.Categorical:
    """Return fields as a categorical column, which sorts by their keys. itables then writes each text only once."""
    import pandas as pd

    keys: dict[str, Any] = {}
    for text, key in fields:
        keys.setdefault(str(escape(text)), key)
    texts = sorted(keys, key=lambda text: (keys[text] is not None, keys[text]))
    return pd.Categorical([str(escape(text)) for text, _ in fields], texts, ordered=True)

"""What stored answers kept: one sample answered again, with the indices that its cells' digests are of.

Rows hold counts and a digest of the kept indices, not the indices; the remake is the same where the digests agree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.diagnostics.verify import COMPARED, EQUAL, Drawn, make_again
from mmkv_bench.errors import ConfigError
from mmkv_bench.store.store import Store

if TYPE_CHECKING:
    import numpy as np

    from mmkv_bench.evaluation.contract import Request
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.generation.result import ForkResult
    from mmkv_bench.models.load import LoadedModel


@dataclass
class Seen:
    """A prompt as its cells saw it.

    Attributes:
        tokens: of the whole prompt; visual: int64 [V], positions of the visual ones.
        places: float64 [V, 5], of every visual token its image's number, and top, bottom, left and right as parts of the image's
            sides; -1 where it shows no place. None where no rule tells them (a video, an unknown family).
    """

    tokens: int
    visual: np.ndarray
    places: np.ndarray | None


@dataclass
class Remade:
    """A stored answer, made again.

    Attributes:
        cell: hash; outcome: `equal`, `different`, or why it was not made again; differing: columns that are not equal.
        proven: the stored row has a digest, and it is the one of `kept`.
        kept: per layer int32 [KV heads, m], kept positions of the prompt, ascending behind padding of -1; None where nothing was
            made. seen: the prompt that it was made of.
    """

    cell: str
    outcome: str
    differing: list[str]
    proven: bool
    kept: list[np.ndarray] | None
    seen: Seen | None

    @property
    def same(self) -> bool:
        """Everything that the stored row says of the answer is so again."""
        return self.outcome == EQUAL


def remake(
    root: Path, cells: Collection[str], sample_id: str, other_versions: bool = False, run_code: bool = False
) -> dict[str, Remade]:
    """Answer one sample again with these cells of a store.

    Args:
        other_versions: also where other versions of torch or transformers are installed than made the rows.
        run_code: see `make_again`.

    Raises:
        ConfigError: none of the cells has answered that sample.
    """
    drawn = _stored(Store(root), cells, sample_id)
    if not drawn:
        raise ConfigError(f"none of these cells of {root} has answered {sample_id}; there is nothing to make again")
    kept: dict[str, tuple[list[np.ndarray] | None, Seen]] = {}

    def watch(loaded: LoadedModel, request: Request, prompt: EncodedPrompt, results: Sequence[ForkResult]) -> None:
        seen = _seen(loaded, request, prompt)
        for result in results:
            indices = None if result.selected is None else [layer.numpy() for layer in result.selected]
            kept[result.cell] = indices, seen

    make_again(drawn, other_versions, watch, run_code)
    found = {}
    for one in drawn:
        cell = one.row["cell"]
        indices, seen = kept.get(cell, (None, None))
        proven = one.row["kept_digest"] is not None and one.outcome == EQUAL
        found[cell] = Remade(cell, one.outcome, one.differing, proven, indices, seen)
    return found


def _stored(store: Store, cells: Collection[str], sample_id: str) -> list[Drawn]:
    """The `ok` answers of these cells to the sample."""
    import pyarrow.compute as pc

    rows = store.responses(cells, ("cell", "dataset", "sample_id", "doc_id", *COMPARED))
    rows = rows.filter(pc.and_(pc.equal(rows["sample_id"], sample_id), pc.equal(rows["status"], "ok")))
    known = {row["cell"]: row for row in store.cells(rows["cell"].to_pylist()).to_pylist()}
    return [Drawn(store.root, row, known[row["cell"]]) for row in rows.to_pylist()]


def _seen(loaded: LoadedModel, request: Request, prompt: EncodedPrompt) -> Seen:
    import numpy as np

    from mmkv_bench.run.requested import visual_places

    visual = np.flatnonzero(prompt.types[0].cpu().numpy() > 0)
    told = visual_places(loaded, prompt, request)
    return Seen(prompt.length, visual, None if told is None else np.reshape(told, (-1, 6))[:, 1:])

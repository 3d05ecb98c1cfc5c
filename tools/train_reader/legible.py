"""`python -m tools.train_reader.legible`: the share of a page's characters that a pretrained recogniser reads.

PP-OCRv4 (PaddleOCR, Apache-2.0) comes as ONNX files in the wheel `rapidocr-onnxruntime`, which needs Python below 3.13:

    uv run --no-project --python 3.11 --with rapidocr-onnxruntime==1.4.4 --with pillow --with matplotlib \
        python -m tools.train_reader.legible

It finds the lines of a page by itself. Characters count in reading order and without spaces; a character that it reads at
another place than the page's counts as not read.
"""

from __future__ import annotations

import argparse
from difflib import SequenceMatcher

import numpy as np

from mmkv_bench.reader.render import draw_document
from mmkv_bench.reader.trials import trial
from mmkv_bench.reader.typefaces import typefaces


def main() -> None:
    from rapidocr_onnxruntime import RapidOCR  # of its own environment, see above

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--documents", type=int, default=40, help="documents of reader_value of each split (default: 40)"
    )
    documents = parser.parse_args().documents
    recogniser = RapidOCR(intra_op_num_threads=1, inter_op_num_threads=1)
    for split in ("dev", "test"):
        read = written = 0
        for number in range(documents):
            made = trial("value", split, number)
            pictures, _ = draw_document(made.paper, made.look, typefaces(split))
            for picture, page in zip(pictures, made.paper.pages, strict=True):
                text = "".join(line.text for line in page).replace(" ", "")
                read += common_characters(text, text_of(recogniser, picture))
                written += len(text)
        print(f"{split}: {read} of {written} characters ({read / written:.3f}), {documents} documents")


def text_of(recogniser, picture: np.ndarray) -> str:
    """Return the text of a picture (side, side, 3) uint8, line by line from left to right, without spaces."""
    lines, _ = recogniser(np.ascontiguousarray(picture[..., ::-1]), use_cls=False)  # the library takes BGR
    places = [(round(corners[0][1] / 20), corners[0][0], text) for corners, text, _ in lines or []]
    return "".join(text for *_, text in sorted(places)).replace(" ", "")


def common_characters(text: str, other: str) -> int:
    """Count the characters of `text` that stand in `other` in the same order (longest matching blocks)."""
    return sum(block.size for block in SequenceMatcher(None, text, other, autojunk=False).get_matching_blocks())


if __name__ == "__main__":
    main()

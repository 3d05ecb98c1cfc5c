"""The 112 tokens of the embedded model: special tokens, roles, newline, printable ASCII characters."""

from __future__ import annotations

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ROLES = ("system", "user", "assistant")
TOKENS: tuple[str, ...] = SPECIAL + ROLES + ("\n",) + tuple(chr(code) for code in range(32, 127))
ID: dict[str, int] = {token: index for index, token in enumerate(TOKENS)}
VOCAB_SIZE = 112  # a multiple of 16; the last rows of the embedding stay unused

PAD, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(len(SPECIAL))

KEYS = "ABCDEFGHJKMNPQRSTUVWXYZ"  # no I, L, O: their glyphs resemble digits
LINKS = KEYS.lower()
DIGITS = "0123456789"
PUNCTUATION = "+-=*#%&.,:;"
PAGE_CHARACTERS = KEYS + LINKS + DIGITS + PUNCTUATION  # everything a page cell may show, besides a blank
END = "."  # the link of an entry that ends a chain

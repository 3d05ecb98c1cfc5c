"""An offline tokenizer with a checkpoint's ids: special tokens are true, text is one token per byte.

A tokenizer's merges cannot be made from a config, so text of a random-weights model is spelled in bytes: a prompt's
visual tokens and markers are exactly the checkpoint's, its text tokens are about four times as many. Every id of the
embedding decodes to something readable, so that a random model's answers are strings that metrics can compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
KEYS = (*ROLES, "add_bos_token", "extra_special_tokens")
BYTES = 256
SCHEME = 1
"""Version of the rules of this file, by which text becomes ids; part of a random model's fingerprint."""
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SYLLABLES = [c + v for c in _CONSONANTS for v in _VOWELS]


def build_tokenizer(
    vocab_size: int,
    special_tokens: Mapping[str, int],
    settings: Mapping[str, Any],
    chat_template: str,
    model_max_length: int | None = None,
) -> PreTrainedTokenizerFast:
    """A fast tokenizer over `vocab_size` ids.

    Ids: `special_tokens` where the checkpoint has them; the first 256 free ids are the bytes (which is where byte-level
    BPE and sentencepiece checkpoints have theirs, too); every other id is a word of its own that no text encodes to.

    Args:
        vocab_size: rows of the model's embedding.
        special_tokens: text -> id.
        settings: of the checkpoint's tokenizer_config.json: `bos_token`, `eos_token`, `pad_token`, `unk_token`,
            `add_bos_token`, and `extra_special_tokens`, names under which a processor looks up special tokens.
        chat_template: Jinja text; model_max_length: the context length.

    Raises:
        ConfigError: an unknown setting, an id twice or outside the vocabulary (which only tokens of
            `extra_special_tokens` may be: a processor replaces them, as InternVL's `<video>`), a role whose token has no id.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    _check(vocab_size, special_tokens, settings)
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(vocab_size, special_tokens), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_tokens])
    bos = settings.get("bos_token")
    if bos is not None and settings.get("add_bos_token"):
        tokenizer.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, special_tokens[bos])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{role: settings[role] for role in ROLES if settings.get(role)},
        extra_special_tokens=dict(settings.get("extra_special_tokens") or {}),
        padding_side="left",
        model_max_length=model_max_length,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def word(index: int) -> str:
    """The `index`-th word, index >= 0: two or more syllables of a consonant and a vowel, all different."""
    syllables: list[str] = []
    while index or len(syllables) < 2:
        index, digit = divmod(index, len(_SYLLABLES))
        syllables.append(_SYLLABLES[digit])
    return "".join(reversed(syllables))


def _vocabulary(size: int, special_tokens: Mapping[str, int]) -> dict[str, int]:
    """Token text -> id; bytes and words in the alphabet of byte-level BPE, in which a blank is written as Ġ."""
    from tokenizers.pre_tokenizers import ByteLevel

    taken = set(special_tokens.values())
    free = [index for index in range(max(size, max(taken, default=0) + 1)) if index not in taken]
    vocabulary = dict(special_tokens) | dict(zip(sorted(ByteLevel.alphabet()), free, strict=False))
    return vocabulary | {f"Ġ{word(n)}": index for n, index in enumerate(free[BYTES:])}


def _check(size: int, special_tokens: Mapping[str, int], settings: Mapping[str, Any]) -> None:
    unknown = set(settings) - set(KEYS)
    if unknown:
        raise ConfigError(f"model.processor.tokenizer has no setting {sorted(unknown)}; allowed: {', '.join(KEYS)}")
    ids = list(special_tokens.values())
    replaced = set((settings.get("extra_special_tokens") or {}).values())
    wrong = [
        text
        for text, index in special_tokens.items()
        if index < 0 or ids.count(index) > 1 or (index >= size and text not in replaced)
    ]
    if wrong:
        raise ConfigError(
            f"model.processor.special_tokens gives {wrong} ids outside 0..{size - 1} or an id twice; each special token "
            "needs an id of its own within the vocabulary"
        )
    if size < BYTES + len(ids):
        raise ConfigError(f"a vocabulary of {size} has no room for 256 bytes and {len(ids)} special tokens; enlarge it")
    named = [settings.get(role) for role in ROLES] + list((settings.get("extra_special_tokens") or {}).values())
    homeless = [text for text in named if text and text not in special_tokens]
    if homeless:
        raise ConfigError(f"tokens {homeless} of model.processor.tokenizer have no id; add them to special_tokens")
    if settings.get("add_bos_token") and not settings.get("bos_token"):
        raise ConfigError("model.processor.tokenizer.add_bos_token=true needs bos_token")

"""Models of transformers that are refused by name, each with the reason."""

from __future__ import annotations

_SHARED = "its later layers read the keys of an earlier one and would inherit what that evicts"
_CONV = "its other layers are short convolutions, which are not tested here"
_MAMBA = "its other layers are Mamba blocks, which are not tested here"
_ONLY_MAMBA = "it has no keys and values that could be compressed"
_CHUNKED = "its other layers attend in chunks, which are not tested here"
_INDEXED = "its attention chooses keys by an index of its own"
_LATENT = "its cache holds latent vectors, not keys and values of heads"
_CAPPED = "its scores are capped softly, which no scorer here does"
_EXPERTS = "its experts are not tested here"

REFUSED = {
    "gemma2": _CAPPED,
    "gemma3n": _SHARED,
    "gemma3n_text": _SHARED,
    "gemma4": "its pictures and sounds are not tested here; its text model alone, gemma4_text, is supported, and `python -m "
    "tools.gemma4_text` of this project's repository takes it out",
    "gemma4_unified": "its pictures and sounds are not tested here",
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "lfm2_vl": _CONV,
    "bamba": _MAMBA,
    "falcon_h1": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "jamba": _MAMBA,
    "nemotron_h": _MAMBA,
    "zamba": _MAMBA,
    "zamba2": _MAMBA,
    "falcon_mamba": _ONLY_MAMBA,
    "mamba": _ONLY_MAMBA,
    "mamba2": _ONLY_MAMBA,
    "recurrent_gemma": _MAMBA.replace("Mamba blocks", "recurrent blocks"),
    "llama4": _CHUNKED,
    "llama4_text": _CHUNKED,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "minimax": _EXPERTS,
    "qwen3_5_moe": _EXPERTS,
    "qwen3_5_moe_text": _EXPERTS,
    "qwen3_next": _EXPERTS,
}
"""`model_type` -> the reason."""

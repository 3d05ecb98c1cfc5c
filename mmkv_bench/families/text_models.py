"""Text models: backbones of the multimodal families, and families of their own."""

from __future__ import annotations

from mmkv_bench.families.base import Family, TextModel

LLAMA = TextModel("llama")
MISTRAL = TextModel("mistral", window_switch="sliding_window")
QWEN2 = TextModel("qwen2", qkv_bias=True, window_switch="use_sliding_window")
QWEN3 = TextModel("qwen3", qk_norm=True, head_dim_follows=False, window_switch="use_sliding_window")

FAMILIES = (
    Family("llama", "Llama (text)", (LLAMA,), "LlamaForCausalLM"),
    Family("mistral", "Mistral (text)", (MISTRAL,), "MistralForCausalLM"),
    Family("qwen2", "Qwen2 (text)", (QWEN2,), "Qwen2ForCausalLM"),
    Family("qwen3", "Qwen3 (text)", (QWEN3,), "Qwen3ForCausalLM"),
)

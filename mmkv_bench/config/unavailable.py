"""Models of the papers that cannot be run here, each with the reason and what it would need.

Only code of the installed transformers is run and only safetensors are read, so a checkpoint that exists as remote code
or in a format of its own repository has no way in. Asking for one by name (`model=longva_7b`) is answered from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.errors import folded


@dataclass(frozen=True)
class Unavailable:
    """One such model.

    Attributes:
        title: as papers write it; repository: where its weights are, as of our knowledge.
        papers: tables that report it; why: one clause; needed: one clause; instead: the nearest models that do run.
        aliases: further names it is asked for by.
    """

    title: str
    repository: str
    papers: str
    why: str
    needed: str
    instead: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def sentence(self, name: str) -> str:
        """The refusal of `model=<name>`."""
        text = f"model={name} cannot be run: {self.title} ({self.repository}) {self.why}; it would need {self.needed}"
        return f"{text}; the nearest that runs is model={' or model='.join(self.instead)}" if self.instead else text


_LLAVA_CODE = (
    "is published in the format of the LLaVA-NeXT repository, whose modelling code is no part of transformers (its "
    "config.json even says model_type qwen2, which would load as a text model that does not see)"
)

UNAVAILABLE = {
    "qwen_vl": Unavailable(
        "Qwen-VL",
        "Qwen/Qwen-VL, Qwen/Qwen-VL-Chat",
        "PrefixKV Table 13, Figure 6",
        "exists only as remote code (modeling_qwen.py, visual.py and a tokenizer of its own in the repository), and "
        "remote code is never run",
        "a class in transformers for its first-generation Qwen decoder (a fused QKV projection, logn attention, dynamic "
        "NTK) and its OpenCLIP ViT-bigG with a cross-attention resampler",
        ("qwen2_vl_7b",),
        ("qwen_vl_chat", "qwen_vl_7b"),
    ),
    "longva_7b": Unavailable(
        "LongVA-7B",
        "lmms-lab/LongVA-7B",
        "MEDA Tables 2 and 4, Figure 5",
        _LLAVA_CODE,
        "a class for UniRes: CLIP-L/336 tiles, each averaged 2x2 to 144 tokens without newlines, in front of a Qwen2-7B "
        "with a context of 224K",
        ("llava_onevision_7b",),
        ("longva", "longva_7b_dpo"),
    ),
    "longvila_8b": Unavailable(
        "LongVILA-8B",
        "Efficient-Large-Model/Llama-3-LongVILA-8B-*Frames",
        "MEDA Tables 2 and 4",
        "is published as three folders (llm, vision_tower, mm_projector) under model_type llava_llama, whose code is "
        "NVIDIA's VILA repository and no part of transformers",
        "a class that joins its SigLIP tower and mlp_downsample projector with the Llama-3-8B, and the repository's prompt",
        ("llama_3_8b", "llava_onevision_7b"),
        ("longvila",),
    ),
    "llava_video_32b": Unavailable(
        "LLaVA-Video-32B",
        "none under this name; the nearest release is lmms-lab/LLaVA-NeXT-Video-32B-Qwen",
        "MEDA Table 3",
        "has no released weights under this name, and LLaVA-NeXT-Video-32B-Qwen (Qwen1.5-32B with CLIP-L/336) "
        "is published in the format of the LLaVA-NeXT repository, whose modelling code is no part of transformers",
        "the paper's checkpoint id, and a class with that repository's frame pooling",
        ("llava_video_7b", "qwen2_5_vl_32b"),
        ("llava_next_video_32b",),
    ),
    "internvl_v1_5": Unavailable(
        "InternVL-v1.5",
        "OpenGVLab/InternVL-Chat-V1-5, OpenGVLab/Mini-InternVL-Chat-4B-V1-5, -2B-V1-5",
        "MEDA Table 1 (as InternVL-v1.5-7B, a size that was not released)",
        "exists only as remote code (InternLM2 or Phi-3 decoders of its repository), and transformers' port covers "
        "InternVL 2.5 and later",
        "the paper's checkpoint id, and a conversion to transformers' InternVL with its InternLM2 decoder as Llama",
        ("internvl3_8b",),
        ("internvl_v1_5_7b", "internvl_chat_v1_5", "internvl_v1_5_26b"),
    ),
    "llava_onevision_1_5_8b": Unavailable(
        "LLaVA-OneVision-1.5-8B-Instruct",
        "lmms-lab/LLaVA-OneVision-1.5-8B-Instruct",
        "FlashCache Tables 1 and 9, Figures 8 and 10",
        "exists only as remote code (modeling_llavaonevision1_5.py), and the installed transformers has no class for it",
        "a class for its RICE vision tower (24 layers of 1024, 2-D RoPE, 2x2 merging) in front of a Qwen3-8B with "
        "one-dimensional positions; the processor is Qwen2.5-VL's",
        ("llava_onevision_7b", "qwen3_vl_8b"),
        ("llava_onevision_1_5",),
    ),
}


def find(name: str) -> Unavailable | None:
    """The model that is asked for by this name, in any spelling with the same letters and digits."""
    wanted = folded(name)
    for key, model in UNAVAILABLE.items():
        if wanted in (folded(key), *map(folded, model.aliases)):
            return model
    return None

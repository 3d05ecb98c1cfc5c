"""The 29 sub-tasks of MileBench (Song et al., COLM 2024, arXiv 2404.18532) and their groups, as data.

Membership is what the paper's taxonomy table says (T-1 to T-4, S-1 to S-5, N-1, N-2, I-1); MEDA (Table 1) prints these
groups with both needle tasks as NH and GPR1200 as IR, FlashCache (Tables 1 and 9) prints T, S, NH and IR. A group's
score is the mean of its sub-tasks' scores, each sub-task counting once: `python -m mmkv_bench tables <rows> --groups`,
which reads the groups of conf/dataset/milebench_*.yaml (the same ones, as a test sees to).

This module imports nothing, so that tables and documentation can read it.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "milebench_"


@dataclass(frozen=True)
class SubTask:
    """One sub-task.

    folder  its folder in the release, which also names its annotation file: <folder>/<folder>.json
    group   the smallest group it belongs to
    scorer  how MileBench scores it: `choice` (option out of a list), `rouge` (ROUGE-L), `contains` (the reference
            stands somewhere in the answer), `needle` (the reference is one of the answer's words)
    source  the dataset it was made of
    count   samples
    part    number n of the archive MileBench_part<n>.tar.gz on the hub that holds it
    """

    folder: str
    group: str
    scorer: str
    source: str
    part: int
    count: int = 200

    @property
    def metric(self) -> str:
        """The per-sample metric the benchmark reports."""
        return "rouge_l" if self.scorer == "rouge" else "accuracy"


SUBTASKS: dict[str, SubTask] = {
    "action_localization": SubTask("ActionLocalization", "T-1", "choice", "STA (Charades-STA)", 0),
    "action_prediction": SubTask("ActionPrediction", "T-1", "choice", "STAR", 0),
    "action_sequence": SubTask("ActionSequence", "T-1", "choice", "STAR", 0),
    "object_existence": SubTask("ObjectExistence", "T-2", "choice", "CLEVRER", 3),
    "object_interaction": SubTask("ObjectInteraction", "T-2", "choice", "STAR", 3),
    "moving_attribute": SubTask("MovingAttribute", "T-2", "choice", "CLEVRER", 2),
    "object_shuffle": SubTask("ObjectShuffle", "T-2", "choice", "Perception Test", 3),
    "egocentric_navigation": SubTask("EgocentricNavigation", "T-3", "choice", "VLN-CE", 1),
    "moving_direction": SubTask("MovingDirection", "T-3", "choice", "CLEVRER", 2),
    "counterfactual_inference": SubTask("CounterfactualInference", "T-4", "choice", "CLEVRER", 1),
    "state_change": SubTask("StateChange", "T-4", "choice", "Perception Test", 3),
    "character_order": SubTask("CharacterOrder", "T-4", "choice", "Perception Test", 0),
    "scene_transition": SubTask("SceneTransition", "T-4", "choice", "MovieNet", 3),
    "webqa": SubTask("WebQA", "S-1", "choice", "WebQA", 5),
    "tqa": SubTask("TQA", "S-1", "choice", "TQA", 5),
    "multimodalqa": SubTask("MultiModalQA", "S-1", "choice", "MultiModalQA", 2),
    "wikivqa": SubTask("WikiVQA", "S-1", "choice", "WikiVQA", 5),
    "slidevqa": SubTask("SlideVQA", "S-2", "choice", "SlideVQA", 4),
    "ocr_vqa": SubTask("OCR-VQA", "S-2", "choice", "OCR-VQA", 4),
    "docvqa": SubTask("DocVQA", "S-2", "choice", "DocVQA", 1),
    "clevr_change": SubTask("CLEVR-Change", "S-3", "rouge", "CLEVR-Change", 1),
    "spot_the_diff": SubTask("Spot-the-Diff", "S-3", "rouge", "Spot-the-Diff", 4),
    "iedit": SubTask("IEdit", "S-3", "rouge", "IEdit", 2),
    "mmcoqa": SubTask("MMCoQA", "S-4", "contains", "MMCoQA", 2),
    "alfred": SubTask("ALFRED", "S-4", "rouge", "ALFRED", 0),
    "nuscenes": SubTask("nuscenes", "S-5", "choice", "nuScenes", 3),
    "text_needle": SubTask("TextNeedleInAHaystack", "NH", "needle", "made by MileBench", 5, 320),
    "image_needle": SubTask("ImageNeedleInAHaystack", "NH", "needle", "made by MileBench", 2, 320),
    "gpr1200": SubTask("GPR1200", "IR", "choice", "GPR1200", 1, 600),
}
"""Name without the prefix -> sub-task, in the order of the paper's taxonomy."""

TITLES: dict[str, str] = {
    "T-1": "action understanding and prediction",
    "T-2": "object and scene understanding",
    "T-3": "visual navigation and spatial localization",
    "T-4": "counterfactual reasoning and state change",
    "S-1": "knowledge grounded QA",
    "S-2": "text-rich images QA",
    "S-3": "visual relation inference",
    "S-4": "dialogue",
    "S-5": "space understanding",
    "NH": "needle in a haystack, text and image",
    "IR": "image retrieval",
}
"""The groups of MEDA's Table 1, which no sub-task shares."""

LARGER: dict[str, tuple[str, ...]] = {
    "T": ("T-1", "T-2", "T-3", "T-4"),
    "S": ("S-1", "S-2", "S-3", "S-4", "S-5"),
}
"""What FlashCache prints besides NH and IR: temporal and semantic multi-image tasks."""

HYBRIDKV = ("clevr_change", "spot_the_diff", "docvqa", "mmcoqa", "multimodalqa", "slidevqa", "webqa", "wikivqa")
"""HybridKV's Table 1."""


def subtask(task: str) -> SubTask:
    """The sub-task of an lmms-eval task name, `milebench_docvqa`."""
    return SUBTASKS[task.removeprefix(PREFIX)]


def groups() -> dict[str, tuple[str, ...]]:
    """Group -> its datasets (`milebench_...`): T-1 to T-4, S-1 to S-5, NH, IR, then T, S and HybridKV."""
    found = {code: tuple(PREFIX + name for name, task in SUBTASKS.items() if task.group == code) for code in TITLES}
    for code, parts in LARGER.items():
        found[code] = tuple(name for part in parts for name in found[part])
    return found | {"HybridKV": tuple(PREFIX + name for name in HYBRIDKV)}

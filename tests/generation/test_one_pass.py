"""Promise: a pass with NaN among the logits of any of its tokens fails, whichever it is; the next one knows nothing of it."""

from __future__ import annotations

import pytest

from mmkv_bench.efficiency.measure import Bench
from mmkv_bench.generation.result import NonFiniteLogitsError
from mmkv_bench.models.load import LoadedModel
from tests import zoo
from tests.generation import common


@pytest.mark.slow
def test_nan_logits_of_any_token_end_the_pass():
    model, prompt = zoo.model("qwen2_5_vl"), common.encoded("qwen2_5_vl")
    device = next(model.parameters()).device
    bench = Bench(LoadedModel("zoo", model, None, None, common.family("qwen2_5_vl"), device, "float32"), 5)
    cells = [common.cell(common.registry("paper", "qwen2_5_vl")["snapkv"], 6, name) for name in ("paper", "strict")]
    for cell in cells:
        calls = 5 if cell.protocol == "paper" else 6  # strict feeds the last token again
        for broken in range(1, calls + 1):
            seen = []

            def spoil(module, args, output, seen=seen, broken=broken):
                seen.append(output)
                if len(seen) == broken:
                    output.logits[:, -1, 0] = float("nan")

            hook = model.register_forward_hook(spoil)
            try:
                if cell.protocol == "strict" and broken == 1:  # whose logits say no token
                    bench.measure_times([prompt], cell)
                else:
                    with pytest.raises(NonFiniteLogitsError, match="answer's 5 tokens"):
                        bench.measure_times([prompt], cell)
            finally:
                hook.remove()
        assert len(bench.measure_times([prompt], cell).answers[0]) == 5

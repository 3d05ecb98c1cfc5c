"""A second device, simulated: tensors that say `cuda:0`, compute on the CPU and refuse to be mixed with CPU tensors.

Nothing of torch is replaced. A far tensor is a subclass that wraps a CPU tensor; one mode answers for functions that make or
move tensors, before torch looks for a driver, another for operations, which are computed on what is wrapped. What CUDA
allows beside its tensors is allowed: single values in elementwise operations, and indices of the host. While the device
is there, `devices.KINDS["cuda"]` is its double: it counts bytes like an allocator, can be given a size, and its clock, events and
pinned memory can be looked at.

    with second_device() as device:
        model = there(zoo.build("qwen2_5_vl"))          # a copy; the model stays as it is
        ... run something on `model`, `device.memory.peak()` ...

`torch.compile` does nothing under modes, so compiled decoding is tested on the CPU.
"""

from __future__ import annotations

from tests.second_device.double import Twin, second_device, there
from tests.second_device.order import Race
from tests.second_device.tensors import HOST, PLACE, Far, MixedDevices, far, near

__all__ = ["HOST", "PLACE", "Far", "MixedDevices", "Race", "Twin", "far", "near", "second_device", "there"]

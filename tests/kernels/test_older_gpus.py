"""Plans for older GPUs (sm_75, sm_80), compiled for the GPU of this machine, run on it and compared with float64.
test_kernels_compile.py asserts that they launch every kernel that is planned for these GPUs."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import TF32_TOLERANCE, TOLERANCE
from harness import assert_kernel_matches
from older_gpus import DEVICES, GEOMETRIES, MODES, plans

from tconv_swap.kernels import plan


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.architecture)
def test_plans_of_older_gpus_compute_right(
    device: plan.Device, name: str, mode: str, channels_last: bool
) -> None:
    torch.manual_seed(0)
    geometry, (dtype, precision) = GEOMETRIES[name], MODES[mode]
    tolerance = TF32_TOLERANCE if precision == "tf32" else TOLERANCE[dtype]
    layouts = (channels_last, channels_last)
    for mask, made in plans(plan.Problem(geometry, dtype, precision, *layouts), device):
        assert_kernel_matches(made, geometry, dtype, layouts, tolerance, mask, with_bias=True)

"""Which layers the families with pixels along k compute in TF32: im2col_nchw in NCHW, im2col_nhwc in channels_last."""

from __future__ import annotations

import pytest
import torch
from grad_weight_cases import H200, LAYERS, UNET, WIDE, tf32_problem

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_weight import im2col_nchw, im2col_nhwc
from tconv_swap.kernels.grad_weight.selection import kernels_for


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_each_layout_has_its_kernel(geometry: Geometry) -> None:
    for channels_last, family in ((False, "im2col_nchw"), (True, "im2col_nhwc")):
        made = plan.plan_backward(tf32_problem(geometry, channels_last), (False, True, False), H200)
        assert f"grad_weight_{family}" in [step.kernel.entry for step in made.launches]
        assert made.family == family
    ieee = tf32_problem(geometry)._replace(precision="ieee")
    assert plan.plan_backward(ieee, (False, True, False), H200).family == "implicit_gemm"


def test_channels_that_are_no_multiple_of_16_bytes_are_planned_as_implicit_gemm() -> None:
    posed = tf32_problem(UNET._replace(in_channels=1022), channels_last=True)
    for with_bias in (False, True):
        made = plan.plan_backward(posed, (False, True, with_bias), H200)
        assert made.family == "implicit_gemm"


def test_only_aligned_tf32_problems_on_hopper_are_claimed() -> None:
    in_nchw, in_nhwc = tf32_problem(UNET), tf32_problem(UNET, channels_last=True)
    for family, one in ((im2col_nchw, in_nchw), (im2col_nhwc, in_nhwc)):
        assert family.supports(one, H200)
        assert not family.supports(one._replace(precision="ieee"), H200)
        assert not family.supports(one._replace(dtype=torch.float16), H200)
        assert not family.supports(one._replace(channels_last=not one.channels_last), H200)
        assert not family.supports(one, H200._replace(architecture="sm_100"))
    assert not im2col_nhwc.supports(tf32_problem(UNET._replace(in_channels=1022), True), H200)
    assert not im2col_nhwc.supports(tf32_problem(UNET._replace(stride=(9, 9)), True), H200)
    assert not im2col_nchw.supports(tf32_problem(WIDE._replace(height=4096, width=4096)), H200)


def test_a_bias_needs_another_kernel_where_taps_skip_rows_of_grad_output() -> None:
    """Kernel 2, stride 4: no tap reads half of the rows of grad_output; a copy of it would hold them."""
    gaps = UNET._replace(stride=(4, 4), output_padding=(2, 2))
    assert gaps.out_width % 4 == 0
    in_nchw, in_nhwc = tf32_problem(gaps), tf32_problem(gaps, channels_last=True)
    of_nchw, of_nhwc = kernels_for(in_nchw, H200).im2col_nchw, kernels_for(in_nhwc, H200).im2col_nhwc
    assert im2col_nchw.ranked(of_nchw, in_nchw, H200, False)
    assert not im2col_nchw.ranked(of_nchw, in_nchw, H200, True)
    assert im2col_nhwc.ranked(of_nhwc, in_nhwc, H200, False)
    assert not im2col_nhwc.ranked(of_nhwc, in_nhwc, H200, True)
    copied = tf32_problem(gaps._replace(output_padding=(0, 0)))
    assert im2col_nchw.ranked(of_nchw, copied, H200, True)

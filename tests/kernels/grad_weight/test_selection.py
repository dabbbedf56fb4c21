"""The kernels of a layer's gradient of the weight, of all families together: how many there are, that every size has
one, how much longer sizes are expected to take than with the best kernel for each, and where copies and launches of
their own for the bias are taken. No GPU."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from sampling import sampled
from size_cases import AMPERE, H200, LAYERS, MODES, any_size, random_sizes

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import schedules
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_weight import bias_clocks as grad_weight_bias_clocks
from tconv_swap.kernels.grad_weight import im2col_nchw as grad_weight_im2col_nchw
from tconv_swap.kernels.grad_weight import im2col_nhwc as grad_weight_im2col_nhwc
from tconv_swap.kernels.grad_weight import implicit_gemm as grad_weight_implicit_gemm
from tconv_swap.kernels.grad_weight import implicit_gemm_candidates as grad_weight_candidates
from tconv_swap.kernels.grad_weight import implicit_gemm_tma as grad_weight_tma
from tconv_swap.kernels.grad_weight import narrow_mma as grad_weight_narrow_mma
from tconv_swap.kernels.grad_weight import nchw_to_nhwc as grad_weight_nchw_to_nhwc
from tconv_swap.kernels.grad_weight import selection as grad_weight_selection
from tconv_swap.kernels.grad_weight import stride1 as grad_weight_stride1
from tconv_swap.kernels.grad_weight.selection import (
    Kernels,
    kernels_for,
    kernels_of,
    layer_of,
    limit_of,
    representatives,
)
from tconv_swap.kernels.gradients import nchw_to_nhwc as gradients_nchw_to_nhwc
from tconv_swap.kernels.gradients.joint_kernels import joint_kernels
from tconv_swap.runtime.program import Kernel, Part

Mode = tuple[torch.dtype, str]
#: Family of plans that read copies in channels_last.
COPIES = "nchw_to_nhwc, implicit_gemm_tma"
TF32, FP16, IEEE = MODES
BY_NAME = {layer.name: layer.geometry for layer in LAYERS}
#: Overlapping taps, few and many channels, kernels that are their stride, groups, one row, stride 1, a plain product,
#: and many taps. (gradients/test_sizes.py counts the kernels that plans of all layers take.)
SAMPLE = (
    *("dcgan2", "cyclegan2", "higherhrnet", "unet4", "stylegan2_mod"),
    *("hifigan_up1", "kb65", "dcgan1", "fcn32s"),
)


def problem_of(name: str, mode: Mode = FP16, channels_last: bool = False) -> plan.Problem:
    return posed(BY_NAME[name], mode, channels_last)


def posed(geometry: Geometry, mode: Mode = FP16, channels_last: bool = False) -> plan.Problem:
    return plan.Problem(geometry, *mode, channels_last, channels_last)


def count(kernels: Kernels) -> int:
    return sum(len(getattr(kernels, family)) for family in Kernels.__slots__)


def selected(layer: plan.Problem) -> Kernels:
    """Returns the kernels of a layer as a new process selects them."""
    found: Kernels = kernels_of.__wrapped__.__wrapped__(layer, H200)  # type: ignore[attr-defined]
    return found


# ---- how many, and one for every size ---------------------------------------------------------------------------


def extremes(layer: Geometry) -> Iterator[Geometry]:
    """Yields the smallest map, one image of 2^26 elements, and batches of 2^30, of even and of odd rows."""
    one_row = layer.height == layer.kernel[0] == 1
    largest = [max(s, d) - 1 for s, d in zip(layer.stride, layer.dilation, strict=True)]
    for pixels, elements, odd in itertools.product((1, 64, 4096, 65536, None), (1 << 26, 1 << 30), (0, 1)):
        columns = layer.out_channels * math.prod(layer.stride) + layer.in_channels
        area = pixels or elements // columns
        side = 1 if one_row else math.isqrt(area)
        size = layer._replace(height=side, width=max(1, area // side - odd), output_padding=(largest[0], 0))
        size = size._replace(batch=max(1, elements // (columns * area)))
        if min(size.out_height, size.out_width) > 0 and (pixels or elements == 1 << 26):
            yield size


def is_read_once(geometry: Geometry, axis: int) -> bool:
    """Returns whether the taps whose offset is within a stride read every row or column of grad_output once."""
    g = geometry
    side, read = (g.height, g.width)[axis], [0] * (g.out_height, g.out_width)[axis]
    offsets = (k * g.dilation[axis] - g.padding[axis] for k in range(g.kernel[axis]))
    for offset in {one for one in offsets if 0 <= one < g.stride[axis]}:
        for at in range(offset, min(len(read), side * g.stride[axis]), g.stride[axis]):
            read[at] += 1
    return set(read) == {1}


def multiplying(part: Part) -> Kernel:
    """Returns the kernel of a part that multiplies, not those that copy or add up."""
    (found,) = (
        one.kernel
        for one in part.launches
        if one.kernel.entry.startswith("grad_weight") and "reduce" not in one.kernel.entry
    )
    return found


def without_bias(kernel: Kernel) -> Kernel:
    """Returns a kernel whether or not it adds up the bias: the launch that copies grad_output for im2col_nchw does that
    where there is one."""
    constants = tuple((name, value) for name, value in kernel.constants if name != "WITH_BIAS")
    return kernel._replace(constants=constants, spills=False)


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, H200) for name in SAMPLE), *sampled(((name, AMPERE) for name in SAMPLE[::2]), 2)],
    ids=lambda one: one if isinstance(one, str) else one.architecture,
)
def test_a_layer_has_at_most_four_kernels_and_one_for_every_size(name: str, device: plan.Device) -> None:
    """Of all families together, with those of maps of one pixel and those that read copies; those that a size may take,
    not only its best."""
    rng = random.Random(name)
    sizes = [*extremes(BY_NAME[name]), *(any_size(rng, BY_NAME[name]) for _ in range(12))]
    for mode, channels_last in itertools.product(MODES, (False, True)):
        taken: dict[bool, set[Kernel]] = {False: set(), True: set()}
        adding: dict[tuple[str, bool], set[Kernel]] = {}
        layers = {layer_of(posed(size, mode, channels_last)) for size in sizes}
        for layer in layers:
            assert count(kernels_of(layer, device)) <= limit_of(layer, device) <= schedules.MAX_SCHEDULES
        for geometry in sizes:
            problem = posed(geometry, mode, channels_last)
            ranked = grad_weight_implicit_gemm.ranked(problem, device, False)
            assert ranked or not grad_weight_candidates.supports(problem, device), problem
            copies = grad_weight_implicit_gemm.ranked_from_copies(problem, device)
            with_bias = grad_weight_implicit_gemm.ranked(problem, device, True)
            for bias, of_it in ((False, (*ranked, *copies)), (True, with_bias)):
                for part in (one.make() for one in of_it):
                    kernel = multiplying(part)
                    taken[bias].add(without_bias(kernel))
                    if dict(kernel.constants).get("WITH_BIAS"):
                        assert is_read_once(geometry, 0), part.why
                        assert is_read_once(geometry, 1) or part.family == "im2col_nchw", part.why
                    for one in part.launches:
                        if "reduce" in one.kernel.entry:
                            adding.setdefault((one.kernel.entry, bias), set()).add(one.kernel)
        assert (
            0
            < len(taken[False])
            <= sum(limit_of(layer, device) for layer in layers)
            <= schedules.MAX_SCHEDULES
        )
        assert len(taken[True]) <= len(taken[False])
        assert all(len(kernels) <= schedules.MAX_SCHEDULES for kernels in adding.values()), adding


def test_maps_of_one_pixel_have_the_fourth_kernel_where_they_are_apart() -> None:
    for name, of_maps, of_pixels in (
        ("kb65", 3, 1),
        ("dcgan1", 2, 1),  # gradients/gemm.py has one as well
        ("dcgan2", 4, None),
        ("unet4", 4, None),
    ):
        problem = problem_of(name, TF32, True)
        pixel = problem._replace(geometry=problem.geometry._replace(height=1, width=1))
        large = problem._replace(geometry=problem.geometry._replace(height=64, width=64))
        assert limit_of(layer_of(large), H200) == of_maps
        assert (layer_of(pixel) == layer_of(large)) == (of_pixels is None)
        assert of_pixels in (None, limit_of(layer_of(pixel), H200))


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_narrow_tiles_that_add_up_the_bias_count_more(
    channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rgb = Geometry(16, 64, 64, 64, 3, (4, 4), (2, 2), (1, 1))
    layer = layer_of(posed(rgb, FP16, channels_last))

    def adding() -> int:
        tiles = selected(layer).narrow_mma
        return sum(grad_weight_narrow_mma.supports_tile(layer, tile, True) for tile in tiles)

    found = adding()
    monkeypatch.setattr(grad_weight_selection, "BIAS_SHARE", 0.0)
    assert adding() < found


def test_kernels_that_compute_both_gradients_leave_fewer() -> None:
    rgb = Geometry(16, 128, 128, 128, 3, (4, 4), (2, 2), (1, 1))
    for geometry, mode, others in (
        (BY_NAME["fcn32s"], TF32, 0),
        (BY_NAME["fcn32s"], FP16, 1),
        (rgb, TF32, 1),
    ):
        layer = layer_of(posed(geometry, mode))
        assert joint_kernels(layer, H200) == others
        assert limit_of(layer, H200) == schedules.MAX_SCHEDULES - others
        assert 1 <= count(kernels_of(layer, H200)) <= schedules.MAX_SCHEDULES - others


# ---- how near to the best ---------------------------------------------------------------------------------------


def best_of_families(kernels: Kernels, problem: plan.Problem) -> dict[str, float]:
    """Returns the expected clocks of a size with the best of these kernels of each family that computes it."""
    legal = [one for one in kernels.implicit_gemm if one.legal(problem.geometry)]
    suitable = [one for one in legal if one.suits(problem.geometry)] or legal
    supported = grad_weight_candidates.supports(problem, H200)
    ranked = {
        "im2col_nchw": grad_weight_im2col_nchw.ranked(kernels.im2col_nchw, problem, H200, False),
        "im2col_nhwc": grad_weight_im2col_nhwc.ranked(kernels.im2col_nhwc, problem, H200, False),
        "stride1": grad_weight_stride1.ranked(kernels.stride1, problem, H200),
        "implicit_gemm_tma": grad_weight_tma.ranked(kernels.implicit_gemm_tma, problem, H200, False),
        COPIES: grad_weight_nchw_to_nhwc.ranked(kernels.implicit_gemm_tma, problem, H200),
    }
    found = {family: of_it[0].clocks for family, of_it in ranked.items() if of_it}
    if suitable and supported:
        found["implicit_gemm"] = min(one.clocks(problem.geometry, H200) for one in suitable)
    return found


def best_clocks(kernels: Kernels, problem: plan.Problem) -> float:
    return min(best_of_families(kernels, problem).values(), default=math.inf)


#: How many times as long random sizes may be expected to take as with the best of all kernels, by their geometric mean,
#: in each mode in NCHW and in channels_last (found: 1.21, 1.00, 1.09, 1.09, 1.27, 1.24).
BOUNDS = (1.28, 1.06, 1.15, 1.15, 1.34, 1.3)


@pytest.mark.parametrize(
    ("mode", "channels_last", "bound"),
    sampled(
        ((mode, last, BOUNDS[2 * i + last]) for i, mode in enumerate(MODES) for last in (False, True)), 3
    ),
    ids=str,
)
def test_sizes_are_near_the_best_of_all_kernels(mode: Mode, channels_last: bool, bound: float) -> None:
    rng, regrets = random.Random(1), []
    for name in ("dcgan2", "cyclegan2", "unet4", "stylegan2_mod", "hifigan_up1", "kb65"):
        kernels = kernels_of(layer_of(problem_of(name, mode, channels_last)), H200)
        for _ in range(8):
            problem = posed(random_sizes(rng, BY_NAME[name]), mode, channels_last)
            if problem.geometry.height * problem.geometry.width > 1:
                clocks = best_clocks(kernels, problem)
                assert clocks == grad_weight_implicit_gemm.expected_clocks(problem, H200)
                regrets.append(max(1.0, clocks / best_clocks(kernels_for(problem, H200), problem)))
    assert len(regrets) > 40
    assert statistics.geometric_mean(regrets) < bound


def test_the_weights_of_sizes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(problem_of("unet4", TF32))
    sizes = representatives(layer)

    def regret(kernels: Kernels) -> float:
        clocks = [best_clocks(kernels, layer._replace(geometry=size.geometry)) for size in sizes]
        return sum(size.weight * math.log(of_size) for size, of_size in zip(sizes, clocks, strict=True))

    weighted = selected(layer)
    unweighted = [size._replace(weight=1.0) for size in sizes]
    monkeypatch.setattr(grad_weight_selection, "representatives", lambda _: unweighted)
    assert regret(weighted) < regret(selected(layer))


# ---- copies in channels_last of NCHW tensors --------------------------------------------------------------------


def clocks_as_they_lie(problem: plan.Problem, with_bias: bool) -> float:
    """Returns the expected clocks of kernels that read the tensors as they lie, with the bias or with launches of its
    own."""
    alone = [one.clocks for one in grad_weight_implicit_gemm.ranked(problem, H200, False)]
    if not with_bias:
        return min(alone)
    together = [one.clocks for one in grad_weight_implicit_gemm.ranked(problem, H200, True)]
    return min([min(alone) + grad_weight_bias_clocks.clocks(problem), *together])


def test_copies_are_taken_exactly_where_they_are_expected_to_be_faster() -> None:
    """Alone and with the gradient of the input, which then reads the same copy of grad_output."""
    rng, taken = random.Random(2), []
    for name, _ in itertools.product(("cyclegan1", "unet4", "sam_up1"), range(10)):
        problem = posed(random_sizes(rng, BY_NAME[name]))
        copies = [one.clocks for one in grad_weight_implicit_gemm.ranked_from_copies(problem, H200)]
        direct = [one.clocks for one in grad_input_implicit_gemm.ranked(problem, H200)]
        from_copies = [one.clocks for one in grad_input_implicit_gemm.ranked_from_copies(problem, H200)]
        for mask in ((False, True, False), (False, True, True), (True, True, False), (True, True, True)):
            lie, copied = clocks_as_they_lie(problem, mask[2]), min(copies, default=math.inf)
            if mask[0]:
                lie, copied = lie + min(direct), copied + min(direct + from_copies)
            made = plan.plan_backward(problem, mask, H200)
            assert made.family.startswith("nchw_to_nhwc") == (copied < lie), (problem, mask)
            taken.append(copied < lie)
    assert 10 < sum(taken) < len(taken) - 10


def test_what_the_gradient_of_the_input_gains_counts_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may read the copy of grad_output that the gradient of the weight needs."""
    problem = posed(BY_NAME["unet1"]._replace(batch=4, height=31, width=31))
    (made, *_), (lie, *_) = (
        ranked(problem, H200)
        for ranked in (
            grad_weight_implicit_gemm.ranked_from_copies,
            partial(grad_weight_implicit_gemm.ranked, with_bias=False),
        )
    )
    direct = grad_input_implicit_gemm.ranked(problem, H200)[0].clocks
    gain = direct - grad_input_implicit_gemm.ranked_from_copies(problem, H200)[0].clocks
    assert gain > 0
    for share, alone, both in ((-0.1, True, True), (0.9, False, True), (1.1, False, False)):
        slower = [made._replace(clocks=lie.clocks + share * gain)]
        monkeypatch.setattr(grad_weight_implicit_gemm, "ranked_from_copies", lambda *_, slower=slower: slower)
        for mask, wanted in (((False, True, False), alone), ((True, True, False), both)):
            found = gradients_nchw_to_nhwc.plan_backward(problem, mask, H200)
            assert (found is not None) == wanted, (share, mask)


def test_layers_that_gain_from_copies_have_kernels_that_read_them() -> None:
    for mode, name, device, reads in (
        (FP16, "cyclegan1", H200, True),
        (FP16, "dcgan3", H200, True),
        (FP16, "higherhrnet", H200, False),  # few output channels
        (TF32, "cyclegan1", H200, False),
        (FP16, "cyclegan1", AMPERE, False),
    ):
        assert bool(kernels_of(layer_of(problem_of(name, mode)), device).implicit_gemm_tma) == reads


def test_a_part_of_the_copy_of_grad_output_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it free, more kernels would read copies; if all of it counted, fewer would."""

    def kernels_that_read_copies() -> int:
        layers = (layer_of(problem_of(name)) for name in ("maskrcnn", "unet4", "kb81"))
        return sum(len(selected(layer).implicit_gemm_tma) for layer in layers)

    found = kernels_that_read_copies()
    monkeypatch.setattr(grad_weight_selection, "COPY_SHARE", 0.0)
    assert kernels_that_read_copies() > found
    monkeypatch.setattr(grad_weight_selection, "COPY_SHARE", 1.0)
    assert kernels_that_read_copies() < found


# ---- the bias, and what tune measures ---------------------------------------------------------------------------


def test_the_bias_has_launches_of_its_own_where_that_is_expected_to_be_faster() -> None:
    rng, apart = random.Random(4), []
    for name, mode in itertools.product(("kb69", "kb81", "stylegan2_mod", "dcgan2"), (TF32, FP16)):
        for _ in range(6):
            problem = posed(random_sizes(rng, BY_NAME[name]), mode)
            together = grad_weight_implicit_gemm.ranked(problem, H200, True)
            alone = clocks_as_they_lie(problem, False)
            own = alone + grad_weight_bias_clocks.clocks(problem)
            part = grad_weight_implicit_gemm.plan_grad_weight(problem, H200, True)
            wanted = together[0].make() if together and together[0].clocks <= own else None
            assert part == wanted, problem
            if together:
                apart.append(part is None)
    assert 3 < sum(apart) < len(apart) - 3


@pytest.mark.parametrize(
    ("name", "mode", "channels_last"),
    [
        *(("cyclegan2", mode, last) for mode in MODES for last in (False, True)),
        *(("kb65", mode, last) for mode in (TF32, FP16) for last in (False, True)),
    ],
    ids=str,
)
def test_tune_measures_every_family_that_computes_a_size(name: str, mode: Mode, channels_last: bool) -> None:
    """The plan that would be taken without it first."""
    problem = problem_of(name, mode, channels_last)
    families = set(best_of_families(kernels_for(problem, H200), problem))
    families |= set(best_of_families(kernels_of(layer_of(problem), H200), problem))
    mask = (False, True, False)
    found = plan.backward_candidates(problem, mask, H200, 12)
    assert found[0] == plan.plan_backward(problem, mask, H200)
    assert len(set(found)) == len(found) > 3
    assert {one.family for one in found} >= families
    assert len(families) >= (1 if mode == IEEE else 2)

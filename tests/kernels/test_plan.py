"""Plans as data: the choice of family, sizes past 32 bits and past 65535 blocks, bounded workspace. No GPU."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest
import torch
from sampling import sampled

from tconv_swap.geometry import Geometry, phase_taps
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import general
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.runtime import jit
from tconv_swap.runtime.program import ArgumentKind, Plan

H200 = plan.Device("sm_90a", 132, 227 << 10)
AMPERE = plan.Device("sm_80", 108, 163 << 10)
TURING = plan.Device("sm_75", 30, 64 << 10)

DCGAN = Geometry(128, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))
DEPTHWISE = Geometry(2, 21, 64, 64, 21, (16, 16), (8, 8), (4, 4), groups=21)
RGB = Geometry(128, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1))
KB75 = Geometry(16, 32, 128, 256, 64, (3, 5), (2, 3), (1, 2), (0, 0), (2, 1), 4)
#: Of more phases than a tile of tensor cores computes.
WIDE_STRIDE = Geometry(3, 32, 9, 8, 32, (32, 32), (16, 16), (8, 8))
HUGE = Geometry(8, 64, 8192, 8192, 64, (3, 3))


def forward(
    geometry: Geometry,
    dtype: torch.dtype = torch.float32,
    device: plan.Device = H200,
    precision: str = "tf32",
    channels_last: bool = False,
) -> Plan:
    problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
    return plan.plan_forward(problem, True, device)


def general_problem(geometry: Geometry) -> plan.Problem:
    return plan.Problem(geometry, torch.float32, "ieee", False, False)


def constants(made: Plan) -> dict[str, object]:
    return dict(made.launches[-1].kernel.constants)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("geometry", "dtype", "device", "family"),
    [
        (DCGAN, torch.float32, H200, "implicit_gemm"),
        (DCGAN, torch.bfloat16, H200, "implicit_gemm"),
        (DCGAN, torch.float64, H200, "general"),
        (DCGAN, torch.float32, TURING, "general"),
        (DEPTHWISE, torch.float16, H200, "narrow_ffma"),
        (DEPTHWISE, torch.float32, TURING, "narrow_ffma"),
        (RGB, torch.float32, H200, "col2im"),
        (RGB, torch.float32, TURING, "narrow_ffma"),
        (WIDE_STRIDE, torch.float32, H200, "narrow_mma"),
        (WIDE_STRIDE, torch.float16, H200, "narrow_mma"),
        (WIDE_STRIDE._replace(in_channels=33), torch.float16, H200, "general"),
    ],
    ids=str,
)
def test_the_family_chosen(
    geometry: Geometry, dtype: torch.dtype, device: plan.Device, family: str, channels_last: bool
) -> None:
    made = forward(geometry, dtype, device, channels_last=channels_last)
    assert made.family == family
    assert made.why
    assert made.outputs[0].shape == geometry.output_shape
    assert made.outputs[0].channels_last == channels_last


#: Layers whose kernel is its stride, and whose kernel is twice its stride, in rows that are not aligned.
MASK_HEAD = Geometry(64, 128, 7, 7, 128, (2, 2), (2, 2))
POSE = Geometry(5, 512, 15, 20, 128, (4, 4), (2, 2), (1, 1))


@pytest.mark.parametrize(
    ("geometry", "dtype", "copied"),
    [
        (MASK_HEAD, torch.float32, False),
        (MASK_HEAD._replace(in_channels=512, out_channels=512), torch.float32, True),
        (MASK_HEAD._replace(in_channels=512, out_channels=512), torch.float16, True),
        (MASK_HEAD._replace(in_channels=32, kernel=(1, 2), stride=(1, 2)), torch.float32, False),
        (POSE._replace(out_channels=256), torch.float32, True),
        (POSE._replace(out_channels=256), torch.float16, True),
        (POSE._replace(in_channels=64, out_channels=64, kernel=(3, 3)), torch.float16, False),
    ],
    ids=str,
)
def test_where_the_forward_pass_of_nchw_reads_a_copy(
    geometry: Geometry, dtype: torch.dtype, copied: bool
) -> None:
    assert ("nchw_to_nhwc" in [one.kernel.entry for one in forward(geometry, dtype).launches]) == copied


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("geometry", "dtype", "device", "family"),
    [
        (DCGAN, torch.float32, H200, "implicit_gemm"),
        (DCGAN, torch.bfloat16, AMPERE, "implicit_gemm"),
        (DCGAN, torch.float64, H200, "general"),
        (DCGAN, torch.float32, TURING, "general"),
        (DCGAN.with_batch(0), torch.float32, H200, "general"),
        (KB75, torch.float16, H200, "implicit_gemm"),
    ],
    ids=str,
)
def test_the_family_chosen_for_the_weight(
    geometry: Geometry, dtype: torch.dtype, device: plan.Device, family: str, channels_last: bool
) -> None:
    problem = plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)
    assert plan.plan_backward(problem, (False, True, False), device).family == family


@pytest.mark.parametrize(
    ("geometry", "families"),
    [
        (DCGAN, "im2col_nchw"),  # the bias's gradient out of the same pass
        (KB75, "implicit_gemm, general"),  # rows of grad_output that no tap reads
    ],
    ids=str,
)
def test_the_bias_comes_with_the_weight_where_the_taps_read_all_of_grad_output(
    geometry: Geometry, families: str
) -> None:
    problem = plan.Problem(geometry, torch.float32, "tf32", False, False)
    assert plan.plan_backward(problem, (False, True, True), H200).family == families


STRIDE_1 = Geometry(8, 32, 64, 64, 48, (3, 5), padding=(1, 4), dilation=(2, 1), groups=2)
GROUPED = Geometry(16, 96, 64, 128, 128, (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=4)
LATENT = Geometry(128, 100, 1, 1, 512, (4, 4))
PATCHES = Geometry(8, 256, 37, 37, 256, (4, 4), (4, 4))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("geometry", "dtype", "device", "entry"),
    [
        (STRIDE_1, torch.float16, H200, "forward_implicit_gemm_mma"),
        (DCGAN, torch.float32, H200, "grad_input_im2col"),
        (DCGAN, torch.bfloat16, H200, "grad_input_im2col"),
        (PATCHES, torch.bfloat16, H200, "grad_input_implicit_gemm_wgmma"),
        (DCGAN, torch.bfloat16, AMPERE, "grad_input_implicit_gemm_mma"),
        (GROUPED, torch.float32, H200, "grad_input_implicit_gemm_mma"),
        (LATENT, torch.float16, AMPERE, "grad_input_implicit_gemm_mma"),
        (DCGAN, torch.float64, H200, "grad_input_general"),
        (STRIDE_1, torch.float32, TURING, "grad_input_general"),
        (DCGAN.with_batch(0), torch.float32, H200, None),
    ],
    ids=str,
)
def test_the_kernel_chosen_for_grad_input(
    geometry: Geometry, dtype: torch.dtype, device: plan.Device, entry: str | None, channels_last: bool
) -> None:
    problem = plan.Problem(geometry, dtype, "tf32", channels_last, channels_last)
    made = plan.plan_backward(problem, (True, False, False), device)
    if channels_last and entry in ("grad_input_im2col", "grad_input_implicit_gemm_wgmma"):
        entry = "grad_input_implicit_gemm_tma"
    families = {"grad_input_implicit_gemm_tma": "implicit_gemm_tma", "grad_input_im2col": "im2col"}
    general = entry in (None, "grad_input_general")
    assert made.family == families.get(str(entry), "general" if general else "implicit_gemm")
    assert made.why
    assert [output.shape for output in made.outputs] == [geometry.input_shape]
    entries = [one.kernel.entry for one in made.launches]
    assert (entry in entries) if entry else entries == []
    read = {a.value for one in made.launches for a in one.operands if a.kind == ArgumentKind.INPUT}
    assert read == ({0, 2} if entry else set())  # never the input itself


def test_offsets_within_a_tile_of_grad_input_fit_32_bits() -> None:
    """Images of 16 MiB with one position each: a tile may have only few of them."""
    geometry = Geometry(4096, 96, 1, 1, 65536, (8, 8))
    problem = plan.Problem(geometry, torch.float32, "tf32", False, False)
    made = grad_input_implicit_gemm.plan_grad_input(problem, H200)
    assert made is not None
    names = dict(made.launches[1].kernel.constants)
    assert names["FLAT"]
    image_bytes = 4 * math.prod(geometry.output_shape[1:])
    assert (int(names["TILE_W"]) + 1) * image_bytes < 2**31


def test_ieee_float32_gradients_of_the_input_are_not_computed_by_tf32_alone() -> None:
    problem = plan.Problem(DCGAN, torch.float32, "ieee", False, False)
    made = plan.plan_backward(problem, (True, False, False), H200)
    assert [one.kernel.entry for one in made.launches] == [
        "forward_implicit_gemm_pack",
        "grad_input_implicit_gemm_wgmma",
    ]
    assert all(dict(one.kernel.constants)["PRECISION"] == 3 for one in made.launches)


def test_offsets_past_32_bits_are_counted_in_64() -> None:
    def index(geometry: Geometry) -> object:
        made = general.plan_forward(general_problem(geometry), True)
        return constants(made)["Index"]

    assert index(HUGE.with_batch(1)) == "long long"
    assert index(Geometry(1, 2, 1024, 1024, 2, (2, 2), (2, 2))) == "int"
    # The last positions of a tile may lie beyond the last one of the map.
    most = 2**31 - 1 - general.MAX_TILE_PIXELS
    assert max(made.m for made in map(general._tile, (1, 8, 64))) <= general.MAX_TILE_PIXELS
    just_below = Geometry(1, 1, 1, most - 1, 1, (1, 2))
    assert math.prod(just_below.output_shape) == most
    assert index(just_below) == "int"
    assert index(Geometry(1, 1, 1, most, 1, (1, 2))) == "long long"


def test_the_general_kernels_alone_compute_no_gradient_with_expected_clocks(exhaustive: bool) -> None:
    """The choice between our kernels and PyTorch's operator asks for the clocks and makes no plan where they exist."""
    rng, counted = random.Random(5), {True: 0, False: 0}
    for _ in range(24 if exhaustive else 14):
        into, out = rng.choice((1, 3, 16, 40, 130)), rng.choice((1, 2, 7, 32, 65))
        kernel, stride = rng.choice((1, 3, 4, 9, 20)), rng.choice((1, 2, 3, 16))
        batch, columns = rng.choice((1, 6)), rng.choice((1, 12))
        geometry = Geometry(batch, into, 9, columns, out, (kernel, kernel), (stride, stride))
        dtype = rng.choice((torch.float64, torch.float32, torch.float16))
        channels_last = rng.choice((False, True))
        problem = plan.Problem(geometry, dtype, "tf32", channels_last, channels_last)
        for mask in ((True, False, False), (False, True, False)):
            is_counted = plan.expected_clocks(problem, mask, H200) < math.inf
            counted[is_counted] += 1
            assert not (is_counted and plan.plan_backward(problem, mask, H200).family == "general")
    assert min(counted.values()) > 5


@pytest.mark.parametrize("device", [H200, TURING], ids=["H200", "Turing"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_grids_pass_65535_blocks_in_their_only_dimension(dtype: torch.dtype, device: plan.Device) -> None:
    """A launch has one grid dimension, which may have 2^31 - 1 blocks."""
    # Without dilation, stride1 would compute such a large image with a few blocks.
    made = forward(HUGE._replace(dilation=(2, 2)), dtype, device)
    assert max(launch.grid for launch in made.launches) > 65535
    assert all(launch.grid < 2**31 for launch in made.launches)


def test_a_new_batch_size_needs_no_new_kernel_in_the_general_family() -> None:
    kernels = {
        launch.kernel
        for batch in (1, 3, 64)
        for problem in (general_problem(DCGAN.with_batch(batch)),)
        for made in (
            general.plan_forward(problem, True),
            general.plan_grad_input(problem),
            general.plan_grad_weight(problem, H200),
            general.plan_grad_bias(problem, H200),
        )
        for launch in made.launches
    }
    # forward, grad_input, grad_weight, grad_bias, split_k_reduce of many results and of few
    assert len(kernels) == 6


@pytest.mark.parametrize(
    "mask", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_a_backward_plan_computes_what_is_asked_for_and_no_more(mask: tuple[bool, ...]) -> None:
    problem = plan.Problem(DCGAN, torch.float32, "ieee", False, False)
    made = plan.plan_backward(problem, mask, H200)
    shapes = (DCGAN.input_shape, DCGAN.weight_shape, (DCGAN.out_channels,))
    assert [output.shape for output in made.outputs] == [
        s for s, wanted in zip(shapes, mask, strict=True) if wanted
    ]
    written = {a.value for one in made.launches for a in one.arguments if a.kind == ArgumentKind.OUTPUT}
    assert written == set(range(sum(mask)))
    assert made.workspace_bytes > 0 or not (mask[1] or mask[2])


@pytest.mark.parametrize(
    "geometry", [DCGAN, DEPTHWISE, RGB, HUGE, Geometry(256, 2048, 8, 6, 2048, (4, 4), (2, 2))]
)
def test_the_workspace_of_the_backward_pass_is_bounded(geometry: Geometry) -> None:
    made = plan.plan_backward(general_problem(geometry), (True,) * 3, H200)
    # A gradient of the weight has at least one copy; the tensor cores read a float32 weight (IEEE) as two parts.
    two_copies = 8 * max(math.prod(geometry.weight_shape), geometry.out_channels)
    assert made.workspace_bytes <= general.WORKSPACE_LIMIT_BYTES + two_copies
    for launch in made.launches:
        for argument in launch.arguments:
            if argument.kind == ArgumentKind.WORKSPACE:
                assert argument.value % 256 == 0
                assert argument.value < made.workspace_bytes


def test_an_empty_batch_launches_nothing_forward_and_writes_zero_weight_gradients() -> None:
    empty = DCGAN.with_batch(0)
    assert not general.plan_forward(general_problem(empty), True).launches
    assert forward(empty).launches == ()
    backward = plan.plan_backward(general_problem(empty), (True,) * 3, H200)
    entries = [launch.kernel.entry for launch in backward.launches]
    assert "grad_input_general" not in entries
    assert entries.count("split_k_reduce") == 2


def test_phases_share_out_the_taps() -> None:
    for kernel, stride, dilation in ((4, 2, 1), (3, 5, 2), (5, 3, 1), (16, 8, 1), (3, 2, 2), (1, 3, 1)):
        taps = [phase_taps(kernel, stride, dilation, phase) for phase in range(stride)]
        assert sorted(itertools.chain(*taps)) == list(range(kernel))
    assert [len(phase_taps(3, 5, 2, phase)) for phase in range(5)] == [1, 0, 1, 0, 1]


@pytest.mark.parametrize("seed", sampled(range(8), 3))
def test_any_stride_and_kernel_is_planned(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(8):
        strides = [chance.choice((1, 2, 3, 5, 8, 9, 10, 16, 32)) for _ in range(2)]
        kernel = (chance.randint(1, 34), chance.randint(1, 34))
        groups = chance.choice((1, 1, 2))
        geometry = Geometry(
            chance.choice((1, 40)),
            groups * chance.choice((3, 16, 64)),
            chance.choice((1, 17, 40)),
            chance.choice((1, 16, 130)),
            groups * chance.choice((1, 21, 64)),
            kernel,
            (strides[0], strides[1]),
            (kernel[0] // 3, kernel[1] // 3),
            groups=groups,
        )
        dtype, precision = chance.choice(((torch.float16, "ieee"), (torch.float32, "tf32")))
        last = chance.random() < 0.5
        device = chance.choice((H200, AMPERE, TURING))
        problem = plan.Problem(geometry, dtype, precision, last, last)
        assert plan.plan_forward(problem, True, device).launches
        assert plan.plan_backward(problem, (True, True, True), device).launches


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(4, 512, 1, 512, 256, (1, 16), (1, 8), (0, 4)),
        Geometry(16, 32, 64, 128, 64, (3, 3), (5, 5), (1, 1), dilation=(2, 2)),
    ],
    ids=["one row", "gaps"],
)
def test_three_products_in_nchw_take_tiles_that_hardly_spill(geometry: Geometry) -> None:
    """Fewer bytes than 64 registers have; tiles that are too large for a thread spill kilobytes."""
    problem = plan.Problem(geometry, torch.float32, "ieee", False, False)
    made = plan.plan_backward(problem, (True, False, False), H200)
    (kernel,) = (
        one.kernel for one in made.launches if one.kernel.entry.startswith("grad_input_implicit_gemm")
    )
    _, log = jit.compile_with_log(kernel, "sm_90a")
    spilled = [int(found) for found in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled
    assert max(spilled) <= 4 * 64


@pytest.mark.parametrize(
    ("geometry", "dtype", "channels_last"),
    [
        (Geometry(5, 64, 144, 214, 32, (2, 2), (2, 2)), torch.float16, True),
        (Geometry(5, 64, 144, 214, 32, (2, 2), (2, 2)), torch.float32, False),
        (Geometry(16, 98, 37, 95, 49, (3, 3), (2, 2), (1, 1)), torch.float16, False),
    ],
    ids=str,
)
def test_the_gradient_of_the_input_of_large_maps_has_no_partial_sums(
    geometry: Geometry, dtype: torch.dtype, channels_last: bool
) -> None:
    posed = plan.Problem(geometry, dtype, "tf32", channels_last, channels_last)
    made = plan.plan_backward(posed, (True, False, False), H200)
    assert "forward_implicit_gemm_split_k" not in [launch.kernel.entry for launch in made.launches]


def test_rows_that_the_copy_engine_cannot_load_have_a_kernel_for_aligned_ones() -> None:
    heads = Geometry(256, 256, 14, 14, 256, (2, 2), (2, 2))
    made = plan.plan_backward(
        plan.Problem(heads, torch.float16, "ieee", False, False), (True, False, False), H200
    )
    (multiplying,) = (one.kernel for one in made.launches if "OUT_ROW_MULTIPLE" in dict(one.kernel.constants))
    assert multiplying.entry == "grad_input_implicit_gemm_wgmma"
    assert dict(multiplying.constants)["ROW_MULTIPLE"] == 4


def test_groups_of_few_channels_take_the_family_that_is_expected_to_be_faster() -> None:
    groups = Geometry(8, 768, 32, 39, 64, (3, 3), (2, 2), (1, 1), groups=8)
    for geometry, dtype, precision, channels_last, family in (
        (groups, torch.float16, "ieee", False, "implicit_gemm"),
        (groups, torch.float16, "ieee", True, "implicit_gemm"),
        (groups, torch.float32, "tf32", False, "implicit_gemm"),
        (groups, torch.float32, "tf32", True, "implicit_gemm"),
        (KB75, torch.float16, "ieee", False, "implicit_gemm"),
        (KB75, torch.float16, "ieee", True, "implicit_gemm"),
        (KB75, torch.float32, "tf32", True, "narrow_mma"),
    ):
        posed = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
        assert plan.plan_backward(posed, (True, False, False), H200).family == family

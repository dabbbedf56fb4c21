"""The narrow gradients: what they take, their workspace, and how many kernels they have."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from harness import assert_kernel_matches
from sampling import sampled

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import general
from tconv_swap.kernels.grad_input import implicit_gemm_choice as grad_input_choice
from tconv_swap.kernels.grad_input import narrow_mma as grad_input_narrow_mma
from tconv_swap.kernels.grad_input.implicit_gemm_layout import as_convolution, as_problem
from tconv_swap.kernels.gradients import narrow_mma_cost
from tconv_swap.kernels.gradients.grad_output_tile import GradOutputTile, loads
from tconv_swap.runtime.program import Plan

H200 = plan.Device("sm_90a", 132, 227 << 10)
TURING = plan.Device("sm_75", 30, 64 << 10)
RGB = Geometry(128, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1))
MANY_TAPS = Geometry(2, 21, 16, 16, 21, (64, 64), (32, 32), (16, 16))
PAIRS = Geometry(2, 42, 64, 64, 21, (16, 16), (8, 8), (4, 4), groups=21)
SINGLE = ((True, False, False), (False, True, False))
GAPS = Geometry(2, 32, 9, 13, 3, (3, 3), (5, 5), (1, 1))  # output pixels that no tap reaches


def backward(
    geometry: Geometry,
    dtype: torch.dtype = torch.float32,
    device: plan.Device = H200,
    channels_last: bool = False,
    mask: tuple[bool, ...] = (True, True, True),
) -> Plan:
    return plan.plan_backward(
        plan.Problem(geometry, dtype, "ieee", channels_last, channels_last), mask, device
    )


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, *sampled([torch.float16, torch.bfloat16], 2)], ids=str)
@pytest.mark.parametrize("geometry", [PAIRS, RGB, MANY_TAPS, GAPS], ids=str)
def test_tensor_cores_compute_what_is_narrow(
    geometry: Geometry, dtype: torch.dtype, channels_last: bool
) -> None:
    for mask in SINGLE:
        made = backward(geometry, dtype, channels_last=channels_last, mask=mask)
        # In channels_last many taps fill larger tiles; im2col is not for float32.
        larger = ""
        if geometry == MANY_TAPS and mask[1] and channels_last:
            larger = "implicit_gemm"
        elif (
            mask[0]
            and dtype != torch.float32
            and (geometry == RGB or (geometry == PAIRS and not channels_last))
        ):
            larger = "im2col"
        assert made.family == (larger or "narrow_mma")
        assert made.workspace_bytes <= general.WORKSPACE_LIMIT_BYTES
        assert all(one.grid < 2**31 and one.shared_bytes <= 227 << 10 for one in made.launches)
    assert backward(geometry, torch.float64).family == "general"
    assert backward(geometry, torch.float32, TURING).family == "general"


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("geometry", [PAIRS, RGB, MANY_TAPS, GAPS], ids=str)
def test_what_pytorch_computes_in_float32_is_computed_so_where_tf32_is_allowed(
    geometry: Geometry, channels_last: bool
) -> None:
    for mask in SINGLE:
        allowed = plan.Problem(geometry, torch.float32, "tf32", channels_last, channels_last)
        exact = backward(geometry, channels_last=channels_last, mask=mask)
        assert plan.plan_backward(allowed, mask, H200).launches == exact.launches


def test_larger_tiles_compute_groups_where_they_are_expected_to_be_faster() -> None:
    """At stride 1 those of the forward pass do, and a layer has the kernels of one family, whatever its sizes."""
    eights = Geometry(8, 64, 32, 32, 64, (3, 3), (1, 1), (1, 1), groups=8)
    narrower = Geometry(8, 64, 32, 32, 32, (3, 3), (1, 1), (1, 1), groups=8)
    strided = eights._replace(stride=(2, 2))
    for layer, dtype, channels_last, family in (
        (eights, torch.float16, True, "implicit_gemm"),
        (narrower, torch.float32, False, "narrow_mma"),
        (strided, torch.float16, True, "implicit_gemm"),
    ):
        for batch in (1, 8, 64):
            posed = plan.Problem(layer.with_batch(batch), dtype, "tf32", channels_last, channels_last)
            assert plan.plan_backward(posed, SINGLE[0], H200).family == family


def test_the_convolution_of_a_problem_is_that_problem() -> None:
    for geometry in (RGB, PAIRS, GAPS, RGB._replace(output_padding=(1, 0)), GAPS._replace(dilation=(2, 3))):
        for dtype, precision in ((torch.float32, "tf32"), (torch.float32, "ieee"), (torch.float16, "ieee")):
            for layouts in ((False, True), (True, False)):
                posed = plan.Problem(geometry, dtype, precision, *layouts)
                assert as_problem(as_convolution(posed)) == posed


def test_the_gradient_of_the_bias_comes_with_the_weights_where_the_tiles_hold_all_of_the_output() -> None:
    entries = [one.kernel.entry for one in backward(RGB, mask=(False, True, True)).launches]
    assert entries.count("grad_weight_narrow_mma") == 1
    assert "grad_bias_general" not in entries
    assert "grad_bias_general" in [one.kernel.entry for one in backward(GAPS).launches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(64, 64, 1024, 1024, 32, (3, 3), groups=32),
        Geometry(4, 2048, 64, 2048, 8, (16, 16), (8, 8), (4, 4)),
        Geometry(1, 8192, 8, 8, 8, (16, 16), (8, 8)),
        Geometry(2, 8, 9, 3000, 8, (1, 1)),
    ],
    ids=str,
)
def test_the_workspace_of_the_narrow_gradients_is_bounded(geometry: Geometry, dtype: torch.dtype) -> None:
    for channels_last in (False, True):
        made = backward(geometry, dtype, channels_last=channels_last)
        one_copy = 4 * math.prod(geometry.weight_shape)
        assert made.workspace_bytes <= general.WORKSPACE_LIMIT_BYTES + one_copy
        if geometry.batch == 64:
            # No sum is so long that its rounding errors matter: pixels of a block, by steps of 16 and by warps.
            weight = next(one for one in made.launches if one.kernel.entry == "grad_weight_narrow_mma")
            c = dict(weight.kernel.constants)
            units = c["TILE_H"] * c["TILE_W"] // 16 // c["WARPS_K"]
            repeat = weight.structs[0][6]
            assert units * repeat <= (256 if dtype == torch.float32 else 2048)


def test_narrow_gradients_have_few_kernels_for_all_batch_sizes() -> None:
    for mask in ((True, False, False), (False, True, True)):
        plans = [backward(RGB.with_batch(batch), mask=mask) for batch in range(1, 70)]
        kernels = {one.kernel for made in plans for one in made.launches if "narrow_mma" in one.kernel.entry}
        assert 1 <= len(kernels) <= 3


#: More taps than the implicit GEMM of the gradient of the input computes, fewer than that of the weight does.
SEVERAL_TAPS = [
    Geometry(2, 32, 9, 14, 32, (10, 10), (4, 4), (3, 3)),
    Geometry(3, 48, 7, 11, 17, (9, 9), (3, 3), (4, 4), (2, 2)),
    Geometry(2, 64, 6, 10, 33, (12, 7), (4, 2), (4, 2)),
    Geometry(1, 24, 12, 9, 64, (8, 9), (1, 3), (0, 4)),
]


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("geometry", SEVERAL_TAPS, ids=str)
def test_in_float32_no_number_of_taps_is_left_to_the_general_kernel(
    geometry: Geometry, channels_last: bool
) -> None:
    assert grad_input_narrow_mma.MANY_TAPS == grad_input_choice.MAX_TAPS + 1
    assert grad_input_choice.MAX_TAPS < geometry.taps < grad_input_narrow_mma.MOST_TAPS
    made = backward(geometry, torch.float32, channels_last=channels_last, mask=(True, False, False))
    assert made.family == "narrow_mma"


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("geometry", SEVERAL_TAPS, ids=str)
def test_several_taps_against_float64(geometry: Geometry, precision: str, channels_last: bool) -> None:
    torch.manual_seed(0)
    problem = plan.Problem(geometry, torch.float32, precision, channels_last, channels_last)
    layouts, mask = (channels_last, channels_last), (True, False, False)
    tiles = grad_input_narrow_mma.candidates([problem], H200)
    assert tiles
    for one in grad_input_narrow_mma.ranked(tiles, problem, H200)[:4]:
        assert_kernel_matches(
            one.make(), geometry, torch.float32, layouts, 1e-5 if precision == "ieee" else 1e-3, mask
        )


#: Few output channels behind numbers of input channels that a lane's stores divide, and that they do not.
HEADS = [Geometry(2, channels, 9, 13, 2, (3, 3), (2, 2), (1, 1)) for channels in (12, 24, 44, 48, 64, 65)]


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("geometry", HEADS, ids=str)
def test_every_share_of_the_channels_against_float64(
    geometry: Geometry, dtype: torch.dtype, channels_last: bool
) -> None:
    torch.manual_seed(0)
    problem = plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)
    shares: dict[tuple[int, int, int], grad_input_narrow_mma.GradInputTile] = {}
    for tile in grad_input_narrow_mma.grad_input_tiles(problem, H200):
        if grad_input_narrow_mma.supports_tile(problem, tile):
            shares.setdefault((tile.m_tiles, tile.warps_m, tile.store), tile)
    assert len(shares) >= 2
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for tile in shares.values():
        part = grad_input_narrow_mma.lower(problem, tile, H200)
        layouts, mask = (channels_last, channels_last), (True, False, False)
        assert_kernel_matches(part, geometry, dtype, layouts, tolerance, mask)


def test_stores_touch_sectors_together_where_lanes_store_neighbours() -> None:
    def sectors(channels: int, dtype: torch.dtype, channels_last: bool, width: int, **of_tile: int) -> float:
        geometry = Geometry(1, channels, 1, width, 2, (3, 3), (2, 2), (1, 1))
        problem = plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)
        tile = next(
            one
            for one in grad_input_narrow_mma.grad_input_tiles(problem, H200)
            if all(getattr(one, name) == value for name, value in of_tile.items()) and one.splits == 1
        )
        filled = channels * width * dtype.itemsize / 32
        return grad_input_narrow_mma.further_sectors(problem, tile) + filled

    # Two m tiles are four channels of a lane: one store of 16 bytes, and 64 channels are eight sectors of a pixel.
    assert sectors(64, torch.float32, True, 16, m_tiles=2) == 16 * 8
    # Four m tiles are eight channels, which no store takes: eight lanes store eight neighbours.
    assert sectors(64, torch.float32, True, 16, m_tiles=4) == 16 * 8
    assert sectors(64, torch.float16, True, 16, m_tiles=4) == 16 * 4
    # Half a sector of each channel in 16 bits, whole ones with two pairs of pixels.
    assert sectors(64, torch.float16, False, 16, store=1) == 64 * 2
    assert sectors(64, torch.float16, False, 16, store=2) == 64
    # Rows of an odd number of columns are stored one element at a time, and begin anywhere in a sector.
    assert sectors(64, torch.float32, False, 15, store=1) == 64 * 15 / 8 * 2 * (32 + 28) / 32


#: A head, a layer of many taps whose weights in channels_last lie far apart, and groups, in 16 bits and float32.
PRICED = (HEADS[2], SEVERAL_TAPS[0], PAIRS._replace(batch=1))


def expected_of_all() -> list[float]:
    """Returns the expected clocks of every tile of these layers."""
    found = []
    for geometry, dtype, channels_last in itertools.product(
        PRICED, (torch.float32, torch.float16), (False, True)
    ):
        problem = plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)
        tiles = grad_input_narrow_mma.grad_input_tiles(problem, H200)
        found += [grad_input_narrow_mma.expected_clocks(problem, tile, H200) for tile in tiles]
    return found


def test_every_price_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    base, prices = expected_of_all(), grad_input_narrow_mma.GRAD_INPUT
    counted = {name for name, price in prices._asdict().items() if any(price)}
    assert {"sector", "wait", "weight"} < counted
    for name in counted:
        alone, waiting = getattr(prices, name)
        changed = prices._replace(**{name: (1.5 * alone, 1.5 * waiting)})
        with monkeypatch.context() as patched:
            patched.setattr(grad_input_narrow_mma, "GRAD_INPUT", changed)
            assert expected_of_all() != base, name


def test_weights_whose_taps_lie_apart_take_longer() -> None:
    geometry = SEVERAL_TAPS[0]
    together, apart = (
        plan.Problem(geometry, torch.float32, "ieee", True, weight_channels_last)
        for weight_channels_last in (False, True)
    )
    for tile in grad_input_narrow_mma.grad_input_tiles(together, H200):
        clocks = [grad_input_narrow_mma.expected_clocks(one, tile, H200) for one in (together, apart)]
        # A chunk of all output channels of a tap has its weights together in channels_last, too.
        assert (clocks[1] > clocks[0]) == (tile.grad_output.chunk_co < 8)


def test_loads_that_are_issued_a_tile_ahead_are_not_waited_for() -> None:
    multiplies = narrow_mma_cost.Multiplies(8, 1, 2, 1.0, 0)
    for dtype, tile_h, loads_of_thread, batches in (
        (torch.float32, 8, 35, 0),  # cp.async
        (torch.float16, 4, 19, 0),  # 38 bytes, of the 64 that a thread keeps in registers
        (torch.float16, 8, 35, 5),  # 70 bytes, in batches of 8 loads
    ):
        problem = plan.Problem(HEADS[0], dtype, "ieee", False, False)
        tile = GradOutputTile(tile_h, 64, 1, 2, 3, 1, dtype == torch.float32, 128)
        assert loads(HEADS[0], tile, False) == loads_of_thread
        assert narrow_mma_cost.tile_work(problem, tile, multiplies).batches == batches


def expected_by(prices: narrow_mma_cost.Prices) -> float:
    """Returns the expected microseconds of a size all of whose amounts are above zero."""
    problem = plan.Problem(HEADS[0], torch.float16, "ieee", False, False)
    tile = GradOutputTile(8, 64, 1, 2, 3, 1, False, 128)
    of_chunk = narrow_mma_cost.tile_work(problem, tile, narrow_mma_cost.Multiplies(8, 1, 2, 1.0, 0))
    assert of_chunk.places
    of_tile = narrow_mma_cost.tile_price(of_chunk, prices, 3, inputs=5.0)
    return narrow_mma_cost.microseconds(
        *(problem, of_tile, prices, H200, 1000, 500, 2), weights=7.0, partial_bytes=11.0, sectors=13.0
    )


@pytest.mark.parametrize("name", narrow_mma_cost.Prices._fields)
def test_every_price_counts_once(name: str) -> None:
    """With prices of one, doubling one of them adds what it stands for; all of them together are the whole."""
    ones = narrow_mma_cost.Prices(*[(1.0, 1.0)] * len(narrow_mma_cost.Prices._fields))
    none = narrow_mma_cost.Prices(*[(0.0, 0.0)] * len(narrow_mma_cost.Prices._fields))
    whole = expected_by(ones)
    for price in ((2.0, 1.0), (1.0, 2.0)):
        assert expected_by(ones._replace(**{name: price})) > whole
    parts = [expected_by(none._replace(**{one: (1.0, 1.0)})) for one in ones._fields]
    assert sum(parts) == pytest.approx(whole)


def test_blocks_beside_each_other_hide_latency_but_no_work() -> None:
    none = narrow_mma_cost.Prices(*[(0.0, 0.0)] * len(narrow_mma_cost.Prices._fields))
    problem = plan.Problem(HEADS[0], torch.float16, "ieee", False, False)
    tile = GradOutputTile(8, 64, 1, 2, 3, 1, False, 128)
    of_chunk = narrow_mma_cost.tile_work(problem, tile, narrow_mma_cost.Multiplies(8, 1, 2, 1.0, 0))

    def expected(name: str, resident: int) -> float:
        prices = none._replace(**{name: (1.0, 0.0)})
        of_tile = narrow_mma_cost.tile_price(of_chunk, prices, 1)
        blocks = 2 * H200.multiprocessors
        return narrow_mma_cost.microseconds(problem, of_tile, prices, H200, 1000, blocks, resident)

    for name in ("wait", "step"):
        assert expected(name, 1) == pytest.approx(2 * expected(name, 2))
    for name in ("read", "multiply", "copy", "byte"):
        assert expected(name, 1) == pytest.approx(expected(name, 2))

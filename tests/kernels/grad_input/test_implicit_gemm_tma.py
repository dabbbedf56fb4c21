"""grad_input/implicit_gemm_tma: every kind of tile on random problems, and when the planner takes the family."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from grad_input_cases import defined_gradient, words_by_name
from harness import assert_kernel_matches
from im2col_mode import loaded

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_input import implicit_gemm_tma as grad_input_tma
from tconv_swap.kernels.grad_input import implicit_gemm_tma_choice as grad_input_tma_choice
from tconv_swap.kernels.grad_input import implicit_gemm_tma_shape as grad_input_tma_shape
from tconv_swap.kernels.grad_input import implicit_gemm_tma_tile as grad_input_tma_tile
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, as_convolution, of_any_size
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import TmaTile
from tconv_swap.runtime.program import Output, Part, Plan, input_, workspace

H200 = plan.Device("sm_90a", 132, 227 << 10)
MODES = ((torch.float16, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "ieee"))
TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-3, torch.bfloat16: 8e-3}


def random_geometry(rng: random.Random, item: int) -> Geometry:
    """Returns a geometry with channels in 16-byte multiples and a stride above 1; often kernel = stride, and small
    maps, and some with columns of whole strides above 8."""
    unit = 16 // item
    while True:
        groups = rng.choice((1, 1, 1, 2, 3))
        kernel = (rng.randint(1, 5), rng.randint(1, 5))
        largest = rng.choice((8, 40))
        size = (rng.randint(1, largest), rng.randint(1, largest))
        channels = [groups * unit * rng.choice((1, 3, 8, 9, 16, 17, 33)) for _ in range(2)]
        batch = rng.choice((1, 2, 5, 9))
        kind = rng.random()
        if kind < 0.3:
            geometry = Geometry(batch, channels[0], *size, channels[1], kernel, kernel, groups=groups)
        elif kind < 0.5:
            stride = (rng.randint(1, 3), rng.choice((9, 10, 12, 16, 33)))
            kernel, padding = (rng.randint(1, 2), rng.randint(1, 32)), (rng.randint(0, 1), rng.randint(0, 8))
            geometry = Geometry(
                batch, channels[0] // groups, *size, channels[1] // groups, kernel, stride, padding
            )
            geometry = replace(geometry, output_padding=(0, -geometry.out_width % stride[1]))
        else:
            stride = (rng.randint(1, 4), rng.randint(1, 4))
            dilation = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2)))
            padding = (rng.randint(0, 3), rng.randint(0, 3))
            extra = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
            geometry = Geometry(
                batch,
                channels[0],
                *size,
                channels[1],
                kernel,
                stride,
                padding,
                (extra[0], extra[1]),
                dilation,
                groups,
            )
        whole = min(geometry.out_height, geometry.out_width) >= 1 and geometry.stride != (1, 1)
        if whole and geometry.macs / groups < 2e9:
            return geometry


def cases(seed: int, count: int) -> Iterator[tuple[plan.Problem, StridedProblem, TmaTile]]:
    """Yields problems that the kernel computes, each with one of its tiles; every kind of tile is as likely as
    another."""
    rng = random.Random(seed)
    while count:
        dtype, precision = MODES[count % len(MODES)]
        problem = plan.Problem(random_geometry(rng, dtype.itemsize), dtype, precision, True, True)
        posed = as_convolution(problem)
        if rng.random() < 0.3:
            posed = replace(posed, output_channels_last=False)
        kinds: dict[tuple[object, ...], list[TmaTile]] = {}
        if posed.step != (1, 1) and grad_input_tma.supports(posed, H200):
            for tile in every_tile(posed):
                if not grad_input_tma_tile.legal(posed, tile):
                    continue
                kind = (
                    tile.groups_along,
                    tile.multiplies_along,
                    tile.dense,
                    tile.warpgroups,
                    tile.consumers,
                    tile.splits > 1,
                )
                kinds.setdefault(kind, []).append(tile)
        if kinds:
            count -= 1
            tile = rng.choice(rng.choice(list(kinds.values())))
            tile = replace(tile, phase_major=rng.random() < 0.5)
            if tile.splits > 1:
                splits = rng.choice((2, 3, 4))
                tile = replace(tile, splits=splits if splits <= grad_input_tma_tile.chunks(posed) else 2)
            if grad_input_tma_tile.may_have_phase_dimension(posed, tile) and rng.random() < 0.7:
                tile = replace(tile, phase_dimension=True)
            yield problem, posed, tile


def every_tile(posed: StridedProblem) -> Iterator[TmaTile]:
    """Yields the tiles of every kernel in each of its shapes."""
    for kernel in grad_input_tma_tile.tiles(posed, H200):
        yield from grad_input_tma_tile.shapes(posed, kernel)


def emulated(posed: StridedProblem, part: Part, tile: TmaTile) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gradient of one channel, computed with the offsets of grad_input/implicit_gemm_tma.cu, and by the
    definition."""
    rng = np.random.default_rng(0)
    geometry, (step_h, step_w) = posed.geometry, posed.step
    (kernel_h, kernel_w), (dilation_h, dilation_w) = geometry.kernel, geometry.dilation
    padding_h, padding_w = geometry.padding
    constants = dict(part.launches[0].kernel.constants)
    shape = words_by_name("BoxTileShape", part.launches[0].structs[1])
    _, tiles_h, tiles_w = grad_input_tma_shape.tile_counts(posed, tile)
    source, _ = part.launches[0].tensor_maps
    (sizes_w, sizes_h, sizes_n), steps = source.sizes[-3:], source.steps[-3:]
    if tile.dense:
        map_h, box_w = grad_input_tma_shape.dense_map(posed)
    else:
        box_w, box_h, box_n = (-(-n // step) for n, step in zip(source.box[-3:], steps, strict=True))
    if tile.phase_dimension:
        assert source.sizes[1] == step_w
        assert source.strides[1] == step_w * source.strides[0]
        sizes_w, steps = sizes_w * step_w, (step_w, *steps[1:])
    grad_output = rng.standard_normal((geometry.batch, geometry.height, geometry.width))
    images_of_the_map = grad_output.reshape(sizes_n, sizes_h, sizes_w)
    weight = rng.standard_normal(geometry.kernel)

    phases: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for kh in range(kernel_h):
        for kw in range(kernel_w):
            row, col = kh * dilation_h, kw * dilation_w
            start = (row % step_h, col if tile.narrow else col % step_w)
            pixel = row // step_h * box_w + (0 if tile.narrow else col // step_w)
            phases.setdefault(start, []).append((weight[kh, kw], pixel))
    assert len(phases) == grad_input_tma_tile.phase_count(posed, tile)

    rows, cols = posed.positions
    grad_input = np.full(geometry.batch * rows * cols, np.nan)
    m, group, eight = np.ogrid[: tile.m_tiles, :8, :8]
    pixels = m * shape["multiply_pixels"] + group * shape["group_pixels"] + eight
    in_tile = m * shape["multiply_positions"] + group * shape["group_positions"] + eight
    assert sorted(in_tile.ravel()) == list(range(tile.m_tiles * 64)), "a number for each position"
    blocks = -(-geometry.out_channels_per_group // tile.channels) * geometry.groups * tile.splits
    for index in range(grad_input_tma_tile.work_count(posed, tile) // blocks):
        if tile.dense:
            lines, col = divmod(index * tile.positions, box_w)
            image, row = divmod(lines, map_h)
        else:
            lines, col = index // tiles_w, index % tiles_w << shape["col_bits"]
            row, image = lines % tiles_h * shape["rows"], lines // tiles_h * shape["images"]
        sums = np.zeros((tile.warpgroups, tile.m_tiles * 64))
        for (first_row, first_col), taps in phases.items():
            begin = col * step_w - padding_w + first_col
            if tile.phase_dimension:
                whole = (begin + padding_w * step_w) // step_w - padding_w
                assert 0 <= begin - whole * step_w < step_w, "a phase"
            if tile.dense:
                n, h, w = loaded(source, (image, row * step_h - padding_h, col * step_w - padding_w))
                h, w = h + first_row, w + first_col
            else:
                n, h, w = np.ogrid[:box_n, :box_h, :box_w]
                n, h, w = (
                    n + image,
                    h * steps[1] + row * step_h - padding_h + first_row,
                    w * steps[0] + begin,
                )
            inside = (n < sizes_n) & (h >= 0) & (h < sizes_h) & (w >= 0) & (w < sizes_w)
            stage = np.where(
                inside,
                images_of_the_map[n.clip(0, sizes_n - 1), h.clip(0, sizes_h - 1), w.clip(0, sizes_w - 1)],
                0,
            ).ravel()
            assert stage.size * grad_input_tma_shape.ROW_BYTES == shape["box_bytes"]
            assert shape["box_bytes"] <= constants["INPUT_BYTES"]
            assert box_w == shape["box_cols"]
            stage = np.concatenate([stage, np.full(4096, np.nan)])
            for warpgroup in range(tile.warpgroups):
                first = warpgroup * shape["warpgroup_pixels"]
                for value, pixel in taps:
                    sums[warpgroup][in_tile.ravel()] += value * stage[first + pixel + pixels].ravel()
        numbers = np.arange(tile.m_tiles * 64)
        for warpgroup in range(tile.warpgroups):
            if tile.dense:
                at_line, at_col = np.divmod(
                    index * tile.positions + warpgroup * len(numbers) + numbers, box_w
                )
                at_image, at_row = np.divmod(at_line, map_h)
            else:
                line, at_col = numbers >> shape["col_bits"], col + numbers % (1 << shape["col_bits"])
                further = line >> shape["warpgroup_row_bits"]
                at_row = row + warpgroup * shape["warpgroup_rows"] + line % (1 << shape["warpgroup_row_bits"])
                at_image = image + warpgroup * shape["warpgroup_images"] + further
            position = (at_image * rows + at_row) * cols + at_col
            inside = (at_row < rows) & (at_col < cols) & (at_image < geometry.batch)
            assert np.isnan(grad_input[position[inside]]).all(), "stored twice"
            grad_input[position[inside]] = sums[warpgroup][inside]

    wanted = defined_gradient(posed, grad_output[:, None], weight[None])
    return grad_input.reshape(wanted.shape), wanted


@pytest.mark.parametrize("seed", range(4))
def test_every_position_is_stored_once_from_the_pixels_of_the_definition(seed: int) -> None:
    for _, posed, tile in cases(seed, 10):
        channels_last = replace(posed, output_channels_last=True)
        part = grad_input_tma.lower(channels_last, tile)
        found, wanted = emulated(channels_last, part, tile)
        np.testing.assert_allclose(found, wanted, atol=1e-9, err_msg=f"{posed.geometry} {tile}")


def test_the_family_comes_first_where_it_computes_the_problem() -> None:
    geometry = Geometry(8, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))
    problem = plan.Problem(geometry, torch.float16, "ieee", True, True)
    parts = grad_input_implicit_gemm.part_candidates(problem, H200, 8)
    assert [part.family for part in parts[:2]] == [grad_input_tma.FAMILY] * 2
    assert parts[-1].family == grad_input_implicit_gemm.FAMILY
    for other in (
        replace(problem, channels_last=False, weight_channels_last=False),
        replace(problem, geometry=replace(geometry, out_channels=62)),
        replace(problem, dtype=torch.float32),
    ):
        families = {part.family for part in grad_input_implicit_gemm.part_candidates(other, H200, 8)}
        assert grad_input_tma.FAMILY not in families


#: A layer with 64 output channels whose kernel meets 9 of 25 pixels, and one row with a stride of 8, which limits a
#: box to
#: 32 columns.
GAPS = Geometry(16, 32, 64, 128, 64, (3, 3), (5, 5), (1, 1), dilation=(2, 2))
ONE_ROW = Geometry(4, 512, 1, 512, 256, (1, 16), (1, 8), (0, 4))


@pytest.mark.parametrize(
    ("geometry", "mode", "fetched", "phase_major"),
    [
        (GAPS, MODES[0], 128, False),  # no tap reads the pixel beside a pixel
        (GAPS, MODES[1], 256, True),  # the other 128 bytes are the second chunk of the pixel
        (
            Geometry(4, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)),
            MODES[0],
            256,
            False,
        ),  # they are a pixel of the other phase
        (Geometry(4, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)), MODES[1], 128, False),
        (Geometry(4, 128, 16, 16, 256, (2, 2), (2, 2)), MODES[0], 128, False),
    ],
    ids=str,
)
def test_the_l2_fetches_256_bytes_where_both_halves_are_read_soon(
    geometry: Geometry, mode: tuple[torch.dtype, str], fetched: int, phase_major: bool
) -> None:
    posed = as_convolution(plan.Problem(geometry, *mode, True, True))
    (part,) = grad_input_tma.part_candidates(posed, H200, 1)
    assert part.launches[0].tensor_maps[0].fetched_bytes == fetched
    assert dict(part.launches[0].kernel.constants)["PHASE_MAJOR"] == phase_major


def test_a_box_of_too_many_columns_gets_a_dimension_for_their_phases() -> None:
    for mode in MODES:
        posed = as_convolution(plan.Problem(ONE_ROW, *mode, True, True))
        tiles = grad_input_tma_choice.choose(posed, H200, 1000)
        assert any(tile.phase_dimension and tile.images <= ONE_ROW.batch for tile in tiles)
        ragged = replace(ONE_ROW, output_padding=(0, 1))
        posed = as_convolution(plan.Problem(ragged, *mode, True, True))
        assert not any(tile.phase_dimension for tile in grad_input_tma_choice.choose(posed, H200, 1000))


def test_of_strides_above_8_only_whole_ones_are_loaded() -> None:
    layer = Geometry(4, 512, 1, 100, 256, (1, 16), (1, 10), (0, 3))
    for mode in MODES:
        tiles = grad_input_tma_choice.choose(
            as_convolution(plan.Problem(layer, *mode, True, True)), H200, 1000
        )
        assert tiles
        assert all(tile.phase_dimension for tile in tiles)
        for other in (
            replace(layer, output_padding=(0, 1)),
            replace(layer, groups=2),
            replace(layer, kernel=(10, 4), stride=(10, 1), padding=(0, 0)),
        ):
            assert not grad_input_tma.supports(as_convolution(plan.Problem(other, *mode, True, True)), H200)


def test_two_consumers_get_no_tile_that_is_larger_than_the_map() -> None:
    """Half of such a tile is empty, but the number of work tiles looks large enough for both consumers."""
    geometry = Geometry(8, 256, 1, 1000, 128, (1, 8), (1, 4), (0, 2))
    posed = as_convolution(plan.Problem(geometry, *MODES[1], True, True))
    first, *others = grad_input_tma_choice.choose(posed, H200, 1000)
    assert first.consumers == 1 or first.rows == 1
    assert any(tile.consumers > 1 and tile.rows > 1 for tile in others)


def test_implicit_gemm_computes_layers_that_fill_half_of_a_chunk() -> None:
    geometry = Geometry(8, 32, 128, 128, 32, (2, 2), (2, 2))
    families = [
        plan.plan_backward(plan.Problem(geometry, *mode, True, True), (True, False, False), H200).family
        for mode in MODES
    ]
    assert families == [
        grad_input_implicit_gemm.FAMILY,
        grad_input_tma.FAMILY,
        grad_input_implicit_gemm.FAMILY,
    ]


def test_a_block_has_192_channels_if_the_layer_has_192() -> None:
    geometry = Geometry(16, 192, 56, 56, 96, (2, 2), (2, 2))
    for mode in MODES:
        (best,) = grad_input_tma_choice.choose(
            as_convolution(plan.Problem(geometry, *mode, True, True)), H200
        )
        assert (best.positions, best.channels) == (128, 192)


def test_one_kernel_takes_the_shape_that_fits_each_map() -> None:
    """A tile of several images would be mostly empty with one image, a wide one with narrow maps."""
    kernels, shapes = set(), set()
    for batch, side in ((1, 256), (1, 400), (4, 128), (64, 32), (256, 16), (512, 8)):
        geometry = Geometry(batch, 256, side, side, 256, (3, 3), (2, 2), groups=2)
        posed = as_convolution(plan.Problem(geometry, torch.float16, "ieee", True, True))
        (tile,) = grad_input_tma_choice.choose(replace(posed, output_channels_last=False), H200)
        part = grad_input_tma.lower(posed, tile)
        kernels.add(part.launches[0].kernel)
        shapes.add((tile.images, tile.rows, tile.cols))
        multiplied = math.prod(grad_input_tma_shape.tile_counts(posed, tile)) * tile.positions
        assert multiplied <= 1.1 * batch * side * side
    assert len(kernels) <= 2
    assert len(shapes) > len(kernels)


def test_dense_tiles_read_one_group_and_corners_of_a_byte() -> None:
    def dense_kernels(geometry: Geometry) -> list[TmaTile]:
        posed = as_convolution(plan.Problem(geometry, torch.float16, "ieee", True, True))
        return [
            tile
            for tile in grad_input_tma_tile.tiles(posed, H200)
            if tile.dense and grad_input_tma_tile.legal(posed, tile)
        ]

    of_groups = Geometry(16, 128, 14, 14, 128, (4, 4), (2, 2), (1, 1), groups=2)
    assert dense_kernels(of_groups)
    assert not dense_kernels(replace(of_groups, in_channels=96, out_channels=96))
    assert not dense_kernels(replace(of_groups, groups=1, height=8, width=300)), (
        "wider than a stage has room for"
    )
    of_padding = Geometry(4, 64, 1, 300, 64, (1, 4), (1, 2), (0, 1))
    assert dense_kernels(of_padding)
    assert not dense_kernels(replace(of_padding, padding=(0, 129)))


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_the_first_kernel_of_a_layer_computes_wide_maps(kernel: int) -> None:
    geometry = Geometry(2, 256, 5, 600, 128, (kernel, kernel), (2, 2), (kernel // 2 - kernel % 2,) * 2)
    for mode in MODES:
        posed = as_convolution(plan.Problem(geometry, *mode, True, True))
        first = grad_input_tma_choice.schedules(of_any_size(posed), H200)[0]
        assert grad_input_tma_tile.legal(posed, grad_input_tma_choice.in_best_shape(first, posed, H200))


def test_operands_may_be_in_the_workspace() -> None:
    geometry = Geometry(8, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))
    posed = as_convolution(plan.Problem(geometry, torch.float16, "ieee", True, True))
    tile = next(grad_input_tma_tile.tiles(posed, H200))
    part = grad_input_tma.lower(posed, tile, 132, workspace(512), input_(2))
    assert [one.base for one in part.launches[0].tensor_maps[:2]] == [workspace(512), input_(2)]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs sm_90a"
)
@pytest.mark.parametrize("seed", range(12))
def test_every_kind_of_tile_matches_float64(seed: int) -> None:
    torch.manual_seed(seed)
    for problem, posed, tile in cases(100 + seed, 6):
        made = grad_input_tma.lower(posed, tile)
        channels_last = posed.output_channels_last
        whole = Plan(
            made.family,
            made.why,
            (Output(problem.geometry.input_shape, channels_last),),
            made.launches,
            made.workspace_bytes,
        )
        mask = (True, False, False)
        assert_kernel_matches(
            whole, problem.geometry, problem.dtype, (True, True), TOLERANCE[problem.dtype], mask
        )

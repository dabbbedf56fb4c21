"""grad_input/implicit_gemm_tma: every kind of tile on random problems."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from grad_input_cases import defined_gradient, words_by_name
from harness import assert_kernel_matches
from im2col_mode import loaded

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_input import implicit_gemm_tma as grad_input_tma
from tconv_swap.kernels.grad_input import implicit_gemm_tma_shape as grad_input_tma_shape
from tconv_swap.kernels.grad_input import implicit_gemm_tma_tile as grad_input_tma_tile
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, as_convolution
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
            geometry = geometry._replace(output_padding=(0, -geometry.out_width % stride[1]))
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
            posed = posed._replace(output_channels_last=False)
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
            tile = tile._replace(phase_major=rng.random() < 0.5)
            if tile.splits > 1:
                splits = rng.choice((2, 3, 4))
                tile = tile._replace(splits=splits if splits <= grad_input_tma_tile.chunks(posed) else 2)
            if grad_input_tma_tile.may_have_phase_dimension(posed, tile) and rng.random() < 0.7:
                tile = tile._replace(phase_dimension=True)
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
        map_h, box_w, *_ = grad_input_tma_shape.dense_map(posed)
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
        channels_last = posed._replace(output_channels_last=True)
        part = grad_input_tma.lower(channels_last, tile)
        found, wanted = emulated(channels_last, part, tile)
        np.testing.assert_allclose(found, wanted, atol=1e-9, err_msg=f"{posed.geometry} {tile}")


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

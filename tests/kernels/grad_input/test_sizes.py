"""Kernels of grad_input whose sizes are arguments at run time: whether each computes the sizes that are given to it,
and one kernel at several sizes. test_selection.py tests which of them a layer has."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator

import pytest
import torch
from harness import assert_kernel_matches
from sampling import sampled
from size_cases import H200, MODES, TOLERANCE, random_sizes, with_output_padding

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.hardware import MAX_BOX, MAX_PIXELS
from tconv_swap.kernels.grad_input import im2col as grad_input_im2col
from tconv_swap.kernels.grad_input import im2col_tile as grad_input_im2col_tile
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_input import implicit_gemm_candidates as grad_input_candidates
from tconv_swap.kernels.grad_input import implicit_gemm_choice as grad_input_choice
from tconv_swap.kernels.grad_input import implicit_gemm_tma as grad_input_tma
from tconv_swap.kernels.grad_input import implicit_gemm_tma_choice as grad_input_tma_choice
from tconv_swap.kernels.grad_input import implicit_gemm_tma_shape as grad_input_tma_shape
from tconv_swap.kernels.grad_input import implicit_gemm_tma_tile as grad_input_tma_tile
from tconv_swap.kernels.grad_input import nchw_to_nhwc as grad_input_nchw_to_nhwc
from tconv_swap.kernels.grad_input import tma_gemm as grad_input_tma_gemm
from tconv_swap.kernels.grad_input.im2col_choice import Schedule as Im2colSchedule
from tconv_swap.kernels.grad_input.im2col_choice import Timed
from tconv_swap.kernels.grad_input.im2col_tile import Im2colKernel, Im2colTile
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, as_convolution, of_any_size
from tconv_swap.kernels.grad_input.selection import Kernels, kernels_for, kernels_of, representatives
from tconv_swap.measurement.suite import load_suite
from tconv_swap.runtime import jit
from tconv_swap.runtime.program import Kernel, Part

LAYERS = [
    layer
    for layer in load_suite().layers
    if max(layer.geometry.stride) > 1 and layer.geometry.out_channels_per_group >= 8
]
#: The kernels that multiply, of the families that this file tests, those that compute the fewest sizes first.
ENTRIES = (
    "grad_input_im2col",
    "grad_input_implicit_gemm_tma",
    "grad_input_implicit_gemm_wgmma",
    "grad_input_implicit_gemm_mma",
)
SIZES = {"BATCH", "HEIGHT", "WIDTH", "OUT_HEIGHT", "OUT_WIDTH", "SPLITS", "TILES_H", "TILES_W", "OUT_PIXELS"}


def computing(part: Part) -> Kernel:
    """Returns the kernel of a part that multiplies."""
    (found,) = (one.kernel for one in part.launches if one.kernel.entry in ENTRIES)
    return found


def test_no_size_is_compiled_in(exhaustive: bool) -> None:
    seen = set()
    for place, layer in enumerate(LAYERS):
        for dtype, precision in MODES if exhaustive else [MODES[place % len(MODES)]]:
            for channels_last in (False, True):
                problem = plan.Problem(layer.geometry, dtype, precision, channels_last, channels_last)
                for part in parts_of(kernels_for(as_convolution(problem), H200), problem, 8):
                    for one in part.launches:
                        assert not SIZES & dict(one.kernel.constants).keys()
                    seen.add(computing(part).entry)
    assert seen == set(ENTRIES)


def parts_of(kernels: Kernels, problem: plan.Problem, count: int) -> Iterator[Part]:
    """Yields, for each family, the parts of the ``count`` kernels that are the fastest of those that compute the
    problem."""
    posed = as_convolution(problem)
    if posed.input_channels_last:
        yield from (
            one.make() for one in grad_input_tma.ranked(kernels.implicit_gemm_tma, posed, H200)[:count]
        )
    else:
        yield from (
            one.make()
            for one in grad_input_nchw_to_nhwc.ranked(kernels.implicit_gemm_tma, problem, H200)[:count]
        )
    yield from (one.make() for one in grad_input_im2col.ranked(kernels.im2col, posed, H200)[:count])
    if grad_input_choice.supports(posed, H200):
        for _, taken, tile in grad_input_choice.ranked(kernels.implicit_gemm, posed, H200)[:count]:
            yield grad_input_implicit_gemm.lower(taken, tile)


def every_kernel(problem: plan.Problem) -> Iterator[Part]:
    """Yields a part of each kernel of the problem's layer."""
    posed = as_convolution(problem)
    found = kernels_of(of_any_size(posed), H200)
    for (_, shape), *_ in found.implicit_gemm_tma:
        yield grad_input_tma.lower(posed, shape)
    for schedule in found.im2col:
        (first, *_), *_ = schedule.shapes
        splits = 2 if schedule.kernel.partial else 1
        yield grad_input_im2col.lower(posed, Im2colTile(schedule.kernel, first, splits))
    for one in found.implicit_gemm:
        yield grad_input_implicit_gemm.lower(one.posed(posed), one.tile)


def test_the_kernels_of_a_layer_compile(exhaustive: bool) -> None:
    """The kernels of three layers, also those that no size of the suite uses; on each commit some of each family."""
    done: dict[str, int] = {}
    for name, dtype, channels_last in (
        ("unet4", torch.float16, True),
        ("dcgan3", torch.float32, False),
        ("maskrcnn", torch.float16, False),
    ):
        geometry = next(layer.geometry for layer in LAYERS if layer.name == name)
        problem = plan.Problem(geometry, dtype, "tf32", channels_last, channels_last)
        for part in every_kernel(problem):
            kernel = computing(part)
            if done.get(kernel.entry, 0) >= (math.inf if exhaustive else 2):
                continue
            _, log = jit.compile_with_log(kernel, "sm_90a")
            spills = [int(found) for found in re.findall(r"(\d+) bytes spill stores", log)]
            assert spills
            assert kernel.spills or not any(spills), f"{kernel} {log}"
            done[kernel.entry] = done.get(kernel.entry, 0) + 1
    assert min(done[entry] for entry in ENTRIES if entry != "grad_input_implicit_gemm_mma") >= 2, done


def any_problem(rng: random.Random) -> StridedProblem:
    """Returns a random size of a layer of the suite; small maps are as likely as others."""
    layer = rng.choice(LAYERS).geometry
    geometry = with_output_padding(rng, layer)
    dtype, precision = rng.choice(MODES)
    channels_last = rng.random() < 0.5
    return as_convolution(plan.Problem(geometry, dtype, precision, channels_last, channels_last))


@pytest.mark.parametrize("seed", sampled(range(20), 2))
def test_the_assumptions_of_an_implicit_gemm_kernel_hold_for_its_sizes(seed: int) -> None:
    rng = random.Random(seed)
    for posed in (any_problem(rng) for _ in range(10)):
        if not grad_input_choice.supports(posed, H200):
            continue
        (rows, cols), step, width = posed.positions, posed.step, posed.geometry.width
        image = posed.geometry.in_channels * posed.geometry.height * width * posed.item
        sizes, _ = representatives(of_any_size(posed))
        drawn = [posed, *rng.sample(sizes, min(3, len(sizes)))]
        of_layer = grad_input_candidates.tiles_of_layer(posed, H200)
        every = {one.schedule for size in drawn for one in grad_input_candidates.candidates(size, of_layer)}
        ranked = grad_input_choice.ranked(every, posed, H200)
        assert len(ranked) == sum(one.legal(posed) for one in every)
        assert [clocks for clocks, *_ in ranked] == sorted(clocks for clocks, *_ in ranked)
        for _, taken, tile in ranked:
            assert taken.geometry == posed.geometry
            assert 1 <= tile.splits <= -(-posed.words // tile.chunk_words)
            assert width % taken.row_multiple == 0
            assert cols % taken.out_row_multiple == 0
            if posed.flat:
                assert cols * step[1] % taken.row_multiple == 0
                assert not taken.even_columns or cols % 2 == 0
            if tile.wgmma and tile.cols < 8:
                assert cols <= tile.cols
            images = 1 + -(-tile.cols // (rows * cols)) if posed.flat else tile.images
            assert images * image < 1 << 31
        assert all(one.legal(posed) for one in every if one.computes_any_size(posed))


@pytest.mark.parametrize("seed", sampled(range(20), 2))
def test_the_boxes_of_a_size_have_the_bytes_that_its_kernel_expects(seed: int) -> None:
    rng = random.Random(seed)
    for posed in (any_problem(rng) for _ in range(10)):
        if not grad_input_tma.supports(posed, H200):
            continue
        every = grad_input_tma_choice.candidates(of_any_size(posed), H200)
        for shapes in rng.sample(every, min(5, len(every))):
            (kernel,) = {grad_input_tma.lower(posed, tile).launches[0].kernel for _, tile in shapes}
            constants, largest = dict(kernel.constants), max(tile.box_pixels for _, tile in shapes)
            assert largest * grad_input_tma_shape.ROW_BYTES == constants["INPUT_BYTES"]
            assert grad_input_tma_choice.in_best_shape(shapes, posed, H200) in [tile for _, tile in shapes]
            sized = (grad_input_tma_gemm.for_size(one, posed, grad_input_tma_tile.legal) for _, one in shapes)
            for tile in itertools.chain.from_iterable(sized):
                (main, *_) = grad_input_tma.lower(posed, tile).launches
                source = main.tensor_maps[0]
                steps = (1, 1) if source.corners else source.steps
                assert max(source.box) <= (MAX_PIXELS if source.corners else MAX_BOX)
                loaded = posed.item * math.prod(
                    -(-size // step) for size, step in zip(source.box, steps, strict=True)
                )
                assert loaded == main.structs[1][-1] <= constants["INPUT_BYTES"]
                if tile.phase_dimension:
                    assert posed.geometry.width % posed.step[1] == 0
                assert 1 <= tile.splits <= grad_input_tma_tile.chunks(posed)


def im2col_tiles(rng: random.Random, layer: StridedProblem) -> Iterator[Im2colTile]:
    """Yields tiles of a layer: some of the shapes of each of its kernels, in each layout."""
    for kernel in grad_input_im2col_tile.kernels(layer, H200):
        shapes = list(grad_input_im2col_tile.shapes(layer, kernel, H200))
        for shape in rng.sample(shapes, min(4, len(shapes))):
            for one in grad_input_im2col_tile.variants(layer, kernel, shape, H200):
                yield Im2colTile(kernel, one, 2 if kernel.partial else 1)


@pytest.mark.parametrize("seed", sampled(range(20), 2))
def test_boxes_begin_at_addresses_that_tma_can_read(seed: int) -> None:
    rng = random.Random(seed)
    for posed in (any_problem(rng) for _ in range(10)):
        if not grad_input_im2col.supports(posed, H200):
            continue
        for one in im2col_tiles(rng, of_any_size(posed)):
            for tile in grad_input_tma_gemm.for_size(one, posed, grad_input_im2col_tile.legal):
                launches = grad_input_im2col.lower(posed, tile).launches
                main = next(one for one in launches if one.kernel.entry == "grad_input_im2col")
                constants, source = dict(main.kernel.constants), main.tensor_maps[0]
                assert max(source.box) <= 256
                assert all(stride % 16 == 0 for stride in source.strides)
                block = constants["COLUMN_BLOCK"] if tile.shape.wide else 1
                assert posed.geometry.width % block == 0
                tiles = grad_input_im2col_tile.tile_counts(posed, tile.shape)[2]
                align = max(block, 16 // posed.item)
                first = posed.geometry.padding[1] + grad_input_im2col_tile.alignment_columns(
                    posed, tile.shape.wide
                )
                starts = (at * tile.shape.cols * posed.step[1] - first for at in range(tiles))
                assert all(start % align == 0 for start in starts)


def test_small_maps_have_a_tile_in_nchw() -> None:
    (layer,) = (layer for layer in LAYERS if layer.name == "dcgan2")  # 4 x 4
    problem = plan.Problem(layer.geometry, torch.float32, "tf32", False, False)
    part = grad_input_implicit_gemm.plan_grad_input(problem, H200)
    assert part is not None
    assert part.family == grad_input_im2col.FAMILY


@pytest.mark.parametrize(("kernel", "stride", "multiple"), [(5, 5, 2), (4, 2, 4), (3, 2, 4)])
def test_aligned_rows_are_multiples_of_a_power_of_two(kernel: int, stride: int, multiple: int) -> None:
    # 638 columns, 128, and 127, to which an output_padding of 1 is added.
    extra = stride - kernel + 2 if stride == 2 else 0
    geometry = Geometry(1, 32, 128, 128, 32, (kernel,) * 2, (stride,) * 2, (1, 1), (extra, extra))
    posed = as_convolution(plan.Problem(geometry, torch.float16, "ieee", False, False))
    assert posed.aligned_columns == multiple
    assert posed.can_be_aligned
    assert posed._replace(aligned=True).row_multiple == multiple


# ---- on a GPU ------------------------------------------------------------------------------------------------


def small_layer(rng: random.Random) -> Geometry:
    groups, kernel = rng.choice((1, 1, 1, 2)), rng.choice((2, 2, 3, 4))
    stride = rng.choice((2, 2, 3, kernel))
    plain = kernel == stride
    return Geometry(
        1,
        groups * rng.choice((32, 64, 72, 256)),
        1,
        1,
        groups * rng.choice((32, 40, 64, 128)),
        (kernel, kernel),
        (stride, stride),
        (0, 0) if plain and rng.random() < 0.8 else (rng.randint(0, 1),) * 2,
        groups=groups,
        dilation=(1, 1) if rng.random() < 0.8 else (2, 2),
    )


def random_size(rng: random.Random, layer: Geometry, whole: bool) -> Geometry:
    """Returns a small layer with a random size and output_padding. ``whole``: its rows of grad_output are whole
    strides, and mostly multiples of 16 bytes."""
    geometry = random_sizes(rng, layer, rng.choice((9, 60)))._replace(batch=rng.randint(1, 5))
    if not whole:
        return geometry._replace(output_padding=(rng.randint(0, 1), rng.randint(0, 1)))
    geometry = geometry._replace(width=8 * -(-geometry.width // 8))
    return geometry._replace(output_padding=(rng.randint(0, 1), -geometry.out_width % layer.stride[1]))


def some_kernels(rng: random.Random, problem: plan.Problem, count: int = 40) -> Kernels:
    """Returns ``count`` kernels of each family that may compute the problem, those of im2col with all their shapes."""
    every = kernels_for(as_convolution(problem), H200)
    shapes: dict[Im2colKernel, tuple[Timed, ...]] = {}
    for one in every.im2col:
        shapes[one.kernel] = shapes.get(one.kernel, ()) + one.shapes
    by_im2col = [Im2colSchedule(*one) for one in shapes.items()]
    return Kernels(
        tuple(rng.sample(every.implicit_gemm, min(count, len(every.implicit_gemm)))),
        tuple(rng.sample(every.implicit_gemm_tma, min(count, len(every.implicit_gemm_tma)))),
        tuple(rng.sample(by_im2col, min(count, len(by_im2col)))),
    )


def sizes_of_one_kernel(rng: random.Random) -> list[tuple[plan.Problem, Part]]:
    """Returns three sizes of a small layer that one kernel computes, with their parts."""
    while True:
        layer = small_layer(rng)
        dtype = rng.choice((torch.float16, torch.bfloat16, torch.float32, torch.float32))
        precision = "ieee" if dtype != torch.float32 else rng.choice(("tf32", "tf32", "ieee"))
        channels_last = rng.random() < 0.5
        whole = rng.random() < 0.5
        sizes = [random_size(rng, layer, whole) for _ in range(40)]
        problems = [plan.Problem(one, dtype, precision, channels_last, channels_last) for one in sizes]
        # Maps of one pixel may be another layer's.
        kernels = some_kernels(rng, max(problems, key=lambda one: one.geometry.height * one.geometry.width))
        by_kernel: dict[Kernel, list[tuple[plan.Problem, Part]]] = {}
        for problem in problems:
            if as_convolution(problem).one_pixel:
                continue
            for part in parts_of(kernels, problem, rng.choice((1, 40))):
                by_kernel.setdefault(computing(part), []).append((problem, part))
        several: dict[str, list[list[tuple[plan.Problem, Part]]]] = {}
        for kernel, found in by_kernel.items():
            if len({problem for problem, _ in found}) >= 3:
                several.setdefault(kernel.entry, []).append(rng.sample(found, 3))
        if several:
            rarest = sorted(several, key=ENTRIES.index)[:2]
            return rng.choice(several[rng.choice(rarest)])


def test_one_kernel_computes_several_sizes() -> None:
    seen = set()
    for seed in range(12):
        found = sizes_of_one_kernel(random.Random(seed))
        assert len({problem.geometry for problem, _ in found}) > 1
        seen.add(computing(found[0][1]).entry)
    assert seen == set(ENTRIES)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_sizes_in_turn_through_one_kernel(seed: int) -> None:
    """Each size after another one: poisoned outputs, the same bits again, and float64 as the truth."""
    torch.manual_seed(seed)
    if call.device_facts(0).architecture != "sm_90a":
        pytest.skip("needs sm_90a, for which the tiles are chosen")
    found = sizes_of_one_kernel(random.Random(seed))
    for problem, part in (*found, found[0]):
        layouts, mask = (problem.channels_last, problem.weight_channels_last), (True, False, False)
        assert_kernel_matches(part, problem.geometry, problem.dtype, layouts, TOLERANCE[problem.dtype], mask)

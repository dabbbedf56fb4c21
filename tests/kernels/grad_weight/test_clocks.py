"""The expected clocks by which the families of the gradient of the weight, and PyTorch's operator, are ranked. No
GPU."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from first_difference import differs
from grad_weight_cases import nchw_tiles, nhwc_tiles, tma_tiles
from size_cases import AMPERE, H200

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import measured, plan, pytorch_clocks
from tconv_swap.kernels.common import copy_clocks as copies
from tconv_swap.kernels.common.copy_clocks import copy_clocks
from tconv_swap.kernels.grad_weight import bias_clocks as grad_weight_bias_clocks
from tconv_swap.kernels.grad_weight import im2col_nchw_clocks as grad_weight_im2col_nchw_clocks
from tconv_swap.kernels.grad_weight import im2col_nchw_tile as grad_weight_im2col_nchw_tile
from tconv_swap.kernels.grad_weight import im2col_nhwc_clocks as grad_weight_im2col_nhwc_clocks
from tconv_swap.kernels.grad_weight import implicit_gemm as grad_weight_implicit_gemm
from tconv_swap.kernels.grad_weight import implicit_gemm_candidates as grad_weight_candidates
from tconv_swap.kernels.grad_weight import implicit_gemm_clocks as grad_weight_clocks
from tconv_swap.kernels.grad_weight import implicit_gemm_tma as grad_weight_tma
from tconv_swap.kernels.grad_weight import implicit_gemm_tma_clocks as grad_weight_tma_clocks
from tconv_swap.kernels.grad_weight import stride1 as grad_weight_stride1
from tconv_swap.kernels.grad_weight import stride1_clocks as grad_weight_stride1_clocks
from tconv_swap.kernels.grad_weight import stride1_tile as grad_weight_stride1_tile
from tconv_swap.kernels.grad_weight.im2col_nhwc_tile import stages_of
from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import tensor_bytes
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import Tile
from tconv_swap.kernels.grad_weight.layer import pixel_tiles

Mode = tuple[torch.dtype, str]
TF32: Mode = (torch.float32, "tf32")
FP16: Mode = (torch.float16, "ieee")
IEEE: Mode = (torch.float32, "ieee")
#: Layers of which every constant of the clocks concerns some size: taps that overlap, strides above 2, channels whose
#: pixels are no whole lines or pieces, odd rows, strides of 1 and of 32 banks, and so few channels that two blocks
#: share a multiprocessor.
VARIED = (
    Geometry(40, 96, 14, 13, 40, (4, 4), (2, 2), (1, 1)),
    Geometry(3, 64, 31, 30, 72, (5, 5), (3, 3), (1, 1)),
    Geometry(16, 257, 21, 21, 66, (2, 2), (2, 2)),
    Geometry(2, 64, 64, 128, 64, (3, 5)),
    Geometry(16, 32, 20, 20, 16, (2, 2), (2, 2)),
    Geometry(1, 16, 8, 8, 16, (2, 32), (2, 32)),
)
LAYER = Geometry(330, 256, 16, 16, 128, (4, 4), (2, 2), (1, 1))
#: Kernels, strides, paddings and output paddings of common layers.
KERNELS = (
    ((4, 4), (2, 2), (1, 1), (0, 0)),
    ((3, 3), (2, 2), (1, 1), (1, 1)),
    ((2, 2), (2, 2), (0, 0), (0, 0)),
)


def posed(geometry: Geometry, mode: Mode = FP16, channels_last: bool = False) -> plan.Problem:
    return plan.Problem(geometry, *mode, channels_last, channels_last)


def schedules(problem: plan.Problem) -> tuple[grad_weight_candidates.Schedule, ...]:
    """Returns the kernels of the implicit GEMM that a layer may have because of this size."""
    return grad_weight_candidates.pool(problem, H200, (problem.geometry,))


# ---- which kernel is taken --------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("mode", [TF32, FP16], ids=str)
def test_the_kernel_with_the_fewest_clocks_comes_first(mode: Mode, channels_last: bool) -> None:
    rng, taken = random.Random(3), set()
    for _ in range(24):
        kernel, stride, padding, output_padding = rng.choice(KERNELS)
        side = rng.choice((4, 7, 14, 20, 37, 64, 128))
        maps = max(1, 16384 // side**2), 128, side, side
        problem = posed(Geometry(*maps, 64, kernel, stride, padding, output_padding), mode, channels_last)
        found = grad_weight_implicit_gemm.ranked(problem, H200, False)
        parts = [one.make() for one in found]
        clocks = [one.clocks for one in found]
        assert clocks[0] == min(clocks)
        for family in {part.family for part in parts}:
            of_it = [one for one, part in zip(clocks, parts, strict=True) if part.family == family]
            assert of_it == sorted(of_it)
        # Then the best of each other family.
        families = [part.family for part in parts]
        assert len(set(families[: len(set(families))])) == len(set(families))
        assert grad_weight_implicit_gemm.plan_grad_weight(problem, H200) == parts[0]
        copies = grad_weight_implicit_gemm.ranked_from_copies(problem, H200)
        assert [one.clocks for one in copies] == sorted(one.clocks for one in copies)
        every = min((*clocks, *(one.clocks for one in copies)))
        assert grad_weight_implicit_gemm.expected_clocks(problem, H200) == every
        taken.add(families[0] if every == clocks[0] else "copies")
    wanted = {
        (TF32, False): {"im2col_nchw"},
        (TF32, True): {"im2col_nhwc"},
        (FP16, False): {"implicit_gemm", "copies"},
        (FP16, True): {"implicit_gemm_tma"},
    }
    assert taken >= wanted[mode, channels_last]


# ---- what takes longer ------------------------------------------------------------------------------------------


def test_the_clocks_of_the_implicit_gemm_grow_with_tiles_bytes_and_splits() -> None:
    of, split = grad_weight_clocks, 0
    for one in schedules(posed(LAYER)):
        work, tile = one.work, one.tile
        splits = of.splits_of(work, tile, 1 << 20, H200)

        def clocks(tiles: int, bytes_moved: int = 0, work: of.Work = work, tile: Tile = tile) -> float:
            return of.expected_clocks(work, tile, tiles, bytes_moved, H200)

        fixed = 2 * clocks(splits) - clocks(2 * splits)
        assert fixed >= of.LAUNCH_CLOCKS
        assert clocks(3 * splits) - fixed == pytest.approx(3 * (clocks(splits) - fixed))
        assert clocks(1, 1000) - clocks(1) == pytest.approx(1000 * of.BYTE_CLOCKS)
        # One tile is one split, whose sums are not added to others.
        if splits > 1 == work.copies:
            sums = of.REDUCTION_CLOCKS + of.PARTIAL_BYTE_CLOCKS * work.split_bytes * splits
            assert clocks(splits) - clocks(1) >= sums * (1 - 1e-6)
            split += 1
    assert split > 10


def test_odd_rows_and_float32_without_tf32_take_longer_in_the_implicit_gemm() -> None:
    """In NCHW a row of an odd number of 16-bit elements passes through registers, one at a time."""

    def least(geometry: Geometry, mode: Mode, channels_last: bool = False) -> float:
        return min(one.clocks(geometry, H200) for one in schedules(posed(geometry, mode, channels_last)))

    odd = LAYER._replace(width=15, output_padding=(0, 1))
    assert odd.out_width % 2
    assert least(odd, FP16) > 1.2 * least(LAYER, FP16)
    assert least(odd, FP16, True) < 1.1 * least(LAYER, FP16, True)
    assert least(LAYER, IEEE) > 1.5 * least(LAYER, TF32)


def test_the_clocks_of_im2col_in_nchw_grow_with_copies_short_rings_and_rows_that_share_banks() -> None:
    of, aligned = grad_weight_im2col_nchw_clocks, Geometry(32, 128, 32, 32, 64, (4, 4), (2, 2), (1, 1))
    stage, *_ = grad_weight_im2col_nchw_tile.stages_of(aligned)
    # Rows of grad_output of an odd number of columns are copied.
    odd = aligned._replace(output_padding=(0, 1))
    copied = grad_weight_im2col_nchw_tile.copied_bytes(odd, stage)
    assert copied > 4 * 32 * 64 * 64 * 64
    copy = copy_clocks(2 * copied)
    moved = of.BYTE_CLOCKS * (tensor_bytes(odd, 4) - tensor_bytes(aligned, 4))
    assert of.fixed_clocks(odd, stage) - of.fixed_clocks(aligned, stage) == pytest.approx(copy + moved)
    half = H200._replace(shared_memory_per_block=H200.shared_memory_per_block // 2)
    small = Geometry(128, 256, 7, 7, 128, (4, 4), (2, 2), (1, 1))
    short = shared = 0
    for tile in nchw_tiles(posed(small, TF32), H200):
        kernel, stage = tile.kernel, tile.stage
        long, shorter = (grad_weight_im2col_nchw_tile.ring(small, kernel, stage, one) for one in (H200, half))
        clocks = of.stage_clocks(small, kernel, stage, H200)
        if long > shorter == grad_weight_im2col_nchw_tile.MIN_STAGES:
            assert of.stage_clocks(small, kernel, stage, half) == pytest.approx(of.SHORT_RING * clocks)
            short += 1
        # Whole maps of 7 rows of 7 pixels have as many steps as one row of 49.
        if stage.rows == stage.cols == 7:
            one_row = small._replace(height=1, width=49)
            row = replace(stage, rows=1, cols=49, pitch=49)
            assert row.steps(one_row) == stage.steps(small)
            assert clocks > of.stage_clocks(one_row, kernel, replace(row, images=1), H200)
            shared += 1
    assert short
    assert shared


def test_the_clocks_of_im2col_in_channels_last_grow_with_far_strides_splits_and_clusters() -> None:
    of, near = grad_weight_im2col_nhwc_clocks, Geometry(8, 128, 32, 32, 128, (4, 4), (2, 2), (1, 1))
    far = near._replace(stride=(2, 4))
    boxes = [tile for tile in nhwc_tiles(posed(near, TF32, True), H200) if tile.box_per_tap_col]
    assert len(boxes) > 10
    for tile in boxes:  # as many as with the other stride
        assert of.stage_clocks(near, tile) < of.stage_clocks(far, tile)
    split = paired = 0
    for one in of.pool(posed(near, TF32, True), H200):
        clocks, tile = one.best(near, H200) or (math.inf, one.tile)
        stage = of.stage_clocks(near, tile)
        rounds = -(-one.blocks * tile.splits // H200.multiprocessors)
        product = rounds * -(-stages_of(near, tile.pixels) // tile.splits) * stage
        rest = clocks - product - of.LAUNCH_CLOCKS - of.BYTE_CLOCKS * tensor_bytes(near, 4)
        gradient = of.GRADIENT_BYTE_CLOCKS * one.bytes_of_copy
        exchanges = rounds * of.EXCHANGE_CLOCKS if tile.cluster == 2 else 0
        sums = of.REDUCTION_CLOCKS + gradient * tile.copies if tile.copies > 1 else 0
        assert rest == pytest.approx(gradient + exchanges + sums, rel=1e-6, abs=1e-3)
        split += tile.copies > 1
        paired += tile.cluster == 2
    assert split > 3
    assert paired > 3


def test_the_clocks_of_stride1_grow_with_rows_and_short_rings() -> None:
    of = grad_weight_stride1_clocks
    geometry = Geometry(8, 64, 256, 512, 64, (3, 5))
    for problem in (posed(geometry, TF32), posed(geometry), posed(geometry, TF32, True)):
        twice = problem._replace(geometry=geometry._replace(batch=16))
        for tile in grad_weight_stride1_tile.candidates(problem, H200):
            clocks, taken = of.best_tile(problem, tile, H200)
            assert 1.7 * clocks < of.best_tile(twice, tile, H200)[0] < 2.1 * clocks
            sums = of.PARTIAL_BYTE_CLOCKS * taken.splits * 4 * math.prod(geometry.weight_shape)
            assert clocks > sums + of.FLUSH_CLOCKS
            columns = geometry.batch * -(-geometry.width // tile.cols) * geometry.out_height
            blocks = grad_weight_stride1_tile.tiles_of(geometry, tile)
            rows = columns * blocks * of.row_clocks(problem, tile) / H200.multiprocessors
            assert clocks < 1.5 * (rows + sums) + 2 * of.FLUSH_CLOCKS
            if tile.stages > tile.tap_rows + 1:
                short = replace(tile, stages=tile.tap_rows + 1)
                assert of.row_clocks(problem, short) > 1.05 * of.row_clocks(problem, tile)


# ---- every constant ---------------------------------------------------------------------------------------------


def expected_of_all(of: ModuleType) -> Iterator[float]:
    """Yields the expected clocks that a module counts, of kernels of all kinds for sizes of varied layers."""
    for geometry, mode, last in itertools.product(VARIED, (FP16, TF32, IEEE), (False, True)):
        problem = posed(geometry, mode, last)
        if of is grad_weight_clocks:
            for one in schedules(problem):
                work = of.work_of(problem, one.tile, one.operands)
                tiles = pixel_tiles(geometry, one.tile.shape)
                yield of.expected_clocks(work, one.tile, tiles, tensor_bytes(geometry, 4), H200)
        elif of is grad_weight_tma_clocks and grad_weight_tma.supports(problem, H200):
            for kernel, stage in tma_tiles(problem):
                stages = [(pixel_tiles(geometry, stage.shape), stage)]
                best = of.fastest(of.work_of(problem, kernel, H200), stages, geometry, H200)
                yield best.clocks if best else 0.0
        elif of is grad_weight_im2col_nchw_clocks and mode == TF32 and not last:
            kernels = list(grad_weight_im2col_nchw_tile.kernels(geometry))
            for kernel, best in zip(kernels, of.best_tiles(geometry, kernels, H200), strict=True):
                yield best[0] if best else 0.0
                for stage in grad_weight_im2col_nchw_tile.stages_of(geometry):
                    if grad_weight_im2col_nchw_tile.supports_stage(geometry, kernel, stage, H200):
                        yield of.stage_clocks(geometry, kernel, stage, H200)
        elif of is grad_weight_im2col_nhwc_clocks and mode == TF32 and last:
            for one in of.pool.__wrapped__(problem, H200)[:40]:
                best = one.best(geometry, H200)
                yield best[0] if best else 0.0
        elif of is grad_weight_stride1_clocks and grad_weight_stride1.supports(problem, H200):
            for rows in grad_weight_stride1_tile.candidates(problem, H200):
                yield of.best_tile(problem, rows, H200)[0]
        elif of is copies:
            yield of.copy_clocks(tensor_bytes(geometry, 2))
        elif of is grad_weight_bias_clocks:
            yield of.clocks(problem)
        elif of is pytorch_clocks:
            for taps in ((4, 4), (8, 9)):
                yield of.clocks(posed(geometry._replace(kernel=taps), mode, last), H200)


def constants_of(of: ModuleType) -> list[str]:
    """Returns the names of the clocks and factors that a module defines, not of what it imports."""
    names = [
        name.id
        for statement in ast.parse(inspect.getsource(of)).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and name.id.isupper()
    ]
    return [name for name in names if isinstance(getattr(of, name), int | float)]


#: The modules, how many constants they have at least, and constants that count elsewhere.
MODULES = (
    (grad_weight_clocks, 20, ("WORKSPACE_LIMIT_BYTES",)),
    (grad_weight_tma_clocks, 12, ()),
    (grad_weight_im2col_nchw_clocks, 11, ()),
    (grad_weight_im2col_nhwc_clocks, 9, ()),
    (grad_weight_stride1_clocks, 11, ()),
    (copies, 2, ()),
    (grad_weight_bias_clocks, 2, ()),
    (pytorch_clocks, 7, ("MARGIN",)),
)


@pytest.mark.parametrize(
    ("of", "least", "others"), MODULES, ids=[of.__name__.split(".")[-1] for of, *_ in MODULES]
)
def test_every_constant_counts(
    of: ModuleType, least: int, others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = list(expected_of_all(of))
    names = [name for name in constants_of(of) if name not in others]
    assert len(names) >= least
    for name in names:
        with monkeypatch.context() as patch:
            patch.setattr(of, name, type(vars(of)[name])(1.5 * vars(of)[name]))
            assert differs(expected_of_all(of), base), name


# ---- PyTorch's operator -----------------------------------------------------------------------------------------


def test_nothing_is_expected_of_pytorch_where_nothing_was_measured() -> None:
    clocks = pytorch_clocks.clocks
    for mode, last in itertools.product((TF32, FP16), (False, True)):
        problem = posed(LAYER, mode, last)
        assert clocks(problem, H200) < math.inf
        for other in (
            problem._replace(geometry=LAYER._replace(groups=2)),
            problem._replace(geometry=LAYER._replace(kernel=(8, 8))),
            problem._replace(dtype=torch.float32, precision="ieee"),
            problem._replace(dtype=torch.float64, precision="ieee"),
        ):
            assert clocks(other, H200) == math.inf
        for device in (AMPERE, plan.Device("sm_100", 148, 227 << 10)):
            assert clocks(problem, device) == math.inf


def test_pytorchs_operator_takes_longer_with_copies_of_nchw_and_in_tf32() -> None:
    clocks = pytorch_clocks.clocks
    assert clocks(posed(LAYER), H200) > clocks(posed(LAYER, channels_last=True), H200)
    assert clocks(posed(LAYER, TF32), H200) > clocks(posed(LAYER), H200)
    # Channels count in multiples of 64.
    more, odd = (LAYER._replace(in_channels=channels) for channels in (320, 257))
    per_byte = pytorch_clocks.BYTE_CLOCKS_NCHW
    bytes_of = [tensor_bytes(one, 2) for one in (more, odd)]
    saved = clocks(posed(more), H200) - clocks(posed(odd), H200)
    assert saved == pytest.approx(per_byte * (bytes_of[0] - bytes_of[1]))


@pytest.mark.parametrize("stage", ["grad_input", "grad_weight"])
def test_pytorchs_operator_is_taken_only_beyond_the_margin(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    why_native = getattr(measured, f"why_{stage}_is_native")
    mask = (stage == "grad_input", stage == "grad_weight", False)
    margin = pytorch_clocks.MARGIN
    assert margin > 1
    for family, stride in itertools.product(("implicit_gemm_tma", "narrow_mma", "gemm", "general"), (2, 10)):
        problem = posed(LAYER._replace(stride=(1, stride)), channels_last=True)
        ours = plan.expected_clocks(problem, mask, H200)
        for share, beyond in ((0.99, False), (1.01, True)):
            theirs = ours / (margin * share)
            monkeypatch.setattr(pytorch_clocks, "clocks", lambda *_, theirs=theirs: theirs)
            made = plan.plan_backward(problem, mask, H200)._replace(family=family)
            with monkeypatch.context() as patched:
                patched.setattr(plan, "plan_backward", lambda *_, made=made: made)
                why = why_native(problem, H200)
            # cuDNN's gradient of the weight was wrong in 16 bits with wide strides.
            wrong = stage == "grad_weight" and stride == 10
            assert (why is not None) == (beyond and family not in ("gemm", "general") and not wrong)
            assert why is None or f"{margin * share:.1f} times as fast" in why

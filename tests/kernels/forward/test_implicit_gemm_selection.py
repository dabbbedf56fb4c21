"""The kernels of the forward implicit GEMM that a layer has: how many there are, for which sizes each is right, that
every size has one, and how much longer sizes are expected to take than with the best kernel for each. No GPU."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import fields

import pytest
import torch
from implicit_gemm_tiles import choose, kernels_for, kernels_of
from implicit_gemm_tma_cases import random_geometry
from sampling import sampled
from size_cases import AMPERE, H200, LAYERS, MODES, any_size, random_sizes

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward import implicit_gemm_candidates as forward_candidates
from tconv_swap.kernels.forward import plan as forward_plan
from tconv_swap.kernels.forward import selection as forward_selection
from tconv_swap.kernels.forward.implicit_gemm_candidates import Schedule, Timer
from tconv_swap.kernels.forward.implicit_gemm_choice import candidates
from tconv_swap.kernels.forward.implicit_gemm_clocks import expected_clocks
from tconv_swap.kernels.forward.implicit_gemm_fit import fits_device
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    block_count,
    make_problem,
    of_any_size,
)
from tconv_swap.kernels.forward.implicit_gemm_shape import of_any_shape
from tconv_swap.kernels.forward.selection import limit_of, representatives
from tconv_swap.kernels.grad_input.implicit_gemm import as_forward
from tconv_swap.measurement.suite import Layer

Mode = tuple[torch.dtype, str]
TF32, FP16, IEEE = MODES
BY_NAME = {layer.name: layer.geometry for layer in LAYERS}
WIDE = Geometry(16, 256, 32, 32, 128, (4, 4), (2, 2), (1, 1))
FLAT = Geometry(16, 256, 32, 32, 128, (2, 2), (2, 2))


def posed(
    geometry: Geometry, mode: Mode = FP16, channels_last: bool = False, of_grad_input: bool = False
) -> TileProblem:
    """Returns a forward pass, or at stride 1 the gradient of the input as one."""
    if of_grad_input:
        return as_forward(plan.Problem(geometry, *mode, channels_last, channels_last))
    return make_problem(geometry, *mode, channels_last, channels_last, False)


def sized(problem: TileProblem, batch: int, height: int, width: int) -> TileProblem:
    return problem._replace(geometry=problem.geometry._replace(batch=batch, height=height, width=width))


def clocks(one: Schedule, problem: TileProblem, device: plan.Device = H200) -> float:
    seen = one.sees(problem)
    return math.inf if seen is None else Timer(one, device).clocks(seen)


# ---- how many, and one for every size ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "device"),
    [*((layer, H200) for layer in LAYERS), *sampled(((layer, AMPERE) for layer in LAYERS), 3)],
    ids=lambda one: one.architecture if isinstance(one, plan.Device) else one.name,
)
def test_a_layer_has_few_kernels_and_one_for_every_size(layer: Layer, device: plan.Device) -> None:
    """Half of the modes and layouts of each layer."""
    rng = random.Random(layer.name)
    for (i, mode), last, gradient in itertools.product(enumerate(MODES), (False, True), (False, True)):
        problem = posed(layer.geometry, mode, last, gradient)
        other = (LAYERS.index(layer) + i + last) % 2 or (gradient and max(layer.geometry.stride) > 1)
        if other or not forward_implicit_gemm.supports(problem, device):
            continue
        of_layer = of_any_size(problem)
        found_by_family = forward_selection.kernels_of(of_layer, device)
        every = [
            (one.name, kernel)
            for one in fields(found_by_family)
            for kernel in getattr(found_by_family, one.name)
        ]
        assert 1 <= len(set(every)) == len(every) <= limit_of(of_layer, device)
        kernels = kernels_of(of_layer, device)
        if device == AMPERE or mode == IEEE:
            assert not any(one.tile.wgmma for one in kernels)
        for _ in range(30):
            size = posed(any_size(rng, layer.geometry), mode, last, gradient)
            if size.one_pixel == problem.one_pixel and size.geometry.batch:
                assert all(one.sees(size) for one in kernels if one.computes_any_size), size
        for _ in range(6):
            size = posed(random_sizes(rng, layer.geometry), mode, last, gradient)
            if of_any_size(size) != of_layer or not forward_implicit_gemm.supports(size, device):
                continue
            assert forward_plan.ranked(size, device), size
            for seen, tile in choose(size, device)[: len(kernels)]:
                assert seen.geometry == size.geometry
                assert fits_device(seen, tile, device)
                found = expected_clocks(seen, tile, device.multiprocessors)
                assert not kernels or found == min(clocks(one, size, device) for one in kernels) < math.inf


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("seed", sampled(range(8), 2))
def test_every_size_of_random_layers_has_a_kernel(seed: int, channels_last: bool) -> None:
    rng, done = random.Random(seed), 0
    while done < 3:
        mode = rng.choice(MODES)
        problem = posed(random_geometry(rng, mode[0].itemsize), mode, channels_last)
        if not forward_implicit_gemm.supports(problem, H200):
            continue
        done += 1
        assert forward_plan.ranked(problem, H200), problem
        other = posed(random_sizes(rng, problem.geometry), mode, channels_last)
        if of_any_size(other) == of_any_size(problem) and forward_implicit_gemm.supports(other, H200):
            assert forward_plan.ranked(other, H200), other


def test_a_layer_whose_kernel_has_one_row_may_be_padded_across() -> None:
    """It is no layer of one dimension: maps of one row have no output."""
    layer = Geometry(2, 64, 16, 16, 64, (1, 4), (1, 2), (1, 1))
    for mode, last in itertools.product(MODES, (False, True)):
        problem = posed(layer, mode, last)
        assert forward_implicit_gemm.supports(problem, H200)
        assert len(choose(problem, H200)) == 1


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_any_number_of_images_of_one_pixel_has_a_kernel(channels_last: bool) -> None:
    for layer in (Geometry(1, 512, 1, 1, 256, (4, 4), (2, 2)), Geometry(1, 8, 1, 1, 16, (2, 2))):
        for mode, device in itertools.product(MODES, (H200, AMPERE)):
            problem = posed(layer, mode, channels_last)
            assert problem.one_pixel
            for batch in (1, 130, 20000):
                assert forward_plan.ranked(sized(problem, batch, 1, 1), device)


# ---- for which sizes a kernel is right --------------------------------------------------------------------------


MMA = Tile(4, 1, 1, 8, 16, 1, 2, 2, 8, 3, 2)
FLAT_MMA = Tile(4, 1, 1, 1, 64, 1, 1, 2, 8, 3, 2)
WGMMA = Tile(4, 1, 1, 8, 16, 1, 8, 2, 8, 4, 1, wgmma=True)
FLAT_WGMMA = Tile(4, 1, 1, 1, 128, 1, 1, 16, 8, 4, 1, wgmma=True)
TMA, FLAT_TMA = WGMMA._replace(tma=True), FLAT_WGMMA._replace(tma=True)
BY_ROWS = FLAT_TMA._replace(by_rows=True)
COPIED = posed(WIDE)._replace(input_channels_last=True, nhwc_copy=True)
FLAT_COPIED = posed(FLAT)._replace(input_channels_last=True, nhwc_copy=True)
Size = tuple[int, int, int]
#: What a kernel sees, its tile, sizes (batch, rows, columns) that it is right for, and other ones.
CASES: dict[str, tuple[TileProblem, Tile, list[Size], list[Size]]] = {
    "any": (posed(WIDE), WGMMA, [(1, 1, 1), (9999, 64, 64), (1, 2048, 2048), (3, 7, 5)], []),
    "any flat": (posed(FLAT), FLAT_WGMMA, [(1, 1, 1), (9999, 64, 64), (3, 7, 5)], []),
    "copied": (COPIED, TMA, [(1280, 64, 64), (3, 7, 5)], [(1281, 64, 64)]),
    "split": (posed(WIDE), MMA._replace(splits=2), [(16, 32, 32), (3, 7, 5)], [(17, 32, 32)]),
    "aligned rows": (
        posed(WIDE)._replace(aligned=True),
        WGMMA,
        [(3, 7, 8), (3, 7, 40)],
        [(8, 8, 4), (8, 8, 9)],
    ),
    "aligned rows of TF32": (posed(WIDE, TF32)._replace(aligned=True), MMA, [(3, 7, 4)], [(3, 8, 2)]),
    "aligned images": (
        *(posed(FLAT)._replace(aligned=True), FLAT_MMA),
        *([(3, 12, 14), (3, 4, 2)], [(3, 14, 14), (3, 16, 9), (3, 8, 1)]),
    ),
    "aligned images, wgmma": (
        *(posed(FLAT)._replace(aligned=True), FLAT_WGMMA),
        *([(3, 16, 16), (3, 64, 2)], [(3, 12, 14), (3, 128, 1), (3, 8, 8)]),
    ),
    "pixel-major": (
        *(posed(FLAT)._replace(aligned=True), FLAT_TMA._replace(cols=256, pixel_major=True)),
        *([(3, 16, 16)], [(3, 16, 24), (3, 8, 8)]),
    ),
    "transposed": (
        *(posed(FLAT)._replace(aligned=True), FLAT_WGMMA._replace(cols=256, nchw_stages=3)),
        *([(3, 16, 16)], [(3, 16, 24), (3, 8, 8)]),
    ),
    "rows of 128 positions": (
        *(FLAT_COPIED, BY_ROWS),
        *([(3, 5, 8), (3, 5, 2), (3, 5, 128)], [(3, 14, 14), (3, 5, 1), (3, 5, 12), (3, 5, 256)]),
    ),
    "rows of 56 positions": (
        *(FLAT_COPIED, BY_ROWS._replace(cols=112, warp_cols=7)),
        *([(3, 14, 14), (3, 5, 56), (3, 5, 8)], [(3, 7, 7), (3, 5, 16), (3, 5, 112)]),
    ),
    "several images": (
        *(posed(WIDE), MMA._replace(images=4, rows=8, cols=4, warp_images=1, warp_cols=1)),
        *([(3, 7, 5), (3, 128, 256)], [(3, 128, 257)]),
    ),
    "two images": (posed(WIDE), WGMMA._replace(images=2, cols=8), [(3, 1024, 1024), (3, 7, 5)], []),
    "narrow": (
        *(posed(WIDE), TMA._replace(images=2, cols=4)),
        *([(3, 4, 4), (3, 9, 1)], [(3, 4, 5), (3, 4, 64)]),
    ),
    "narrow, mma": (posed(WIDE), MMA._replace(images=2, cols=4), [(3, 4, 4), (3, 4, 64)], []),
}


@pytest.mark.parametrize("name", CASES)
def test_for_which_sizes_a_kernel_is_right(name: str) -> None:
    problem, tile, right, wrong = CASES[name]
    one = Schedule(of_any_size(problem), tile)
    given = problem._replace(aligned=False, nhwc_copy=False)
    for size in right:
        seen = one.sees(sized(given, *size))
        assert seen == sized(problem, *size), size
    for size in wrong:
        assert one.sees(sized(given, *size)) is None, size
    assert one.computes_any_size == (not wrong)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_kernel_computes_any_size_if_it_is_right_for_extreme_ones(mode: Mode, channels_last: bool) -> None:
    """Maps of one row and one column, odd ones, wide ones, images of 2^28 bytes, and batches of gibibytes."""
    sizes = ((1, 1, 1), (3, 7, 5), (2, 14, 14), (1, 1, 999), (1, 1024, 512), (8192, 64, 64), (9999, 9, 16))
    kinds = {False: 0, True: 0}
    for name in ("cyclegan1", "kb65", "unet4", "maskrcnn", "hifigan_up1", "dcgan2"):
        layer = posed(BY_NAME[name], mode, channels_last)
        for size in ((1, 16, 16), (256, 14, 14), (128, 4, 4), (8, 64, 64)):
            for one in kernels_for(sized(layer, *size), H200):
                always = all(one.sees(sized(layer, *extreme)) for extreme in sizes)
                assert one.computes_any_size == always, one
                kinds[always] += 1
    assert kinds[False] > 10
    assert kinds[True] > 20


def test_tiles_of_whole_rows_are_those_of_their_maps() -> None:
    """A warp of a flat tile stores whole rows of positions."""
    found = 0
    for mode, width in itertools.product((TF32, FP16), (2, 4, 7, 8, 10, 14, 16, 20, 28, 56, 64)):
        problem = posed(Geometry(64, 256, 14, width, 128, (2, 2), (2, 2)), mode)
        chosen = [*choose(problem, H200, 64), *candidates(problem, H200)]
        rows = [8 * tile.warp_cols for seen, tile in chosen if seen.flat and tile.by_rows]
        assert all(positions % width == 0 for positions in rows), width
        assert not (rows and width % 2)
        found += len(rows)
    assert found > 10


# ---- tiles that fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [H200, AMPERE], ids=lambda device: device.architecture)
@pytest.mark.parametrize("seed", sampled(range(20), 2))
def test_every_tile_of_a_size_fits_the_device(seed: int, device: plan.Device) -> None:
    """Also where a kernel of one size computes another one."""
    rng, done = random.Random(seed), 0
    while done < 3:
        mode, last = rng.choice(MODES), rng.random() < 0.5
        problem = posed(random_geometry(rng, mode[0].itemsize), mode, last)
        if not forward_implicit_gemm.supports(problem, device):
            continue
        done += 1
        other = posed(random_sizes(rng, problem.geometry, 40), mode, last)
        for seen, tile in candidates(problem, device):
            assert fits_device(seen, tile, device)
            assert device == H200 or not tile.wgmma
        for size, one in itertools.product((problem, other), kernels_for(problem, device)):
            if size.one_pixel == problem.one_pixel and (seen := one.sees(size)) is not None:
                _, tile = Timer(one, device).tile_for(seen)
                assert fits_device(seen, tile, device)
                assert of_any_shape(tile._replace(splits=min(tile.splits, 2))) == one.tile
                made = forward_implicit_gemm.lower(seen, tile, device)
                assert max(part.shared_bytes for part in made.launches) <= device.shared_memory_per_block
                assert made.workspace_bytes == 0 or made.launches


@pytest.mark.parametrize("mode", [TF32, FP16], ids=str)
def test_few_tiles_of_many_channels_are_split(mode: Mode) -> None:
    """Over at most 8 blocks, and no more than the multiprocessors have room for; where there are many tiles, into the
    two parts that the kernel is made for."""
    problem = posed(Geometry(1, 2048, 8, 8, 256, (4, 4), (2, 2), (1, 1)), mode, True)
    found: dict[int, set[bool]] = {}
    for batch in (1, 3, 6, 10):
        for seen, tile in candidates(sized(problem, batch, 8, 8), H200):
            if tile.splits == 1:
                continue
            assert tile.splits == 2
            assert fits_device(seen, tile, H200)
            one = Schedule(of_any_size(seen), of_any_shape(tile))
            timer = Timer(one, H200)
            _, taken = timer.tile_for(seen)
            blocks, room = block_count(seen, taken), H200.multiprocessors * tile.blocks_per_multiprocessor
            assert 4 * block_count(seen, tile._replace(splits=1)) < 3 * H200.multiprocessors
            assert 2 <= taken.splits <= 8
            assert blocks <= room or taken.splits == 2
            assert taken.splits == 8 or 2 * blocks > room
            assert timer.tile_for(sized(seen, 64, 64, 64))[1].splits == 2
            found.setdefault(taken.splits, set()).add(tile.tma)
    assert found == {2: {True, False}, 4: {True, False}, 8: {True, False}}
    assert any(tile.splits > 1 for _, tile in choose(problem, H200, 64))
    few_channels = problem._replace(geometry=problem.geometry._replace(in_channels=64))
    many_tiles = sized(problem, 64, 64, 64)
    for other in (few_channels, many_tiles):
        assert all(tile.splits == 1 for _, tile in candidates(other, H200))


# ---- how good they are ------------------------------------------------------------------------------------------


def test_the_best_kernels_of_a_size_come_first() -> None:
    """Those of the layer, the fastest first, then others."""
    for mode, last in itertools.product(MODES, (False, True)):
        problem = posed(BY_NAME["unet4"], mode, last)
        of_layer = kernels_of(of_any_size(problem), H200)
        own = sorted(expected for one in of_layer if (expected := clocks(one, problem)) < math.inf)
        found = choose(problem, H200, 500)
        expected = [expected_clocks(seen, tile, 132) for seen, tile in found]
        assert len(set(found)) == len(found) > len(own)
        assert expected[: len(own)] == own
        assert expected[len(own) :] == sorted(expected[len(own) :])
        assert choose(problem, H200, 2) == found[:2]
        every = {
            (seen, Timer(one, H200).tile_for(seen)[1])
            for one in kernels_for(problem, H200)
            if (seen := one.sees(problem))
        }
        assert every <= set(found)


#: How many times as long random sizes may be expected to take as with the best of all kernels, by their geometric mean,
#: in each mode in NCHW and in channels_last (found: 1.13, 1.02, 1.14, 1.02, 1.35, 1.14).
BOUNDS = (1.2, 1.06, 1.22, 1.07, 1.5, 1.22)


@pytest.mark.parametrize(
    ("mode", "channels_last", "bound"),
    [(mode, last, BOUNDS[2 * i + last]) for i, mode in enumerate(MODES) for last in (False, True)],
    ids=str,
)
def test_sizes_are_near_the_best_of_all_kernels(mode: Mode, channels_last: bool, bound: float) -> None:
    rng, regrets = random.Random(1), []
    for name in ("dcgan3", "cyclegan1", "stylegan2_mod", "hifigan_up1", "unet4", "kb78"):
        kernels = kernels_of(of_any_size(posed(BY_NAME[name], mode, channels_last)), H200)
        for _ in range(8):
            size = posed(random_sizes(rng, BY_NAME[name]), mode, channels_last)
            if not size.one_pixel:
                own = min(clocks(one, size) for one in kernels)
                best = min(clocks(one, size) for one in kernels_for(size, H200))
                regrets.append(max(1.0, own / best))
    assert len(regrets) > 40
    assert statistics.geometric_mean(regrets) < bound


def selected(layer: TileProblem) -> tuple[Schedule, ...]:
    """Returns the kernels of a layer as a new process selects them."""
    search = forward_selection.kernels_of.__wrapped__.__wrapped__  # type: ignore[attr-defined]
    found: tuple[Schedule, ...] = search(layer, H200).implicit_gemm
    return found


@pytest.mark.parametrize("name", ["hifigan_up1", "cyclegan1"])
def test_the_kernels_of_a_layer_are_always_the_same(name: str) -> None:
    for channels_last in (False, True):
        layer = of_any_size(posed(BY_NAME[name], FP16, channels_last))
        assert selected(layer) == selected(layer) == kernels_of(layer, H200)


def test_the_first_kernel_computes_any_size_where_others_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one size, whose best kernels read aligned rows or a copy."""
    monkeypatch.setattr(forward_candidates, "BEST", 1)
    faster = 0
    for name in ("unet4", "cyclegan1", "dcgan3", "kb57"):
        layer = of_any_size(posed(BY_NAME[name]))
        size = sized(layer, 16, 32, 32)
        monkeypatch.setattr(forward_selection, "representatives", lambda _, one=size: ([one], [1.0]))
        found = selected(layer)
        assert found[0].computes_any_size
        best = min(kernels_for(size, H200), key=lambda one: clocks(one, size))
        faster += not best.computes_any_size
        assert best.computes_any_size or best in found
    assert faster


def test_the_weights_of_sizes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = of_any_size(posed(BY_NAME["dcgan2"], TF32))
    sizes, weights = representatives(layer)

    def regret(kernels: tuple[Schedule, ...]) -> float:
        logs = [math.log(min(clocks(one, size) for one in kernels)) for size in sizes]
        return sum(weight * log for weight, log in zip(weights, logs, strict=True))

    weighted = selected(layer)
    reversed_weights = [1 / weight**2 for weight in weights]
    monkeypatch.setattr(forward_selection, "representatives", lambda _: (sizes, reversed_weights))
    assert regret(weighted) < regret(selected(layer))

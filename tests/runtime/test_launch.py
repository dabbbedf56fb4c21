"""The words of a plan that csrc/launch.cpp reads."""

from __future__ import annotations

import pytest
import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.runtime import launch, program


def handles_of(made: program.Plan) -> dict[program.Kernel, int]:
    return {one.kernel: 77 for one in made.launches}


@pytest.mark.parametrize(
    ("architecture", "overlaps"), [("sm_80", 0), ("sm_89", 0), ("sm_90a", 1), ("sm_120", 1)]
)
def test_kernels_that_do_not_wait_overlap_nothing(architecture: str, overlaps: int) -> None:
    kernel = program.Kernel("a.cu", "b", ())
    made = program.Plan("a", "b", (), (program.Launch(kernel, 1, 32, (), overlaps_previous=True),))
    words = launch.plan_words(made, torch.float32, architecture, {kernel: 7})
    assert words[words.index(7) + 4] == overlaps


def test_plan_words_are_what_launch_cpp_reads() -> None:
    problem = plan.Problem(Geometry(2, 4, 5, 6, 3, (3, 3)), torch.float32, "ieee", True, True)
    made = plan.plan_forward(problem, True, plan.Device("sm_75", 30, 48 << 10))
    words = launch.plan_words(made, torch.float32, "sm_75", handles_of(made))
    assert words[:2] == [made.workspace_bytes, 1]
    assert words[2:12] == [6, 4, 2, 3, 7, 8, 168, 1, 24, 3]
    assert words[12:14] == [len(made.launches), 77]
    one = made.launches[0]
    assert words[14:19] == [one.grid, one.block, one.shared_bytes, 0, len(one.arguments)]


def test_tensor_maps_and_structs_are_told_after_the_arguments() -> None:
    boxed = program.TensorMap(
        program.workspace(32),
        program.ElementKind.BFLOAT16,
        sizes=(64, 10, 9, 2),
        strides=(128, 1280, 11520),
        box=(64, 8, 4, 1),
        steps=(1, 2, 1, 1),
        fetched_bytes=64,
        offset=16,
    )
    one = program.Launch(
        program.Kernel("x.cu", "x", ()),
        1,
        32,
        (program.tensor_map(0),),
        512,
        tensor_maps=(boxed,),
        structs=((7, -1),),
    )
    made = program.Plan("a family", "a reason", (), (one,), workspace_bytes=64)
    words = launch.plan_words(made, torch.bfloat16, "sm_90a", handles_of(made))
    expected = [
        4,
        0,
        1,
        2,
        32,
        16,
        9,
        128,
        64,
        4,
        0,
        64,
        10,
        9,
        2,
        128,
        1280,
        11520,
        64,
        8,
        4,
        1,
        1,
        2,
        1,
        1,
        1,
        2,
        7,
        -1,
    ]
    assert words[-len(expected) :] == expected
    in_im2col_mode = boxed._replace(box=(64, 200), corners=(-1, -2, 0, 1))
    made = made._replace(launches=(one._replace(tensor_maps=(in_im2col_mode,)),))
    words = launch.plan_words(made, torch.bfloat16, "sm_90a", handles_of(made))
    expected = [*expected[:10], 4, *expected[11:18], 64, 200, 1, 2, 1, 1, -1, -2, 0, 1, *expected[-4:]]
    assert words[-len(expected) :] == expected
    moved = program.with_operands(one, lambda argument: program.input_(1))
    assert moved.operands == (program.input_(1), program.input_(1))

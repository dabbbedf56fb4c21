"""The ablation of the kernel families: its layers, candidates, arithmetic and its way through a run; on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from ablation_cases import DRAWN, GENERAL_ALONE, SUITE, made_up
from pretended_gpu import H200

from benchmarks.ablation_report import report
from benchmarks.ablation_rows import FALLBACKS, regrets, verdicts, worst, worth_of
from benchmarks.families import APART, PYTORCH, chosen, family_of, plans_of
from benchmarks.kernels import problem_of
from benchmarks.random_layers import CLASSES, MAX_ELEMENTS, MAX_MACS, OTHER, class_of, random_layers
from tconv_swap.geometry import Geometry
from tconv_swap.kernels.plan import with_weight_layout
from tconv_swap.kernels.problem import Problem
from tconv_swap.measurement.modes import MODES
from tconv_swap.measurement.suite import Layer
from tconv_swap.runtime.cache import csrc_directory
from tconv_swap.runtime.program import Plan

BY_NAME = {layer.name: layer for layer in (*SUITE, *DRAWN)}


# The random layers


def test_the_random_layers_are_the_same_again_and_differ_by_the_seed() -> None:
    assert random_layers() == DRAWN
    assert {layer.geometry for layer in random_layers(seed=1)}.isdisjoint(
        layer.geometry for layer in DRAWN if layer.geometry.batch > 1 and layer.geometry.height > 30
    )
    assert random_layers(2) == DRAWN[: 2 * len(CLASSES)]


def test_at_least_60_random_layers_of_every_class_of_moderate_size() -> None:
    assert (
        len({layer.geometry for layer in DRAWN}) == len({layer.name for layer in DRAWN}) == len(DRAWN) >= 60
    )
    assert [class_of(layer.geometry) for layer in DRAWN] == list(CLASSES) * (len(DRAWN) // len(CLASSES))
    for layer in DRAWN:
        g = layer.geometry
        assert max(math.prod(g.input_shape), math.prod(g.output_shape)) <= MAX_ELEMENTS
        assert g.macs <= MAX_MACS
    sizes = [size for layer in DRAWN for size in layer.geometry.input_shape[1:]]
    assert sum(size % 8 != 0 for size in sizes) >= len(sizes) / 4


@pytest.mark.parametrize("layer", DRAWN, ids=lambda layer: layer.name)
def test_pytorch_takes_every_random_layer(layer: Layer) -> None:
    g = layer.geometry
    input, weight = (torch.empty(shape, device="meta") for shape in (g.input_shape, g.weight_shape))
    output = torch.nn.functional.conv_transpose2d(
        input, weight, None, g.stride, g.padding, g.output_padding, g.groups, g.dilation
    )
    assert tuple(output.shape) == g.output_shape


def test_the_classes_of_the_suite() -> None:
    found = {class_of(layer.geometry) for layer in SUITE}
    assert found == {*CLASSES, OTHER}
    assert class_of(BY_NAME["kb81"].geometry) == OTHER
    assert class_of(BY_NAME["dcgan1"].geometry) == "gemm"
    assert class_of(BY_NAME["hifigan_up1"].geometry) == "vocoder"


# The families

#: Layers, modes, layouts and stages that between them have every family.
HAVING_ALL = (
    ("kb78", "fp16", "nchw", "forward"),
    ("kb81", "fp16", "nchw", "forward"),
    ("kb75", "fp16", "nchw", "forward"),
    ("fcn_up_dw", "fp16", "channels_last", "forward"),
    ("dcgan1", "fp16", "channels_last", "forward"),
    ("dcgan2", "fp16", "nchw", "forward"),
    ("dcgan5", "fp16", "channels_last", "forward"),
    ("cyclegan1", "tf32", "channels_last", "forward"),
    ("cyclegan1", "tf32", "channels_last", "grad_input"),
    ("cyclegan1", "tf32", "nchw", "grad_input"),
    ("cyclegan1", "fp16", "nchw", "grad_input"),
    ("cyclegan1", "fp16", "nchw", "grad_weight"),
    ("cyclegan1", "fp16", "nchw", "gradients"),
    ("cyclegan1", "fp16", "channels_last", "grad_weight"),
    ("cyclegan1", "tf32", "nchw", "grad_weight"),
    ("cyclegan1", "tf32", "channels_last", "grad_weight"),
    ("kb71", "tf32", "nchw", "grad_weight"),
    ("dcgan5", "fp16", "nchw", "grad_input"),
    ("dcgan5", "fp16", "nchw", "grad_weight"),
    ("centernet_dw", "tf32", "nchw", "gradients"),
    ("dcgan1", "tf32", "channels_last", "gradients"),
    ("fcn32s", "fp16", "nchw", "gradients"),
    ("dcgan5", "fp16", "nchw", "gradients"),
)


def posed(name: str, mode: str, layout: str, stage: str) -> Problem:
    problem = problem_of(BY_NAME[name], MODES[mode], layout)
    return problem if stage == "forward" else with_weight_layout(problem, problem.channels_last)


def families(name: str, mode: str, layout: str, stage: str) -> dict[str, Plan]:
    return plans_of(posed(name, mode, layout, stage), stage, BY_NAME[name].bias, H200)


def test_every_family_of_the_package_is_listed_for_a_layer() -> None:
    found: set[str] = set()
    for case in HAVING_ALL:
        for name in families(*case):
            found |= set(name.removeprefix("nchw_to_nhwc ").split(" + "))
    for stage in ("forward", "grad_input", "grad_weight"):
        wide = Problem(BY_NAME["kb81"].geometry, torch.float64, "ieee", False, False)
        found |= set(plans_of(wide, stage, False, H200))
    # No layer of the suite is tiny.
    tiny = Problem(Geometry(2, 8, 4, 4, 8, (2, 2), (2, 2)), torch.float32, "ieee", False, False)
    for stage in ("forward", "gradients"):
        found |= {name for name in plans_of(tiny, stage, False, H200) if name.endswith("tiny")}
    helpers = (
        "cast",
        "pad_rows",
        "nchw_to_nhwc",
        "pad_images",
        "split_k_reduce",
        "grad_bias_general",
    )
    files = [
        path
        for path in (csrc_directory() / "kernels").rglob("*.cu")
        if path.parent.name not in ("norm", "pad")
    ]
    sources = {"_".join((path.parent.name, path.stem)).removeprefix("common_") for path in files}
    ends = ("_pack", "_reduce", "_reduce_untiled", "_split_k")
    assert found == {name for name in sources if not name.startswith(helpers) and not name.endswith(ends)}


def test_plans_that_copy_have_other_names_than_those_that_do_not() -> None:
    assert {"forward_implicit_gemm_wgmma", "nchw_to_nhwc forward_implicit_gemm_tma"} <= families(
        "cyclegan1", "tf32", "nchw", "forward"
    ).keys()
    assert {"grad_weight_implicit_gemm_wgmma", "nchw_to_nhwc grad_weight_implicit_gemm_tma"} <= families(
        "cyclegan1", "fp16", "nchw", "grad_weight"
    ).keys()
    (name,) = both = families("cyclegan1", "fp16", "nchw", "gradients")
    assert name == "nchw_to_nhwc grad_input_im2col + grad_weight_implicit_gemm_tma"
    assert family_of(both[name]) == name


@pytest.mark.parametrize("case", HAVING_ALL, ids=" ".join)
def test_what_the_rule_takes_is_among_what_is_measured(case: tuple[str, str, str, str]) -> None:
    problem, stage, bias = posed(*case), case[-1], BY_NAME[case[0]].bias
    found = families(*case)
    assert {family_of(made): made for made in found.values()} == found
    taken = chosen(problem, stage, bias, H200, found)
    assert taken in {*found, PYTORCH} | ({APART} if stage == "gradients" else set())


def test_the_rule_takes_pytorch_instead_of_the_general_kernel() -> None:
    problem = problem_of(GENERAL_ALONE, MODES["fp16"], "nchw")
    assert list(plans_of(problem, "forward", True, H200)) == ["forward_general"]
    assert chosen(problem, "forward", True, H200, ["forward_general"]) == PYTORCH


# What rows say


def test_the_worth_of_a_family_is_a_geometric_mean_of_the_next_best() -> None:
    rows = [
        made_up({"pytorch": 8, "a": 2, "b": 4}, layer="1"),
        made_up({"pytorch": 3, "a": 6, "b": 4}, layer="2"),
        made_up({"pytorch": 10, "b": 5}, layer="3", of_suite=False),
        made_up({"a": 1}, layer="4"),
        made_up({"pytorch": 8, "a": 1}, layer="5", stage="grad_input"),
        made_up({"pytorch": 9, "a": 1}, layer="6", layout="channels_last"),
    ]
    worth = worth_of(rows, "forward", "a")
    assert worth is not None
    assert (worth.rows, worth.wins) == (4, 2)
    assert worth.of_stage == pytest.approx((2 * 1 * 1 * 1 * 9) ** (1 / 5))
    assert worth.margin == pytest.approx((2 * 9) ** (1 / 2))
    assert (worth.combination, worth.of_combination) == ("tf32 channels_last", pytest.approx(9))
    assert (worth.layer_class, worth.of_class) == ("k4s2, tf32 nchw", pytest.approx(2 ** (1 / 4)))
    assert worth.of_suite == pytest.approx(18 ** (1 / 4))
    assert worth.of_random == pytest.approx(1)
    assert worth_of(rows, "gradients", "a") is None


@pytest.mark.parametrize(("gain", "keeps"), [(1.009, False), (1.011, True)])
def test_a_family_worth_more_than_a_hundredth_of_its_stage_is_kept(gain: float, keeps: bool) -> None:
    rows = [made_up({"pytorch": gain, "a": 1}, layer=str(n)) for n in range(4)]
    assert [(one.family, one.keeps) for one in verdicts(rows)] == [("a", keeps)]


@pytest.mark.parametrize(("gain", "keeps"), [(1.29, False), (1.31, True)])
def test_a_family_worth_much_on_one_class_is_kept(gain: float, keeps: bool) -> None:
    rare = [made_up({"pytorch": gain, "a": 1}, layer=f"rare {n}", layer_class="pose") for n in range(3)]
    rest = [made_up({"pytorch": 1, "b": 9}, layer=str(n)) for n in range(200)]
    found = {one.family: one.keeps for one in verdicts(rare + rest)}
    assert found == {"a": keeps, "b": False}


def test_one_of_two_equal_families_is_dropped() -> None:
    rows = [made_up({"pytorch": 2, "a": 1, "b": 1.001}, layer=str(n)) for n in range(4)]
    assert [(one.family, one.keeps) for one in verdicts(rows)] == [("b", False), ("a", True)]


def test_families_that_other_gpus_need_are_kept() -> None:
    rows = [made_up({"pytorch": 1, "forward_implicit_gemm_mma": 2}, layer=str(n)) for n in range(4)]
    assert [(one.keeps, one.fallback) for one in verdicts(rows)] == [(True, True)]
    assert "forward_general" in FALLBACKS


def test_the_regret_of_the_rule() -> None:
    rows = [
        made_up({"pytorch": 1, "a": 2}, taken="a", layer="1"),
        made_up({"pytorch": 2, "a": 1}, taken="a", layer="2"),
        made_up({"pytorch": 2}, taken="a", layer="3"),
    ]
    (found,) = regrets(rows)
    assert (found.rows, found.mean, found.largest, found.above) == (2, pytest.approx(2**0.5), 2, 1)
    assert [one.layer for one in worst(rows)] == ["1"]
    text = report(rows)
    assert "| forward | 2 | 1.414 | 2.00 | 1 |" in text
    assert "| 1 (1x1) | tf32 nchw forward | a 2.0 us | pytorch 1.0 us | 2.00 |" in text

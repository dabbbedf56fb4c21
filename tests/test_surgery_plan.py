"""The plan: which layers are found, which patterns select them, which are left and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from surgery_models import NAMES, Net, swapped_names, up
from torch import Tensor, nn

from tconv_swap.surgery import SwapWarning, plan_swap, swap_layers

pytestmark = pytest.mark.filterwarnings("error::tconv_swap.surgery.SwapWarning")  # a test expects its own


def planned_names(model: nn.Module, **arguments: Any) -> list[str]:
    return [layer.names[0] for layer in plan_swap(model, **arguments).swapped]


# --- patterns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        (None, NAMES),
        ("**", NAMES),
        (["decoder.*"], ["decoder.up"]),
        (["decoder.**"], ["decoder.up", "decoder.block.0"]),
        (["decoder.*.*"], ["decoder.block.0"]),
        (["**.0"], ["decoder.up", "decoder.block.0", "heads.0"]),  # alias.0 is decoder.up
        (["*.0"], ["decoder.up", "heads.0"]),
        (["heads.?"], ["heads.0", "heads.1"]),
        (["heads.[!0]"], ["heads.1"]),
        (["heads.1", "decoder.up"], ["decoder.up", "heads.1"]),
        (["shared"], ["decoder.up"]),
        (("**.block.**.0",), ["decoder.block.0"]),
        (iter(["heads.0"]), ["heads.0"]),
        ([], []),
    ],
)
def test_include(include: Any, expected: list[str]) -> None:
    assert planned_names(Net(), include=include) == expected


@pytest.mark.parametrize(
    "pattern", ["decoder", "*", "eads.0", "heads", "heads.0.**.*", "HEADS.0", "decoder.u"]
)
def test_patterns_are_anchored(pattern: str) -> None:
    plan = plan_swap(nn.ModuleDict({"decoder": nn.ModuleDict({"up": up()}), "heads": nn.ModuleList([up()])}))
    assert len(plan.swapped) == 2
    plan = plan_swap(
        nn.ModuleDict({"decoder": nn.ModuleDict({"up": up()}), "heads": nn.ModuleList([up()])}),
        include=pattern,
    )
    assert plan.swapped == ()
    assert plan.unused_patterns == (pattern,)


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("heads.*", ["decoder.up", "decoder.block.0"]),
        (["alias.0"], ["decoder.block.0", "heads.0", "heads.1"]),
        (["**.0"], ["heads.1"]),
        (["**"], []),
    ],
)
def test_exclude(exclude: Any, expected: list[str]) -> None:
    assert planned_names(Net(), exclude=exclude) == expected


def test_include_exclude_and_filter_fn_together() -> None:
    def not_wide(module: nn.Module, name: str) -> bool:
        return name != "heads.1"

    assert planned_names(
        Net(), include=["heads.*", "decoder.**"], exclude=["decoder.block.*"], filter_fn=not_wide
    ) == [
        "decoder.up",
        "heads.0",
    ]


def test_filter_fn_may_know_a_shared_layer_by_any_name() -> None:
    assert planned_names(Net(), filter_fn=lambda module, name: name == "alias.0") == ["decoder.up"]


def test_only_double_star_names_the_root() -> None:
    assert planned_names(up(), include="**") == [""]
    assert planned_names(up(), include="*") == []


def test_unused_patterns_warn() -> None:
    model = Net()
    with pytest.warns(SwapWarning) as caught:
        swap_layers(model, include=["decoder", "heads.*"], exclude=["nowhere.**"])
    assert [str(warning.message) for warning in caught] == [
        "pattern 'decoder' matches no transposed convolution; 'decoder.**' would match what is below",
        "pattern 'nowhere.**' matches no transposed convolution",
    ]
    assert {warning.filename for warning in caught} == {__file__}
    assert swapped_names(model) == ["heads.0", "heads.1"]


def test_a_pattern_that_matches_a_layer_left_for_another_reason_is_used() -> None:
    model = nn.ModuleDict({"wave": nn.ConvTranspose1d(2, 2, 2), "up": up()})
    assert plan_swap(model, exclude="wave").unused_patterns == ()


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_patterns_are_strings(argument: str) -> None:
    with pytest.raises(TypeError, match=f"{argument}: expected patterns as strings, got 3"):
        plan_swap(Net(), **{argument: [3]})


# --- plans --------------------------------------------------------------------------------------------------


def test_plan_of_a_network() -> None:
    model = Net()
    plan = plan_swap(model, exclude="heads.1")
    assert swapped_names(model) == []
    assert [layer.names for layer in plan.layers] == [
        ("decoder.up", "shared", "alias.0"),
        ("decoder.block.0",),
        ("heads.0",),
        ("heads.1",),
    ]
    assert [layer.parameters for layer in plan.layers] == [68, 68, 34, 32]
    assert {layer.kind for layer in plan.layers} == {"ConvTranspose2d"}
    assert [layer.geometry for layer in plan.layers[2:]] == ["4->2 k2 s2 bias", "4->2 k2 s2"]
    assert [layer.reason for layer in plan.layers] == ["", "", "", "excluded by 'heads.1'"]
    assert [layer.names[0] for layer in plan.skipped] == ["heads.1"]


def test_plan_as_text() -> None:
    model = nn.ModuleDict({"a": up(), "b": up(8, 4, kernel_size=(3, 5), bias=False)})
    model["c"] = model["a"]
    swap_layers(model, include="a")
    assert str(plan_swap(model, exclude=["b", "x"])) == "\n".join(
        [
            "swapped: 1 of 2 transposed convolutions",
            "  a = c: ConvTranspose2d 4->4 k2 s2 bias, 68 parameters: already swapped",
            "  b: ConvTranspose2d 8->4 k3x5 s2, 480 parameters: leave: excluded by 'b'",
            "  pattern 'x' matches no transposed convolution",
        ]
    )
    assert str(plan_swap(up())).endswith(
        "\n  (the model itself): ConvTranspose2d 4->4 k2 s2 bias, 68 parameters: swap"
    )


def test_plan_as_plain_values() -> None:
    plan = plan_swap(Net(), include=["**.up", "x"])
    again = json.loads(json.dumps(plan.to_dict()))
    assert again["unused_patterns"] == ["x"]
    assert again["layers"][0] == {
        "names": ["decoder.up", "shared", "alias.0"],
        "kind": "ConvTranspose2d",
        "geometry": "4->4 k2 s2 bias",
        "parameters": 68,
        "swap": True,
        "reason": "",
        "already": False,
    }
    assert again["layers"][1]["reason"] == "matches no include pattern"


@pytest.mark.parametrize(
    ("layer", "geometry"),
    [
        (nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), "128->64 k4 s2 p1"),
        (nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1), "4->4 k3 s2 p1 op1 bias"),
        (
            nn.ConvTranspose2d(
                8, 4, (3, 5), (2, 3), (1, 2), output_padding=(0, 1), dilation=(2, 1), groups=4
            ),
            "8->4 k3x5 s2x3 p1x2 op0x1 d2x1 g4 bias",
        ),
        (nn.ConvTranspose1d(4, 2, 8, 4, 2), "4->2 k8 s4 p2 bias"),
        (nn.ConvTranspose3d(4, 2, (1, 2, 2), bias=False), "4->2 k1x2x2"),
        (nn.LazyConvTranspose2d(4, 2), "?->4 k2 bias"),
    ],
)
def test_the_short_form_of_a_geometry(layer: nn.Module, geometry: str) -> None:
    assert plan_swap(layer).layers[0].geometry == geometry


def test_nothing_to_swap_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    plan = plan_swap(model)
    assert plan.layers == ()
    assert str(plan) == "nothing to swap: no layer of the model is a transposed convolution"
    with pytest.warns(
        SwapWarning, match="nothing to swap: no layer of the model is a transposed convolution"
    ):
        assert swap_layers(model) is model


def test_nothing_that_can_be_swapped_says_why() -> None:
    with pytest.warns(SwapWarning, match=r"0 of 1 transposed convolutions\n  0: ConvTranspose1d .* only 2-D"):
        swap_layers(nn.Sequential(nn.ConvTranspose1d(3, 4, 3)))


# --- layers that are left -----------------------------------------------------------------------------------


class OwnForward(nn.ConvTranspose2d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(input, output_size) * 2


class OwnPickling(nn.ConvTranspose2d):
    def __reduce__(self) -> Any:
        return OwnPickling, (4, 4, 2)


class Sealed(nn.ConvTranspose2d):
    def __init_subclass__(cls) -> None:
        raise TypeError("Sealed is final")


def with_replaced_forward() -> nn.Module:
    layer = up()
    layer.forward = lambda x: x
    return layer


def reference_quantized() -> nn.Module:
    from torch.ao.nn.quantized import reference

    return reference.ConvTranspose2d(4, 4, 2)


@pytest.mark.filterwarnings("ignore:Complex modules", "ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("make", "kind", "reason"),
    [
        (lambda: OwnForward(4, 4, 2), "OwnForward", "OwnForward has a forward of its own"),
        (lambda: OwnPickling(4, 4, 2), "OwnPickling", "OwnPickling has its own way of being pickled"),
        (lambda: Sealed(4, 4, 2), "Sealed", "Sealed cannot be subclassed (Sealed is final)"),
        (with_replaced_forward, "ConvTranspose2d", "its forward was replaced on the instance"),
        (
            lambda: nn.LazyConvTranspose2d(4, 2),
            "LazyConvTranspose2d",
            "lazy and not initialised; run the model once, then swap",
        ),
        (lambda: up(dtype=torch.complex64), "ConvTranspose2d", "unsupported dtype torch.complex64"),
        (
            lambda: nn.ConvTranspose1d(4, 4, 2),
            "ConvTranspose1d",
            "1-D; only 2-D layers are swapped without include_1d (--include-1d)",
        ),
        (lambda: nn.ConvTranspose3d(4, 4, 2), "ConvTranspose3d", "3-D; only 2-D layers are swapped"),
        (
            reference_quantized,
            "ConvTranspose2d",
            "quantized (torch.ao.nn.quantized.reference.modules.conv)",
        ),
        (
            lambda: torch.jit.script(up()),
            "ConvTranspose2d",
            "compiled by TorchScript, which has fixed its code",
        ),
        (
            lambda: torch.jit.trace(up(), torch.zeros(1, 4, 2, 2)),
            "ConvTranspose2d",
            "compiled by TorchScript, which has fixed its code",
        ),
    ],
)
def test_layers_that_are_left_have_a_reason(make: Callable[[], nn.Module], kind: str, reason: str) -> None:
    layer = make()
    cls = type(layer)
    model = nn.ModuleDict({"first": up(), "odd": layer, "last": up()})
    plan = plan_swap(model)
    assert [(skipped.kind, skipped.reason) for skipped in plan.skipped] == [(kind, reason)]
    json.dumps(plan.to_dict())
    swap_layers(model)
    assert swapped_names(model) == ["first", "last"]
    assert type(layer) is cls


def test_integer_weights_are_left() -> None:
    layer = up()
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    assert plan_swap(layer).layers[0].reason == "unsupported dtype torch.int8"


@pytest.mark.skipif(not torch.backends.quantized.supported_engines, reason="torch has no quantized engine")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flavour", ["torch.ao.nn.quantized", "torch.ao.nn.quantized.dynamic"])
def test_quantized_is_left(flavour: str) -> None:
    module = pytest.importorskip(flavour)
    plan = plan_swap(
        nn.Sequential(module.ConvTranspose2d(4, 2, 2), module.ConvTranspose2d(4, 2, 2, bias=False))
    )
    assert [layer.geometry for layer in plan.layers] == ["4->2 k2 bias", "4->2 k2"]
    layer = plan.layers[0]
    assert (layer.kind, layer.swap) == ("ConvTranspose2d", False)
    assert layer.reason.startswith(f"quantized ({flavour}.")


def test_lazy_is_swapped_once_it_has_run() -> None:
    model = nn.Sequential(nn.LazyConvTranspose2d(4, 2))
    model(torch.zeros(1, 3, 2, 2))
    assert plan_swap(model).layers[0].geometry == "3->4 k2 bias"
    assert swapped_names(swap_layers(model)) == ["0"]

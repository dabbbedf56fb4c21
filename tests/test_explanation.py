"""``explain``: kernels, tiles, reasons, work and bounds of layers and networks, for GPUs that this machine lacks."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import tconv_swap
from tconv_swap import op
from tconv_swap.cuda.choice import WHY_NOT_GENERAL
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.layer_calls import DEVICES
from tconv_swap.measurement.modes import MODES

DCGAN = tconv_swap.ConvTranspose2d(128, 64, 4, 2, 1)
X = torch.empty(128, 128, 16, 16, device="meta")


@pytest.fixture(autouse=True)
def _tf32():
    with MODES["tf32"].switched_on():
        yield


def test_a_layer_on_a_gpu_that_this_machine_does_not_have() -> None:
    (layer,) = tconv_swap.explain(DCGAN, X, architecture="sm_90a").layers
    assert (layer.name, layer.geometry, layer.device) == ("", "128->64 k4 s2 p1", "sm_90a")
    assert (layer.dtype, layer.precision, layer.layout) == ("float32", "tf32", "contiguous")
    assert layer.input_shape == (128, 128, 16, 16)
    forward = layer.stages[0]
    geometry = Geometry(128, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))
    made = plan.plan_forward(
        plan.Problem(geometry, torch.float32, "tf32", False, False),
        True,
        plan.Device("sm_90a", *DEVICES["sm_90a"]),
    )
    assert (forward.stage, forward.backend, forward.family, forward.why) == (
        "forward",
        "kernel",
        made.family,
        made.why,
    )
    assert [kernel.entry for kernel in forward.kernels] == [one.kernel.entry for one in made.launches]
    assert [kernel.grid for kernel in forward.kernels] == [one.grid for one in made.launches]
    assert forward.kernels[-1].constants == dict(made.launches[-1].kernel.constants)
    assert forward.workspace_bytes == made.workspace_bytes
    assert forward.bytes == 4 * geometry.elements
    assert 0 < forward.flops < 2 * geometry.macs
    assert forward.bound == "arithmetic"
    assert forward.roof_us == pytest.approx(forward.flops / 417e12 * 1e6)
    assert "measured on an H200" in forward.ceilings


@pytest.mark.parametrize("architecture", DEVICES)
def test_every_architecture_has_a_plan(architecture: str) -> None:
    text = str(tconv_swap.explain(DCGAN, X, architecture=architecture))
    assert architecture in text
    assert "GFLOP" in text


def test_gradients_say_what_computes_them() -> None:
    explained = tconv_swap.explain(DCGAN, X, architecture="sm_75")
    forward, backward = explained.layers[0].stages
    assert (forward.backend, forward.family, forward.why, forward.kernels) == (
        "native",
        "native",
        WHY_NOT_GENERAL,
        (),
    )
    assert backward.stage == "grad_input, grad_weight, grad_bias"
    assert backward.flops > 2 * forward.flops
    assert explained.native == (
        f"(the model itself): PyTorch computes forward ({WHY_NOT_GENERAL})",
        f"(the model itself): PyTorch computes {backward.stage} ({WHY_NOT_GENERAL})",
    )
    assert len(tconv_swap.explain(DCGAN, X, architecture="sm_75", backward=False).layers[0].stages) == 1
    forced = copy.deepcopy(DCGAN)
    forced.tconv_backend = "kernel"
    assert {
        stage.backend for stage in tconv_swap.explain(forced, X, architecture="sm_75").layers[0].stages
    } == {"kernel"}


def test_dtype_layout_and_bound_follow_the_tensors() -> None:
    layer = tconv_swap.ConvTranspose2d(
        64, 64, 2, 2, groups=64, bias=False, device="meta", dtype=torch.bfloat16
    )
    x = torch.empty(8, 64, 64, 64, device="meta", dtype=torch.bfloat16, memory_format=torch.channels_last)
    (explained,) = tconv_swap.explain(layer, x, architecture="sm_80").layers
    assert (explained.dtype, explained.layout, explained.precision) == ("bfloat16", "channels_last", "")
    assert explained.stages[0].bound == "memory"
    assert "A100" in explained.stages[0].ceilings
    double = tconv_swap.ConvTranspose2d(4, 4, 2, device="meta", dtype=torch.float64)
    x = torch.empty(2, 4, 3, 3, device="meta", dtype=torch.float64, memory_format=torch.channels_last)
    (explained,) = tconv_swap.explain(double, x, architecture="sm_90a").layers
    assert explained.layout == "contiguous"
    assert (explained.stages[0].bound, explained.stages[0].roof_us) == ("unknown", None)


def test_a_layer_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "conv_transpose2d", None)
    tconv_swap.explain(DCGAN, torch.randn(1, 128, 2, 2))
    (explained,) = tconv_swap.explain(DCGAN, (torch.randn(128, 2, 2), [5, 5]), architecture="sm_90a").layers
    assert explained.input_shape == (128, 2, 2)
    assert "op1" in explained.geometry


def test_a_network_layer_by_layer_on_the_cpu() -> None:
    model = nn.Sequential(
        nn.ConvTranspose2d(100, 32, 4), nn.BatchNorm2d(32), nn.ConvTranspose2d(32, 3, 4, 2, 1)
    )
    tconv_swap.swap_layers(model)
    before = copy.deepcopy(model.state_dict())
    explained = tconv_swap.explain(model, torch.randn(2, 100, 1, 1))
    assert [(layer.name, layer.device) for layer in explained.layers] == [("0", "cpu"), ("2", "cpu")]
    assert [stage.family for stage in explained.layers[0].stages] == ["outer", "outer"]
    assert [stage.backend for stage in explained.layers[1].stages] == ["native", "native"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert json.loads(json.dumps(explained.to_dict()))["layers"][0]["name"] == "0"
    assert "outer (one product" in str(explained)
    model[0].tconv_backend = "native"
    assert "the backend is native" in str(tconv_swap.explain(model, torch.randn(2, 100, 1, 1)).layers[0])


def test_the_cpu_has_no_tf32_and_meta_tensors_use_the_layers_device() -> None:
    nowhere = tconv_swap.ConvTranspose2d(128, 64, 4, 2, 1, device="meta")
    for layer in (DCGAN, nowhere):
        explained = tconv_swap.explain(layer, X).layers[0]
        assert (explained.dtype, explained.precision, explained.device) == ("float32", "ieee", "cpu")
        assert "float32 contiguous, cpu" in str(explained)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("architecture", [None, "sm_80", "sm_90a"])
def test_dtypes_that_are_left_to_pytorch(dtype: torch.dtype, architecture: str | None) -> None:
    layer = tconv_swap.ConvTranspose2d(128, 64, 4, 2, 1).to(dtype)
    x = torch.empty(2, 128, 1, 1, dtype=dtype)  # one pixel: in float32 not PyTorch's
    explained = tconv_swap.explain(layer, x, architecture=architecture)
    name = str(dtype).removeprefix("torch.")
    assert explained.native == (
        f"(the model itself): PyTorch computes forward (our kernels do not take {name})",
        "(the model itself): PyTorch computes grad_input, grad_weight, grad_bias "
        f"(our kernels do not take {name})",
    )
    assert explained.layers[0].stages[0].roof_us is None
    assert len(tconv_swap.explain(layer, x, architecture=architecture, backward=False).native) == 1


def test_autocast_changes_the_explained_dtype() -> None:
    model = tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        explained = tconv_swap.explain(model, torch.randn(2, 4, 3, 3), architecture="sm_90a")
    assert explained.layers[0].dtype == "bfloat16"


def test_nothing_swapped_and_unknown_architectures() -> None:
    explained = tconv_swap.explain(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)), torch.randn(2, 4, 3, 3))
    assert explained.layers == ()
    assert str(explained) == "no swapped layer was called"
    with pytest.raises(ValueError, match=r"sm_90a.*got 'sm_1'"):
        tconv_swap.explain(DCGAN, X, architecture="sm_1")
    with pytest.raises(RuntimeError, match="channels"):
        tconv_swap.explain(DCGAN, torch.empty(1, 4, 3, 3, device="meta"), architecture="sm_90a")


@pytest.mark.gpu
def test_on_this_gpu() -> None:
    layer = tconv_swap.ConvTranspose2d(16, 8, 4, 2, 1).cuda()
    (explained,) = tconv_swap.explain(layer, torch.randn(2, 16, 9, 9, device="cuda")).layers
    assert torch.cuda.get_device_name() in explained.device
    assert explained.stages[0].kernels

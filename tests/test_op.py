"""The torch op on the CPU: arguments, errors, gradients of every order, autocast, fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from tconv_swap import graph, op
from tconv_swap.cpu import call as cpu_call
from tconv_swap.geometry import as_list
from tconv_swap.op import conv_transpose2d

GEOMETRY = dict(stride=(2, 1), padding=(1, 0), output_padding=(1, 0), groups=2, dilation=(1, 2))
OP_ARGUMENTS = ([2, 1], [1, 0], [1, 0], 2, [1, 2])


def leaves(dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3, 4), (4, 3, 3, 2), (6,))
    return [torch.randn(s, dtype=dtype, generator=generator).requires_grad_(requires_grad) for s in shapes]


@pytest.mark.parametrize(
    "change",
    [
        dict(stride=0),
        dict(stride=(1, -2)),
        dict(padding=-1),
        dict(output_padding=-1),
        dict(output_padding=1),
        dict(output_padding=(0, 2), stride=2, dilation=2),
        dict(groups=0),
        dict(groups=-1),
        dict(groups=3),
        dict(padding=9),
        dict(stride=(1, 2, 3)),
        dict(stride=()),
        dict(stride="a"),
        dict(stride=2.0),
        dict(padding=None),
        dict(input=(2, 3, 5, 6)),
        dict(input=(5, 6)),
        dict(input=(1, 2, 4, 5, 6)),
        dict(input=(2, 4, 0, 6)),
        dict(weight=(4, 3, 3)),
        dict(weight=(4, 0, 3, 3)),
        dict(weight=(4, 3, 0, 3)),
        dict(bias=(4,)),
        dict(bias=(3, 1)),
    ],
    ids=str,
)
def test_bad_arguments_raise_what_pytorch_raises_and_name_the_argument(change: dict) -> None:
    shapes = dict(input=(2, 4, 5, 6), weight=(4, 3, 3, 3), bias=(3,))
    named = next(iter(change))
    call = {k: torch.randn(change.pop(k, shape)) for k, shape in shapes.items()} | change
    with pytest.raises((RuntimeError, TypeError, ValueError)) as native:
        F.conv_transpose2d(**call)
    with pytest.raises(type(native.value)) as ours:
        conv_transpose2d(**call)
    message = str(ours.value).lower().replace(" ", "_")
    assert named in message or (named == "padding" and "output_size_is_too_small" in message)
    value = change.get(named)
    numbers = value if isinstance(value, tuple) else (value,)
    assert value is None or all(str(n) in message for n in numbers), message


def test_dilation_zero_raises() -> None:
    x, w, _ = leaves()
    with pytest.raises(RuntimeError, match=r"non-positive dilation.*\[0, 0\]"):
        conv_transpose2d(x, w, dilation=0)


def test_mixed_dtypes_raise_and_name_both() -> None:
    x, w, b = leaves()
    with pytest.raises(RuntimeError, match=r"torch.float64.*weight type \(torch.float32\)"):
        conv_transpose2d(x, w.float())
    with pytest.raises(RuntimeError, match="bias type"):
        conv_transpose2d(x, w, b.float(), **GEOMETRY)


def test_integers_raise_and_complex_works_as_in_pytorch() -> None:
    x, w, _ = leaves(requires_grad=False)
    with pytest.raises(NotImplementedError):
        conv_transpose2d(x.int(), w.int())
    z = x.to(torch.complex128)
    torch.testing.assert_close(conv_transpose2d(z, w + 0j), F.conv_transpose2d(z, w + 0j))


def test_gradcheck_and_gradgradcheck_for_every_set_of_gradients() -> None:
    def function(x, w, b):
        return conv_transpose2d(x, w, b, **GEOMETRY)

    assert torch.autograd.gradcheck(function, leaves())
    for wanted in itertools.product([True, False], repeat=3):
        if any(wanted):
            small = [t.detach()[..., :2, :2] if t.dim() == 4 else t.detach() for t in leaves()]
            inputs = [t.requires_grad_(w) for t, w in zip(small, wanted, strict=True)]
            assert torch.autograd.gradgradcheck(function, inputs), wanted


def test_opcheck() -> None:
    forward = torch.ops.tconv_swap.conv_transpose2d.default
    backward = torch.ops.tconv_swap.conv_transpose2d_gradients.default
    x, w, b = leaves()
    torch.library.opcheck(forward, (x, w, b, *OP_ARGUMENTS, "auto"))
    torch.library.opcheck(forward, (x, w, None, *OP_ARGUMENTS, "auto"))
    grad = torch.randn_like(forward(x, w, b, *OP_ARGUMENTS, "auto"))
    for mask in ([True, True, True], [True, False, False], [False, True, False], [True, False, True]):
        torch.library.opcheck(backward, (grad, x.detach(), w.detach(), as_list(OP_ARGUMENTS), mask, "auto"))


def test_a_compiled_graph_calls_ops_below_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd and autocast have acted when the graph was made; calling them again would cost time."""
    monkeypatch.setattr(op, "is_plain", lambda *_: False)
    called = []

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        called.extend(str(node.target) for node in graph.graph.nodes if "tconv_swap" in str(node.target))
        return make_boxed_func(graph.forward)

    x, w, b = leaves()
    compiled = torch.compile(
        lambda *tensors: conv_transpose2d(*tensors, **GEOMETRY), backend=aot_autograd(fw_compiler=keep)
    )
    gradients = torch.autograd.grad(compiled(x, w, b).square().sum(), (x, w, b))
    assert called == [
        "tconv_swap.conv_transpose2d_output.default",
        "tconv_swap.conv_transpose2d_gradients.default",
    ]
    exact = torch.autograd.grad(F.conv_transpose2d(x, w, b, **GEOMETRY).square().sum(), (x, w, b))
    torch.testing.assert_close(gradients, exact)


def test_results_have_the_layout_of_the_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operator returns NCHW unless it uses cuDNN, whatever the input's format."""
    forward, backward = cpu_call.output, cpu_call.gradients

    def gradients_in_nchw(*arguments: Any) -> list[torch.Tensor]:
        return [gradient.contiguous() for gradient in backward(*arguments)]

    monkeypatch.setattr(graph, "is_eager", lambda: False)
    monkeypatch.setattr(cpu_call, "output", lambda *a: forward(*a).contiguous())
    monkeypatch.setattr(cpu_call, "gradients", gradients_in_nchw)
    x, w, b = leaves(requires_grad=False)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.ops.tconv_swap.conv_transpose2d(x, w, b, *OP_ARGUMENTS, "auto")
    found = torch.ops.tconv_swap.conv_transpose2d_gradients(
        y, x, w, as_list(OP_ARGUMENTS), [True] * 3, "auto"
    )
    for tensor in (y, *found[:2]):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()


def test_only_the_gradients_needed_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    original = torch.ops.aten.convolution_backward

    def spy(*args):
        masks.append(list(args[-1]))
        return original(*args)

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", spy)
    x, w, b = leaves()
    for wanted in itertools.product([True, False], repeat=3):
        if not any(wanted[:2]):
            continue
        inputs = [t.detach().requires_grad_(need) for t, need in zip((x, w, b), wanted, strict=True)]
        conv_transpose2d(*inputs, **GEOMETRY).sum().backward()
        assert [t.grad is not None for t in inputs] == list(wanted)
        assert not [m for m in masks if any(got and not need for got, need in zip(m, wanted, strict=True))]
        masks.clear()


def test_a_wrong_gradient_shape_raises() -> None:
    x, w, _ = leaves(requires_grad=False)
    with pytest.raises(RuntimeError, match="grad_output of size"):
        torch.ops.tconv_swap.conv_transpose2d_gradients(x, x, w, as_list(OP_ARGUMENTS), [True] * 3, "auto")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_pytorchs(dtype: torch.dtype) -> None:
    x, w, b = leaves(torch.float32)
    with torch.autocast("cpu", dtype):
        y = conv_transpose2d(x, w, b, **GEOMETRY)
        native = F.conv_transpose2d(x, w, b, **GEOMETRY)
        assert y.dtype == native.dtype == dtype
        assert conv_transpose2d(x.double(), w.double()).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert conv_transpose2d(x, w).dtype == torch.float32
    torch.testing.assert_close(y, native)
    y.float().sum().backward()
    assert {t.grad.dtype for t in (x, w, b)} == {torch.float32}


def test_fake_and_meta_tensors_have_the_shape_and_format_of_the_real() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, w, b = leaves(torch.float32, requires_grad=False)
    for layout in (torch.contiguous_format, torch.channels_last):
        laid_out = x.to(memory_format=layout)
        real = conv_transpose2d(laid_out, w, b, **GEOMETRY)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in (laid_out, w, b)]
            fake = conv_transpose2d(*fakes, **GEOMETRY)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    meta = conv_transpose2d(x.to("meta"), w.to("meta"), **GEOMETRY)
    assert meta.shape == real.shape
    with pytest.raises(RuntimeError, match="channels"):
        conv_transpose2d(x[:, :3].to("meta"), w.to("meta"), **GEOMETRY)


def test_other_devices_use_pytorchs_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "SUPPORTED_DEVICES", ("cuda",))
    monkeypatch.setattr(op, "is_plain", lambda *_: False)
    monkeypatch.setattr(graph, "output", lambda *_: pytest.fail("computed by us"))
    monkeypatch.setattr(op, "_whole_op", lambda *_: pytest.fail("computed by us"))
    x, w = torch.randn(2, 4, 5, 6), torch.randn(4, 6, 3, 3)
    assert torch.equal(conv_transpose2d(x, w, None, 2, 1), F.conv_transpose2d(x, w, None, 2, 1))
    # A direct call of the op raises.
    with pytest.raises(NotImplementedError, match="input is on meta"):
        graph.compute_output(x.to("meta"), w.to("meta"), None, [2, 2, 1, 1, 0, 0, 1, 1, 1], "auto")


def test_compiles_without_a_graph_break_forward_and_backward() -> None:
    x, w, b = leaves(torch.float32)
    compiled = torch.compile(
        lambda x, w, b: conv_transpose2d(x, w, b, **GEOMETRY).relu(), fullgraph=True, backend="aot_eager"
    )
    compiled(x, w, b).sum().backward()
    got = [t.grad for t in (x, w, b)]
    again = leaves(torch.float32)
    F.conv_transpose2d(*again, **GEOMETRY).relu().sum().backward()
    torch.testing.assert_close(got, [t.grad for t in again])


def test_unbatched_and_empty_batch() -> None:
    x, w, b = leaves()
    one = conv_transpose2d(x[0], w, b, **GEOMETRY)
    torch.testing.assert_close(one, F.conv_transpose2d(x[0], w, b, **GEOMETRY))
    empty = x[:0].detach().requires_grad_()
    y = conv_transpose2d(empty, w, b, **GEOMETRY)
    assert y.shape == F.conv_transpose2d(empty, w, b, **GEOMETRY).shape
    y.sum().backward()
    assert empty.grad.shape == empty.shape
    assert not w.grad.any()
    assert not b.grad.any()


class Recording(torch.Tensor):
    """A tensor whose operators go through __torch_dispatch__, like those of DTensor and quantized weights."""

    seen: list[str] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Recording:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        cls.seen.append(str(function))
        unwrapped = [a.inner if isinstance(a, Recording) else a for a in arguments]
        return function(*unwrapped, **(keywords or {}))


@pytest.mark.parametrize("wrapped", ["input", "weight", "bias"])
def test_tensor_subclasses_see_the_op(wrapped: str) -> None:
    tensors = dict(
        zip(
            ("input", "weight", "bias"),
            (torch.randn(2, 8, 1, 1), torch.randn(8, 3, 4, 4), torch.randn(3)),
            strict=True,
        )
    )
    expected = F.conv_transpose2d(*tensors.values())
    tensors[wrapped] = Recording(tensors[wrapped])
    Recording.seen.clear()
    with torch.no_grad():
        result = conv_transpose2d(*tensors.values())
    assert "tconv_swap.conv_transpose2d_output.default" in Recording.seen
    torch.testing.assert_close(result, expected)


def test_distributed_tensors_use_pytorchs_operator(tmp_path: Path) -> None:
    """The mesh has one process; our operator has no rule for a sharded call."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, w = torch.randn(2, 32, 16, 16), torch.randn(32, 64, 2, 2)
        parts = (
            distribute_tensor(x, mesh, [Shard(0)]).requires_grad_(),
            distribute_tensor(w, mesh, [Replicate()]),
        )
        y = conv_transpose2d(*parts, None, 2)
        torch.testing.assert_close(y.full_tensor(), F.conv_transpose2d(x, w, None, 2))
        y.sum().backward()
    finally:
        dist.destroy_process_group()

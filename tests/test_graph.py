"""Checks what is in a compiler's graph: it is made of fake tensors for CUDA and computed on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from sampling import sampled
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

import tconv_swap
from tconv_swap import graph
from tconv_swap.op import conv_transpose2d

OUTPUT = torch.ops.tconv_swap.conv_transpose2d_output.default
GRADIENTS = torch.ops.tconv_swap.conv_transpose2d_gradients.default
NCHW, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
SHAPES = (2, 16, 5, 6), (16, 8, 4, 4), (8,)
compiles_fake_tensors = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch 2.10 compiles for fake tensors of its own alone"
)


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[fx.Graph]]:
    graphs: list[fx.Graph] = []

    def keep(made: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(made.graph)
        return make_boxed_func(made.forward)

    return torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True), graphs


def fake_operands(
    dtype: torch.dtype, formats: tuple[torch.memory_format, torch.memory_format]
) -> list[Tensor]:
    x, w, b = (torch.empty(shape, dtype=dtype, device="cuda") for shape in SHAPES)
    return [x.to(memory_format=formats[0]), w.to(memory_format=formats[1]), b]


def call_of(made: fx.Graph, op: Any) -> fx.Node:
    (call,) = (node for node in made.nodes if node.target is op)
    return call


def formats_of(call: fx.Node, count: int) -> list[bool]:
    """Returns whether each of the first operands is channels_last."""
    return [call.args[i].meta["val"].is_contiguous(memory_format=CHANNELS_LAST) for i in range(count)]


@contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """Does what torch.autocast("cuda", dtype) does, which does nothing without a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@compiles_fake_tensors
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bias_that_an_autocast_casts_is_added_where_it_can_be_fused(dtype: torch.dtype) -> None:
    """The cast takes a separate kernel unless it is fused with its single use."""
    with FakeTensorMode(), torch.no_grad(), autocast(dtype):
        run, graphs = compiled(lambda x, w, b: conv_transpose2d(x, w, b, 2, 1).relu())
        y = run(*fake_operands(torch.float32, (NCHW, NCHW)))
    assert (y.dtype, y.shape) == (dtype, (2, 8, 10, 12))
    call = call_of(graphs[0], OUTPUT)
    (added,) = (node for node in graphs[0].nodes if node.target is torch.ops.aten.add.Tensor)
    assert call.args[2] is None
    assert added.args[0] is call


@compiles_fake_tensors
@pytest.mark.parametrize(
    ("dtype", "with_autocast"),
    [(torch.float32, False), (torch.float16, False), (torch.float16, True)],
    ids=str,
)
def test_another_bias_is_added_by_the_kernel(dtype: torch.dtype, with_autocast: bool) -> None:
    """If nothing can be fused with it, a separate sum would be another pass over the output."""
    with FakeTensorMode(), torch.no_grad(), autocast(dtype) if with_autocast else nullcontext():
        run, graphs = compiled(lambda x, w, b: conv_transpose2d(x, w, b, 2, 1))
        run(*fake_operands(dtype, (NCHW, NCHW)))
    assert call_of(graphs[0], OUTPUT).args[2] is not None
    assert [node.op for node in graphs[0].nodes].count("call_function") == 1


@pytest.mark.parametrize("change", [dict(size=(1,)), dict(size=(8, 1))], ids=str)
def test_a_bias_that_does_not_fit_is_refused_in_a_graph(change: dict[str, Any]) -> None:
    with FakeTensorMode(), torch.no_grad(), autocast(torch.float16):
        x, w, _ = fake_operands(torch.float32, (NCHW, NCHW))
        run, _ = compiled(lambda *tensors: conv_transpose2d(*tensors, 2, 1))
        with pytest.raises(RuntimeError, match="bias"):
            run(x, w, torch.empty(**change, device="cuda"))
    # And without Dynamo, which calls the whole op first.
    with FakeTensorMode(), FunctionalTensorMode(), graph.bias_is_cast(True):
        x, w, _ = fake_operands(torch.float16, (NCHW, NCHW))
        bad = torch.empty(**change, dtype=torch.float16, device="cuda")
        with pytest.raises(RuntimeError, match="bias"):
            graph.output(x, w, bad, ((2, 2), (1, 1), (0, 0), 1, (1, 1)), "auto")


def gradients_of(mask: list[bool]) -> Callable[..., list[Tensor]]:
    """Returns what the backward pass of a layer calls, as AOTAutograd traces it."""
    arguments = ((2, 2), (1, 1), (0, 0), 1, (1, 1))
    gradients: Callable[..., list[Tensor]] = torch.compiler.allow_in_graph(
        lambda *tensors: graph.gradients(*tensors, arguments, mask, "auto")
    )
    return lambda *tensors: gradients(*tensors)


@compiles_fake_tensors
@pytest.mark.parametrize("formats", [(NCHW, NCHW), (NCHW, CHANNELS_LAST), (CHANNELS_LAST, CHANNELS_LAST)])
def test_format_conversions_are_in_the_graph(
    formats: tuple[torch.memory_format, torch.memory_format],
) -> None:
    """For example a first layer whose input is a reshaped vector: PyTorch's output follows the weight's format."""
    wanted = formats[1] == CHANNELS_LAST
    with FakeTensorMode(), torch.no_grad():
        x, w, b = fake_operands(torch.float16, formats)
        run, graphs = compiled(lambda *tensors: conv_transpose2d(*tensors, 2, 1))
        y = run(x, w, b)
        assert formats_of(call_of(graphs[0], OUTPUT), 1) == [wanted]
        assert y.is_contiguous(memory_format=CHANNELS_LAST) == wanted
        backward, graphs = compiled(gradients_of([True, True, False]))
        found = backward(torch.empty(y.shape, dtype=y.dtype, device="cuda"), x, w)
    # The weight keeps its format: the backward pass would keep a copy of it from the forward pass on.
    assert formats_of(call_of(graphs[0], GRADIENTS), 3) == [wanted, wanted, formats[1] == CHANNELS_LAST]
    assert [one.is_contiguous(memory_format=CHANNELS_LAST) for one in found] == [wanted] * 2


@compiles_fake_tensors
def test_a_gradient_converts_only_the_tensors_that_it_reads() -> None:
    with FakeTensorMode(), torch.no_grad():
        x, w, _ = fake_operands(torch.float16, (NCHW, CHANNELS_LAST))
        backward, graphs = compiled(gradients_of([True, False, True]))
        backward(torch.empty(2, 8, 10, 12, dtype=x.dtype, device="cuda"), x, w)
    assert formats_of(call_of(graphs[0], GRADIENTS), 2) == [True, False]


@pytest.mark.parametrize("formats", [(NCHW, CHANNELS_LAST), (CHANNELS_LAST, CHANNELS_LAST)])
def test_the_graph_computes_the_same(
    formats: tuple[torch.memory_format, torch.memory_format], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU computes the graph for CUDA: layouts are PyTorch's, and output and gradients agree with float64.

    In float16, because bfloat16 is 1.6 % off (also PyTorch's) on a CPU without instructions for it.
    """
    monkeypatch.setattr(graph, "_is_for_a_compiler", lambda input: torch._C._len_torch_dispatch_stack() > 0)
    torch.manual_seed(0)
    leaves = [torch.randn(shape).half().float() for shape in SHAPES]
    leaves = [
        *(one.to(memory_format=form) for one, form in zip(leaves[:2], formats, strict=True)),
        leaves[2],
    ]
    tensors = [one.requires_grad_() for one in leaves]
    run, graphs = compiled(lambda x, w, b: conv_transpose2d(x, w, b, 2, 1).tanh())
    with torch.autocast("cpu", torch.float16):
        y = run(*tensors)
    assert call_of(graphs[0], OUTPUT).args[2] is None
    exact = [one.detach().double().requires_grad_() for one in tensors]
    truth = F.conv_transpose2d(*exact, 2, 1).tanh()
    assert y.is_contiguous(memory_format=CHANNELS_LAST)
    cotangent = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, tensors, cotangent)]
    expected = [truth, *torch.autograd.grad(truth, exact, cotangent.double())]
    for one, other in zip(found, expected, strict=True):
        assert float((one.detach().double() - other.detach()).norm() / other.detach().norm()) < 5e-3


@pytest.mark.parametrize(
    ("out_channels", "how"), sampled([(3, "as it is"), (3, "compiled"), (6, "compiled"), (6, "as it is")], 2)
)
def test_a_decomposed_program_has_gradients(out_channels: int, how: str) -> None:
    """It holds the graph's op outside of a compiler's graph; gradients are enabled in plain inference too."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.ConvTranspose2d(64, out_channels, 4, 2, 1), nn.Conv2d(out_channels, 3, 3))
    x = torch.randn(2, 64, 32, 32)
    results = []
    for network in (original, tconv_swap.swap_layers(original, inplace=False)):
        program = torch.export.export(network, (x,)).run_decompositions().module()
        run = torch.compile(program, backend="aot_eager") if how == "compiled" else program
        y = run(x)
        y.square().mean().backward()
        results.append([y, *(parameter.grad for _, parameter in sorted(program.named_parameters()))])
        torch.compiler.reset()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

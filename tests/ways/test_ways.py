"""Every way of running a network, swapped against unswapped: compilers, exporters, tracers, autocast, copies."""

from __future__ import annotations

import copy
import io
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ddp_worker
import numpy as np
import pytest
import torch
from sampling import sampled
from surgery_models import swapped_names
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from upsampled import Upsampled

from tconv_swap import swap_layers, unswap_layers

REPOSITORY = Path(__file__).parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def net() -> nn.Sequential:
    """A strided, a depthwise, a k = s and a dilated layer; one reaches each formulation of the CPU's."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, 4, 2, 1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 6, 3, 2, 1, 1, groups=6, bias=False),
        nn.ConvTranspose2d(6, 4, 2, 2),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 3, 3, dilation=2),
    )


def small() -> nn.Sequential:
    """Where a compiler has to be waited for."""
    torch.manual_seed(0)
    return nn.Sequential(nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(6, 3, 2, 2))


def pair(device: str = "cpu", make: Callable[[], nn.Sequential] = net) -> tuple[nn.Sequential, nn.Sequential]:
    theirs = make().to(device)
    return theirs, swap_layers(theirs, inplace=False)


def images(*shape: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape or (2, 4, 5, 6), generator=generator).to(device)


def assert_close(actual: Any, expected: Any) -> None:
    cuda = any(t.is_cuda for t in torch.utils._pytree.tree_leaves(expected) if isinstance(t, Tensor))
    tolerance = dict(rtol=3e-3, atol=3e-3) if cuda else dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual, expected, **tolerance)


def trained(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Output, gradient of the input and of every parameter."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


# --- torch.compile ------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


SHAPES = [(2, 4, 5, 6), (3, 4, 7, 6), (4, 4, 8, 9), (2, 4, 9, 11), (5, 4, 5, 7)]


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_compiles_without_breaks_and_no_more_often_than_pytorchs(dynamic: bool | None, device: str) -> None:
    theirs, ours = pair(device, small)
    counts = []
    results: list[list[list[Tensor]]] = []
    for model in (theirs, ours):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=counter)
        shapes = SHAPES[:2] if dynamic is False else SHAPES
        results.append([trained(model, compiled, images(*shape, device=device)) for shape in shapes])
        counts.append(counter.frame_count)
    assert counts[1] <= counts[0]
    assert_close(results[1], results[0])
    for shape, result in zip(SHAPES, results[1], strict=False):
        assert_close(result, trained(theirs, theirs, images(*shape, device=device)))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_with_inductor_forward_and_backward(device: str) -> None:
    theirs, ours = pair(device, small)
    compiled = torch.compile(ours, fullgraph=True)
    x = images(device=device)
    assert_close(trained(ours, compiled, x), trained(theirs, theirs, x))


# --- exporters and tracers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", sampled([False, True], 2))
def test_exports_with_dynamic_shapes_saves_and_comes_back(strict: bool) -> None:
    theirs, ours = (model.eval() for model in pair())
    axes = {0: torch.export.Dim("n", min=1), 2: torch.export.Dim("h", min=2), 3: torch.export.Dim("w", min=2)}
    program = torch.export.export(ours, (images(),), dynamic_shapes=(axes,), strict=strict)
    assert str(program.graph).count("tconv_swap.conv_transpose2d") == 4
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    for exported in (program, program.run_decompositions(), loaded):
        for module in (exported.module(), torch.export.unflatten(exported)):
            for shape in SHAPES[:3]:
                assert_close(module(images(*shape)), theirs(images(*shape)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "error::torch.jit.TracerWarning")
def test_a_jit_trace_is_valid_for_other_sizes() -> None:
    model = swap_layers(nn.Sequential(nn.ConvTranspose2d(8, 4, 4), *net()))
    traced = torch.jit.trace(model.eval(), images(1, 8, 1, 1))
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    for module in (traced, torch.jit.load(buffer)):
        for shape in ((1, 8, 1, 1), (3, 8, 1, 1), (2, 8, 4, 7), (2, 8, 16, 16)):
            assert_close(module(images(*shape)), model(images(*shape)))


def test_symbolic_trace_keeps_the_layers() -> None:
    theirs, ours = (model.eval() for model in pair())
    traced = fx.symbolic_trace(ours)
    assert swapped_names(traced) == swapped_names(ours)
    assert_close(traced(images()), theirs(images()))
    unswap_layers(traced)
    assert_close(traced(images()), theirs(images()))


class OneD(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(4, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x[:, :, 0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [net, OneD])
def test_onnx_export_gives_plain_operators(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = swap_layers(make(), include_1d=True).eval()
    program = torch.onnx.export(
        model, (images(),), dynamo=True, dynamic_shapes=({0: "n", 2: "h", 3: "w"},), verbose=False
    )
    kinds = [node.op_type for node in program.model.graph]
    assert kinds.count("ConvTranspose") == len(swapped_names(model)) or make is OneD
    assert "ConvTranspose" in kinds
    assert {node.domain for node in program.model.graph} == {""}
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for shape in SHAPES[:3]:
        (found,) = session.run(None, {session.get_inputs()[0].name: images(*shape).numpy()})
        assert_close(torch.from_numpy(np.array(found)), model(images(*shape)).detach())


# --- precision, memory, determinism -------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_grad_scaler(dtype: torch.dtype, device: str) -> None:
    states = []
    for model in pair(device):
        scaler = torch.amp.GradScaler(device, init_scale=64.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            with torch.autocast(device, dtype=dtype):
                y = model(images(2, 4, 5, 6 + step, device=device))
                loss = y.float().square().mean()
            assert y.dtype == dtype
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        states.append(model.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=2e-2, atol=2e-3)


@pytest.mark.usefixtures("_fresh_compiler")
def test_autocast_compiled() -> None:
    theirs, ours = pair(make=small)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = theirs(images()), compiled(images())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, device: str) -> None:
    theirs, ours = pair(device)
    x = images(device=device)
    actual = trained(ours, lambda x: checkpoint(ours, x, use_reentrant=reentrant), x)
    assert_close(actual, trained(theirs, theirs, x))


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_algorithms(device: str) -> None:
    theirs, ours = pair(device)
    expected = trained(theirs, theirs, images(device=device))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = [trained(ours, ours, images(device=device)) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(before)
    assert_close(runs[0], expected)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_saved_tensors_hooks_and_inference_mode() -> None:
    theirs, ours = pair()
    with torch.autograd.graph.save_on_cpu():
        assert_close(trained(ours, ours, images()), trained(theirs, theirs, images()))
    with torch.inference_mode():
        result = ours.eval()(images())
        assert result.is_inference()
        assert_close(result, theirs.eval()(images()))


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("device", DEVICES)
def test_moved_between_dtypes_and_devices_after_the_swap(device: str) -> None:
    theirs = nn.Sequential(nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.ConvTranspose2d(6, 3, 2, 2))
    ours = swap_layers(theirs, inplace=False)
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.float16, torch.float32):
        for place in (device, "cpu"):
            for model in (theirs, ours):
                model.to(place, dtype)
            x = images(device=place).to(dtype)
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-2, atol=1e-2)
    meta = copy.deepcopy(ours).to("meta")
    assert meta(images().to("meta")).shape == theirs(images()).shape
    again = meta.to_empty(device="cpu")
    again.load_state_dict(theirs.state_dict())
    assert_close(again(images()), theirs(images()))


# --- other processes ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork", "ignore::DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.usefixtures("two_threads")
def test_data_loader_workers(start: str) -> None:
    theirs, ours = pair()
    ours.eval()(images())  # the parent has used its threads already
    loader = DataLoader(
        Upsampled(ours, images(1, 4, 5, 5)),
        batch_size=2,
        num_workers=1,
        multiprocessing_context=multiprocessing.get_context(start),
    )
    expected = Upsampled(theirs, images(1, 4, 5, 5))[0].expand(2, -1, -1, -1)
    batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        assert_close(batch, expected)


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_without_compiler_gpu_and_writable_home(tmp_path: Path) -> None:
    sealed = tmp_path / "file"  # no directory can be made below a file, whoever asks
    sealed.write_text("")
    code = (
        "import torch, tconv_swap\n"
        "from tconv_swap.runtime.host import BuildError, build\n"
        "from tconv_swap.runtime.cache import cache_directory\n"
        "model = tconv_swap.swap_layers(torch.nn.ConvTranspose2d(4, 6, 4, 2, 1))\n"
        "assert not torch.cuda.is_available()\n"
        "model(torch.randn(2, 4, 16, 16, requires_grad=True)).sum().backward()\n"
        "print('ran')\n"
        "print('cache', cache_directory())\n"
        "try: build()\n"
        "except BuildError as error: print('no launcher:', error)\n"
    )
    result = python(
        code, HOME=str(sealed / "home"), PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="", TMPDIR=str(tmp_path)
    )
    assert result.returncode == 0, result.stderr
    ran, cache, launcher = result.stdout.splitlines()
    assert ran == "ran"
    assert cache.startswith(f"cache {tmp_path}/tconv_swap-")
    assert "cannot keep compiled kernels in" in result.stderr
    assert "needs a C++ compiler and ninja, but 'g++' was not found; install g++" in launcher


def test_ddp_and_fsdp2_on_two_processes(tmp_path: Path) -> None:
    """Gradients averaged over two processes, and steps of SGD, against one process with the whole batch."""
    for output in ddp_worker.outputs_of(2, "gloo", tmp_path / "group"):
        assert "ddp: same" in output
        assert "fsdp2: same" in output

"""What the tests of ways share: networks, training loops, and a stand-in for CUDA graphs on a machine without a GPU.

The stand-in keeps what makes graphs hard to use: one static output, one static gradient, the activations of the last
call alone, and a warm-up that changes buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.inputs import Inputs
from tconv_swap.ways.run import Running, build
from tconv_swap.ways.way import Way


def generator() -> nn.Sequential:
    """Returns a generator with every kind of state: BatchNorm, dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, 4, 2, 1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.ConvTranspose2d(6, 3, 2, 2),
        nn.Tanh(),
    )


class Named(nn.Module):
    """Takes keyword arguments and a number, and returns a dict with an entry that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 2, 2)

    def forward(self, *, image: Tensor, scale: float = 1.0) -> dict[str, Any]:
        made = self.up(image) * scale
        return {"image": made, "sizes": [made.sum(), "text"], "none": None}


class Parts(nn.Module):
    """Returns a part of a tensor, an expanded tensor and a dense one in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 2, 2)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.up(image)
        return (
            made[:, 1:],
            made.mean((2, 3), keepdim=True).expand(-1, -1, 5, -1),
            made.contiguous(memory_format=torch.channels_last),
        )


def images(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (2, 4, 5, 6), generator=generator).to(device)


def trained(
    network: nn.Module, call: Callable[..., Any], *, device: str = "cpu", steps: int = 4, accumulate: int = 1
) -> list[Tensor]:
    """Returns outputs, parameters, buffers, momenta and the random state after some steps with a gradient scaler."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    torch.manual_seed(7)
    outputs = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for part in range(accumulate):
            output = call(images(device=device, seed=step * accumulate + part))
            scaler.scale(output.square().mean()).backward()
            outputs.append(output.detach())
        scaler.step(optimizer)
        scaler.update()
    momenta = [
        optimizer.state[p]["momentum_buffer"]
        for p in network.parameters()
        if "momentum_buffer" in optimizer.state[p]
    ]
    assert len(momenta) == len(list(network.parameters()))
    random = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    return [*outputs, *network.state_dict().values(), *momenta, random]


class Stand:
    """Stands in for `torch.cuda.make_graphed_callables` without CUDA; counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, module: nn.Module, sample_args: tuple[Tensor, ...], **_: Any) -> Callable[..., Any]:
        stand, parameters = self, tuple(module.parameters())
        surface = sample_args + parameters
        for _ in range(3):
            warm = [output for output in module(*sample_args) if output.requires_grad]
            if warm:
                wanted = [tensor for tensor in surface if tensor.requires_grad]
                torch.autograd.grad(
                    warm, wanted, [torch.ones_like(output) for output in warm], allow_unused=True
                )
        captured = module(*sample_args)
        memory = [_memory_of(output).clone() for output in captured]
        static_outputs = [
            copied.as_strided(output.shape, output.stride(), output.storage_offset())
            for copied, output in zip(memory, captured, strict=True)
        ]
        static_gradients = [torch.zeros_like(tensor) if tensor.requires_grad else None for tensor in surface]
        differentiable = [output.requires_grad for output in captured]
        last: list[tuple[Tensor, ...]] = []

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
                stand.replays += 1
                with torch.no_grad():
                    for static, given in zip(sample_args, inputs, strict=False):
                        static.copy_(given)
                with torch.set_grad_enabled(any(differentiable)):
                    last[:] = [module(*sample_args)]
                for copied, output in zip(memory, last[0], strict=True):
                    copied.copy_(_memory_of(output))
                return tuple(output.detach() for output in static_outputs)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
                wanted = [tensor for tensor in surface if tensor.requires_grad]
                found = iter(
                    torch.autograd.grad(
                        [output for output, is_one in zip(last[0], differentiable, strict=True) if is_one],
                        wanted,
                        [
                            gradient
                            for gradient, is_one in zip(gradients, differentiable, strict=True)
                            if is_one
                        ],
                        retain_graph=True,
                        allow_unused=True,
                    )
                )
                for static in static_gradients:
                    if static is not None:
                        static.copy_(next(found))
                return tuple(static if static is None else static.detach() for static in static_gradients)

        return lambda *arguments: Graphed.apply(*arguments, *parameters)


def _memory_of(tensor: Tensor) -> Tensor:
    """Returns all elements of the memory that a tensor is in, also those that are not its own."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)


def captured(network: nn.Module, training: bool = True, **arguments: Any) -> Running:
    """Returns a network captured in CUDA graphs, for `images()` or these keyword arguments."""
    inputs = Inputs((), arguments) if arguments else Inputs.of(images())
    return build(network, Way("pytorch", runtime="graph"), inputs, training=training)

"""Adds the rounding that some layers, or the operators of compiled code, may do differently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Draws numbers from -1 to 1 in the shape of a tensor.
Draw = Callable[[Tensor], Tensor]

# Pointwise operators and reductions that round nothing: they select, move or negate numbers, or return whole ones.
_EXACT = re.compile(
    "abs|amax|amin|aminmax|ceil|clamp|clamp_max|clamp_min|clip|clone|copysign|floor|fmax|fmin|frexp|hardshrink|hardtanh"
    "|heaviside|masked_fill|max|maximum|min|minimum|nan_to_num|neg|positive|relu|relu6|round|sgn|sign|threshold"
    "|threshold_backward|trunc|where"
)
# The beginnings of the names of operators without a tag that a compiler takes apart into such operators.
_TAKEN_APART = re.compile(
    "_(log_)?softmax|(native|cudnn)_(batch|group|layer)_norm|(_adaptive_)?avg_pool|upsample_(?!nearest)"
    "|leaky_relu|hardswish|log_sigmoid|glu|_prelu"
)


class _Jitter(torch.autograd.Function):
    @staticmethod
    def forward(value: Tensor, amplitude: float, draw: Draw) -> Tensor:
        return _with_rounding(value, amplitude, draw)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.amplitude, ctx.draw = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _with_rounding(gradients[0], ctx.amplitude, ctx.draw), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, value: Tensor, amplitude: float, draw: Any) -> tuple[Tensor, Any]:
        """Adds separate noise to every sample."""
        return _Jitter.apply(value, amplitude, draw), in_dims[0]  # type: ignore[no-untyped-call]


def _with_rounding(value: Tensor, amplitude: float, draw: Draw) -> Tensor:
    wide = value.double() if value.dtype == torch.float64 else value.float()
    scale = torch.hypot(wide, wide.square().mean().sqrt())
    return torch.addcmul(wide, scale, draw(wide), value=amplitude).to(value.dtype)


def _drawing(seed: int) -> Draw:
    generators: dict[torch.device, torch.Generator] = {}

    def draw(wide: Tensor) -> Tensor:
        place = wide.device if wide.device.type in ("cpu", "cuda") else torch.device("cpu")
        if place not in generators:
            generators[place] = torch.Generator(place).manual_seed(seed)
        noise = torch.rand(wide.shape, generator=generators[place], device=place, dtype=wide.dtype)
        return (noise * 2 - 1).to(wide.device)

    return draw


@contextmanager
def with_rounding(
    module: nn.Module,
    layers: list[str],
    amplitude: Callable[[nn.Module, Tensor], float],
    seed: int,
    mean_amplitude: Callable[[int, torch.dtype], float] | None = None,
) -> Iterator[None]:
    """Changes the outputs of the named layers, and the gradients that reach them, by as much as rounding may.

    The network's results then show how much the network itself amplifies rounding in these layers.

    Args:
        mean_amplitude: the error of a mean of so many elements, relative to their size; the running means of norms are
            changed by it. None: they are not.
    """
    modules = dict(module.named_modules())
    draw = _drawing(seed)

    def hook(layer: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.numel() == 0:
            return output
        if mean_amplitude is not None and isinstance(layer, _NormBase) and layer.training and args:
            _jitter_running_mean(layer, args[0].detach(), mean_amplitude, draw)
        return _Jitter.apply(output, amplitude(layer, output), draw)  # type: ignore[no-untyped-call]

    handles = [modules[n].register_forward_hook(hook, prepend=True) for n in layers if n in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _jitter_running_mean(
    norm: _NormBase,
    input: Tensor,
    amplitude: Callable[[int, torch.dtype], float],
    draw: Draw,
) -> None:
    """Changes the running mean as another order of the sum may: relative to the elements, which may cancel."""
    mean = norm.running_mean
    if mean is None or not input.numel():
        return
    is_one = isinstance(norm, _InstanceNorm) and input.dim() == norm._get_no_batch_dim()
    channels = input.transpose(0, 0 if is_one else 1).reshape(mean.numel(), -1)
    elements = channels.float().square().mean(1).sqrt().to(mean.dtype)
    batches = norm.num_batches_tracked
    share = norm.momentum if norm.momentum is not None else 1 / int(batches) if batches is not None else 0.0
    # Through `data`: a backward pass has saved the mean, but does not use it in train mode.
    mean.data += share * amplitude(channels.shape[1], input.dtype) * elements * draw(elements)


class WithRoundedOperators(TorchDispatchMode):
    """Changes the result of every operator of a forward pass that a compiler may fuse with others, by as much as its
    last rounding may.

    Eager mode rounds each of these results to its dtype; fused operators keep more digits. A network may amplify that
    inside a module: the sine of an angle in float16 depends on how the angle was rounded.
    """

    def __init__(self, roundings: float, seed: int) -> None:
        """
        Args:
            roundings: the size of the change, in units of the largest error of one rounding.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._roundings = roundings
        self._draw = _drawing(seed)
        # It is kept alive, so that no other tensor gets its memory.
        self._last: Tensor | None = None

    def amplitude(self, output: Tensor) -> float:
        """Returns by how much the output of a module was changed, which is another change's to leave out: 0 unless the
        module ends with an operator that was."""
        last = self._last
        changed = last is not None and last.data_ptr() == output.data_ptr() and last.numel() == output.numel()
        return self._amplitude(output) if changed else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_backward = torch._C._current_graph_task_id() != -1
        if not is_backward and _rounds(func):
            for value in tree_leaves(result):
                if isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided:
                    value.addcmul_(value, self._draw(value), value=self._amplitude(value))
            self._last = next((value for value in tree_leaves(result) if isinstance(value, Tensor)), None)
        return result

    def _amplitude(self, value: Tensor) -> float:
        return self._roundings * torch.finfo(value.dtype).eps / 2


def _rounds(func: Any) -> bool:
    """Returns whether the last step of an operator is a rounding that a compiler may leave out."""
    name = func.overloadpacket.__name__.removesuffix("_")
    if {torch.Tag.pointwise, torch.Tag.reduction} & set(func.tags):
        return not _EXACT.fullmatch(name)
    return bool(_TAKEN_APART.match(name))

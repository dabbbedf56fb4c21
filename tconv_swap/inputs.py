"""What a network is called with: one container for it, and a guess at its shape when the user gives none.

`Inputs` is what `verify` and `benchmark` take. `infer_inputs` finds a shape by trying, in the order in which
the layers are registered, what each of the first parametrised layers would accept, and says what it used.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.measurement.state import preserved

# Batch 2: with one sample, BatchNorm over 1x1 maps has a single value per channel and refuses to train.
BATCHES = (2, 1)
# An image network first gets an image; a size that its head or its depth needs follows.
IMAGE_SIZES = (64, 128, 256, 224, 32, 28, 16, 8, 4, 1, 299, 512)
# A transposed convolution that reads the network's input is fed a latent vector (stride 1, no padding) ...
LATENT_SIZES = (1, 4, 8, 16, 32, 64)
# ... or a feature map.
FEATURE_SIZES = (16, 8, 32, 64, 4, 2, 1)
SEQUENCE_LENGTHS = (16, 64, 256, 1024, 4096)
VOLUME_SIZES = (8, 16, 32, 64, 4)
# How many of the first parametrised layers may say what the input looks like.
LAYERS_TRIED = 4
# After so many shapes that run, a transposed convolution that none of them reached is not a matter of shape.
ENOUGH_SHAPES = 4


class InputShapeError(ValueError):
    """No input was given and none could be found; the message says what to give."""


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `fn` applied to every tensor in it; containers are rebuilt, anything else is kept.

    Knows tensors, lists, tuples, named tuples, mappings (a dict's class is kept) and dataclass instances.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(fn, item) for item in value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(fn, item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            f.name: map_tensors(fn, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **changes)
    return value


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a nesting of containers, with a readable path such as `0`, `1.boxes`, `image`."""
    if isinstance(value, Tensor):
        yield name, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    for key, item in items:
        yield from named_tensors(item, f"{name}.{key}" if name else str(key))


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call, `model(*args, **kwargs)`: tensors at any nesting, and anything else."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """A tensor is the only argument, a tuple or list the positional ones, a dict the keyword ones.

        So a network whose one argument is a list of images is given `([image, image],)`, or an `Inputs`.

        Raises:
            TypeError: for anything else, and for a dict whose keys are not all strings.
        """
        if isinstance(value, Inputs):
            return value
        if isinstance(value, Tensor):
            return cls((value,))
        if isinstance(value, list | tuple):
            return cls(tuple(value))
        if isinstance(value, Mapping):
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise TypeError(
                    f"inputs given as a dict are keyword arguments, but {wrong[0]!r} is not a string"
                )
            return cls((), dict(value))
        raise TypeError(
            "inputs must be a tensor, a tuple or list of positional arguments, a dict of keyword arguments "
            f"or tconv_swap.inputs.Inputs, not {type(value).__name__}"
        )

    def __call__(self, model: Callable[..., Any]) -> Any:
        """`model(*args, **kwargs)`."""
        return model(*self.args, **self.kwargs)

    def map(self, fn: Callable[[Tensor], Any]) -> Inputs:
        """The same arguments with `fn` applied to every tensor, however deeply nested."""
        return Inputs(map_tensors(fn, self.args), map_tensors(fn, self.kwargs))

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor with its path: `0`, `1.mask` for positional arguments, `image` for keyword ones."""
        return [*named_tensors(self.args), *named_tensors(self.kwargs)]

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> Inputs:
        """Every tensor moved to `device`; floating-point ones to `dtype`; 4-D ones to `memory_format`."""

        def move(tensor: Tensor) -> Tensor:
            wanted = dtype if tensor.is_floating_point() else None
            moved = tensor.to(device=device, dtype=wanted)
            if memory_format is not None and moved.dim() == 4:
                moved = moved.contiguous(memory_format=memory_format)
            return moved

        return self.map(move)

    def describe(self) -> str:
        """One line for a report: `2x100x1x1 float32` or `image 1x3x64x64 float32, label 1 int64`."""

        def text(name: str, tensor: Tensor) -> str:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            label = "" if name == "0" and len(self.args) == 1 and not self.kwargs else f"{name} "
            return f"{label}{shape} {str(tensor.dtype).removeprefix('torch.')}"

        tensors = [text(name, tensor) for name, tensor in self.named_tensors()]
        return ", ".join(tensors) or "no tensors"


@dataclass(frozen=True)
class InferredInputs:
    """Inputs that nobody gave, and in one line how they were found."""

    inputs: Inputs
    how: str


def random_inputs(
    shapes: Sequence[Sequence[int]], model: nn.Module | None = None, *, seed: int = 0, high: int | None = None
) -> Inputs:
    """Standard normal tensors, one per positional argument, on the model's device and in its dtype.

    Drawn on the CPU from a generator of their own, so that a seed gives the same numbers on every device and
    the global random state stays as it was.

    Args:
        shapes: one shape per positional argument.
        model: its first parameter gives the device, its first floating-point one the dtype.
        seed: of the generator.
        high: if given, int64 numbers in `[0, high)` instead (for an embedding).
    """
    device, dtype = model_device(model), model_dtype(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(tuple(shape), generator=generator).to(device, dtype)
        if high is None
        else torch.randint(high, tuple(shape), generator=generator).to(device)
        for shape in shapes
    ]
    return Inputs(tuple(tensors))


def model_device(model: nn.Module | None) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def model_dtype(model: nn.Module | None) -> torch.dtype:
    """The dtype of the first floating-point parameter or buffer; float32 if there is none."""
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)


def infer_inputs(model: nn.Module, *, seed: int = 0, time_limit: float = 30.0) -> InferredInputs:
    """Random inputs that `model` accepts, found by trying what its first parametrised layers allow.

    The first shape is taken that runs in eval and in train mode and reaches every transposed convolution of
    one or two dimensions; if none does, the one that reaches the most of them. Runs on the model's own
    device, without gradients. The model and the global random state are left as they were.

    Args:
        model: the network.
        seed: of the numbers.
        time_limit: seconds after which no further shape is begun.

    Raises:
        InputShapeError: nothing that was tried runs, or the network wants several arguments.
    """
    names = required_arguments(model)
    if len(names) > 1:
        raise InputShapeError(
            f"{type(model).__name__}.forward takes {len(names)} arguments ({', '.join(names)}): "
            "give one --input-shape for each, or --inputs FILE"
        )
    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d)
    targets = {module for module in model.modules() if isinstance(module, kinds)}
    deadline = time.monotonic() + time_limit
    ran: list[tuple[tuple[int, bool], InferredInputs]] = []
    tried, error = 0, ""
    for layer, shape, high in _candidates(model):
        if time.monotonic() > deadline or len(ran) == ENOUGH_SHAPES:
            break
        inputs = random_inputs([shape], model, seed=seed, high=high)
        evaluated, trained = try_modes(model, inputs)
        tried += 1
        if evaluated.error and trained.error:
            error = error or evaluated.error
            continue
        reached = len(targets & (evaluated.reached | trained.reached))
        both = not evaluated.error and not trained.error
        how = f"inferred from {layer}"
        if reached < len(targets):
            how += f", reaches {reached} of {len(targets)} transposed convolutions"
        ran.append(((reached, both), InferredInputs(inputs, how)))
        if (reached, both) == (len(targets), True):
            break
    if ran:
        return max(ran, key=lambda entry: entry[0])[1]
    what = f"none of the {tried} shapes tried runs (the likeliest: {error})" if tried else "no layer tells it"
    raise InputShapeError(f"cannot infer the input shape, {what}: give --input-shape or --inputs FILE")


def infer_input_shape(model: nn.Module) -> tuple[tuple[int, ...], str]:
    """The shape of `infer_inputs`, and in one line how it was found."""
    found = infer_inputs(model)
    return tuple(found.inputs.args[0].shape), found.how


def required_arguments(model: nn.Module) -> list[str]:
    """Names of the arguments of `forward` that have no default."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in kinds]


@dataclass(frozen=True)
class ModeTrial:
    """What one call did: the error in one line (empty if it ran) and the modules it reached."""

    mode: str
    error: str
    reached: frozenset[nn.Module]


def try_modes(model: nn.Module, inputs: Inputs) -> tuple[ModeTrial, ModeTrial]:
    """Call `model` once in eval and once in train mode, without gradients, and say what came of it.

    The model and the global random state are left as they were. Nothing is raised, whatever the model's
    forward raises.
    """
    with preserved(model), torch.no_grad():
        return _trial(model.eval(), "eval", inputs), _trial(model.train(), "train", inputs)


def _trial(model: nn.Module, mode: str, inputs: Inputs) -> ModeTrial:
    reached: set[nn.Module] = set()
    hooks = [m.register_forward_pre_hook(lambda module, _: reached.add(module)) for m in model.modules()]
    error = ""
    try:
        # A network may write to its inputs (an in-place ReLU in front), which others are to see as they are.
        inputs.map(torch.clone)(model)
    except Exception as failure:  # a foreign forward may raise anything; all of it means "does not run"
        error = f"{type(failure).__name__}: {failure}".split("\n", 1)[0]
    finally:
        for hook in hooks:
            hook.remove()
    return ModeTrial(mode, error, frozenset(reached))


def _candidates(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """`(layer it comes from, shape, exclusive bound of an integer input or None)`, the likeliest first."""
    layers: list[tuple[str, list[tuple[int, ...]], int | None]] = []
    for name, module in model.named_modules():
        if shapes := _accepted(module):
            high = module.num_embeddings if isinstance(module, nn.Embedding) else None
            layers.append((f"{name or 'the module itself'} ({type(module).__name__})", shapes, high))
        if len(layers) == LAYERS_TRIED:
            break
    seen: set[tuple[int, ...]] = set()
    for batch in BATCHES:
        for layer, shapes, high in layers:
            for shape in shapes:
                full = (batch, *shape)
                if full not in seen:
                    seen.add(full)
                    yield layer, full, high


def _accepted(module: nn.Module) -> list[tuple[int, ...]]:
    """Shapes, without the batch, that this layer would read as the network's input; [] if it does not say."""
    if isinstance(module, nn.ConvTranspose2d):
        latent = tuple(module.stride) == (1, 1) and all(p == 0 for p in module.padding)
        return [(module.in_channels, s, s) for s in (LATENT_SIZES if latent else FEATURE_SIZES)]
    if isinstance(module, nn.Conv2d):
        return [(module.in_channels, s, s) for s in IMAGE_SIZES]
    if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
        return [(module.in_channels, s) for s in SEQUENCE_LENGTHS]
    if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
        return [(module.in_channels, s, s, s) for s in VOLUME_SIZES]
    if isinstance(module, nn.BatchNorm2d | nn.InstanceNorm2d):
        return [(module.num_features, s, s) for s in IMAGE_SIZES]
    if isinstance(module, nn.BatchNorm1d):
        return [(module.num_features,)]
    if isinstance(module, nn.GroupNorm):
        return [(module.num_channels, s, s) for s in IMAGE_SIZES]
    if isinstance(module, nn.Linear):
        return [(module.in_features,), (16, module.in_features)]
    if isinstance(module, nn.RNNBase):
        return [(16, module.input_size)]
    if isinstance(module, nn.Embedding):
        return [(), (16,)]
    return []

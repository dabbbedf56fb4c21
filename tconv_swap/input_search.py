"""Finds inputs for a network when the user gives none.

`infer_inputs` tries shapes that the layers which may read the input accept, and says which one it used; `advice` says
how to give inputs that it cannot find.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.inputs import Inputs, random_inputs
from tconv_swap.preserving import preserved

# A batch of 2 comes first: with one sample, BatchNorm over 1x1 maps has one value per channel and refuses to train.
BATCHES = (2, 1)
# An image network first gets an image of a common size; its head or its depth may need one of the others.
IMAGE_SIZES = (64, 128, 256, 224, 32, 28, 16, 8, 4, 1, 299, 512)
# Images have this many channels, grey or colour; a transposed convolution may read an image too.
IMAGE_CHANNELS = (1, 3)
# Larger shapes are tried only if none of the smaller ones runs.
MAX_PREFERRED_SIZE = 256
# A transposed convolution that reads the network's input gets a latent vector (stride 1, no padding).
LATENT_SIZES = (1, 4, 8, 16, 32, 64)
# Otherwise it gets a feature map.
FEATURE_SIZES = (16, 8, 32, 64, 4, 2, 1)
SEQUENCE_LENGTHS = (16, 64, 256, 1024, 4096)
VOLUME_SIZES = (8, 16, 32, 64, 4)
# The number of first layers with parameters that may determine the shape of the input.
LAYERS_TRIED = 4
# If none of this many shapes that run reaches a transposed convolution, the shape is not the reason.
MAX_RUNNING_SHAPES = 4


class InputShapeError(ValueError):
    """No inputs were given and none could be found; the message says what to give."""


@dataclass(frozen=True)
class InferredInputs:
    """Inputs that were found, and one line that says how."""

    inputs: Inputs
    how: str


def infer_inputs(model: nn.Module, *, seed: int = 0, time_limit: float = 30.0) -> InferredInputs:
    """Returns random inputs that `model` accepts, found by trying what its first parametrised layers allow.

    Several sizes are tried, images of 64 to 256 pixels before smaller and larger ones. If a run shows that another
    layer reads the network's input than the one that gave the shape, that layer's sizes come next. The result is the
    first shape that runs in eval and in train mode and reaches every transposed convolution of one or two dimensions
    with maps of more than one pixel (one pixel is enough where the first layer expects it); if no shape does all this,
    the one that comes closest. The network runs on its own device, without gradients. Its state and the global random
    state are restored.

    Args:
        model: the network.
        seed: the seed of the random numbers.
        time_limit: the number of seconds after which no further shape is tried.

    Raises:
        InputShapeError: no shape that was tried runs, or the network needs several arguments.
    """
    names = [parameter.name for parameter in required_arguments(model)]
    if len(names) > 1:
        raise InputShapeError(
            f"{type(model).__name__}.forward takes {len(names)} arguments ({', '.join(names)}): {advice(model)}"
        )
    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d)
    targets = {module for module in model.modules() if isinstance(module, kinds)}
    deadline = time.monotonic() + time_limit
    ran: list[tuple[tuple[int, ...], InferredInputs]] = []
    failed: list[str] = []
    error = ""
    candidates = deque(_candidates(model))
    tried: set[nn.Module] = set()
    complete = False
    while candidates and time.monotonic() <= deadline and len(ran) < MAX_RUNNING_SHAPES:
        candidate = candidates.popleft()
        if complete and candidate.size > MAX_PREFERRED_SIZE:
            continue
        tried.add(candidate.module)
        inputs = random_inputs([candidate.shape], model, seed=seed, high=candidate.high)
        evaluated, trained = try_modes(model, inputs)
        if evaluated.error and trained.error:
            failed.append("x".join(map(str, candidate.shape)))
            error = error or evaluated.error
            continue
        trials = [trial for trial in (evaluated, trained) if not trial.error]
        reader = next((trial.reader for trial in trials if trial.reader is not None), candidate.module)
        reached = len(targets.intersection(evaluated.reached | trained.reached))
        fine = candidate.size == 1 or all(trial.pixels > 1 for trial in trials)
        complete = complete or (reached == len(targets) and len(trials) == 2)
        rank = (reached, len(trials), reader is candidate.module, fine)
        how = f"inferred from {candidate.layer}"
        if reached < len(targets):
            how += f", reaches {reached} of {len(targets)} transposed convolutions"
        if failed:
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            how += f"; {failed[0]}{more} did not run"
        if rank == (len(targets), 2, True, True):
            return InferredInputs(inputs, how)
        if reader not in tried:
            tried.add(reader)
            candidates.extendleft(reversed(_sizes(model, [reader])))
            ran.insert(0, (rank, InferredInputs(inputs, how)))
        else:
            ran.append((rank, InferredInputs(inputs, how)))
    if ran:
        return max(ran, key=lambda entry: entry[0])[1]
    what = (
        f"none of the {len(failed)} shapes tried runs (the likeliest: {error})"
        if failed
        else "no layer determines it"
    )
    raise InputShapeError(f"cannot infer the input shape, {what}: {advice(model)}")


def required_arguments(model: nn.Module) -> list[inspect.Parameter]:
    """Returns the arguments of `forward` that have no default."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.default is inspect.Parameter.empty and p.kind not in kinds]


def advice(model: nn.Module) -> str:
    """Returns how to give this network its inputs on the command line; names only options that fit its `forward`."""
    needed = required_arguments(model)
    kinds = {parameter.kind for parameter in needed}
    names = [parameter.name for parameter in needed] or ["x"]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        if inspect.Parameter.POSITIONAL_ONLY in kinds:
            return (
                "no file can hold its arguments: call tconv_swap.verify with tconv_swap.Inputs(args, kwargs)"
            )
        named = ", ".join(f"{name!r}: {name}" for name in names)
        return f"give --inputs FILE with its arguments by name, from torch.save({{{named}}}, FILE)"
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is not None and len(names) == 1:
        numbers = f"torch.save(torch.randint({embedding.num_embeddings}, (2, 16)), FILE)"
        return f"give --inputs FILE; an embedding wants whole numbers, as from {numbers}"
    saved = f"--inputs FILE from torch.save(({', '.join(names)},), FILE), whatever they are"
    alone = ""
    if len(names) == 1:
        alone = f" (a list or a dict too: torch.save(([{names[0]}],), FILE))"
    if embedding is None and all(_may_be_tensor(parameter.annotation) for parameter in needed):
        each = " once for each" if len(names) > 1 else ""
        return f"give --input-shape{each}, or {saved}{alone}"
    return f"give {saved}{alone}"


def _may_be_tensor(annotation: object) -> bool:
    if annotation is inspect.Parameter.empty or annotation is Any:
        return True
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return name.rpartition(".")[2] in ("Tensor", "Any")


@dataclass(frozen=True)
class ModeTrial:
    """The result of one trial call.

    Attributes:
        mode: `eval` or `train`.
        error: the failure in one line; empty if the call succeeded.
        reached: the modules that were called.
        reader: the first of them whose class determines the shape of its input: it reads the network's input.
        pixels: the size of the smallest map that a transposed convolution read; 0 if none was reached.
        remark: what `examine` returned for the output.
    """

    mode: str
    error: str
    reached: frozenset[nn.Module]
    reader: nn.Module | None = None
    pixels: int = 0
    remark: str = ""


def try_modes(
    model: nn.Module, inputs: Inputs, examine: Callable[[Any], str] = lambda _: ""
) -> tuple[ModeTrial, ModeTrial]:
    """Calls `model` once in eval and once in train mode, without gradients, and returns what happened.

    The state of the model and the global random state are restored. This function raises nothing, whatever the model's
    forward raises.

    Args:
        model: the network.
        inputs: the inputs of each call.
        examine: called with what each call returns.
    """
    with preserved(model), torch.no_grad():
        return (
            _trial(model.eval(), "eval", inputs, examine),
            _trial(model.train(), "train", inputs, examine),
        )


def _trial(model: nn.Module, mode: str, inputs: Inputs, examine: Callable[[Any], str]) -> ModeTrial:
    reached: dict[nn.Module, None] = {}
    pixels: list[int] = []

    def hook(module: nn.Module, args: Any) -> None:
        reached[module] = None
        if (
            isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d)
            and args
            and isinstance(args[0], Tensor)
        ):
            dimensions = len(module.kernel_size)
            pixels.append(math.prod(args[0].shape[-dimensions:]))

    hooks = [m.register_forward_pre_hook(hook) for m in model.modules()]
    error = remark = ""
    try:
        # A network may write to its inputs, for example with an in-place ReLU, so each run gets a copy.
        remark = examine(inputs.map(torch.clone)(model))
    except Exception as failure:  # a user's forward may raise anything; all of it means "does not run"
        error = f"{type(failure).__name__}: {failure}".split("\n", 1)[0]
    finally:
        for handle in hooks:
            handle.remove()
    reader = next((module for module in reached if _accepted(module)), None)
    return ModeTrial(mode, error, frozenset(reached), reader, min(pixels, default=0), remark)


@dataclass(frozen=True)
class _Candidate:
    """A shape that a layer may read as the network's input; `high`: the exclusive upper bound of integer inputs."""

    layer: str
    module: nn.Module
    shape: tuple[int, ...]
    high: int | None

    @property
    def size(self) -> int:
        """Returns the width of its images in pixels; 1 if it is not a shape of images."""
        return self.shape[-1] if len(self.shape) > 2 else 1


def _candidates(model: nn.Module) -> list[_Candidate]:
    """Returns the shapes that the first layers allow, the most likely first."""
    layers = [module for module in model.modules() if _accepted(module)][:LAYERS_TRIED]
    return _sizes(model, layers)


def _sizes(model: nn.Module, layers: Sequence[nn.Module]) -> list[_Candidate]:
    """Returns the shapes that these layers allow, each once, larger batches first."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[tuple[int, ...], _Candidate] = {}
    for batch in BATCHES:
        for module in layers:
            high = module.num_embeddings if isinstance(module, nn.Embedding) else None
            called = f"{names[module] or 'the module itself'} ({type(module).__name__})"
            for shape in _accepted(module):
                full = (batch, *shape)
                found.setdefault(full, _Candidate(called, module, full, high))
    return list(found.values())


def _accepted(module: nn.Module) -> list[tuple[int, ...]]:
    """Returns the shapes, without the batch, that this layer would accept as the network's input; [] if it accepts
    any."""
    if isinstance(module, nn.ConvTranspose2d):
        if module.in_channels in IMAGE_CHANNELS:
            return [(module.in_channels, s, s) for s in IMAGE_SIZES]
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

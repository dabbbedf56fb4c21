"""Runs one network once from a known state: returns its results, and restores everything."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.computed import ComputedState
from tconv_swap.freezing import FrozenState
from tconv_swap.inputs import Inputs
from tconv_swap.module_state import ModuleState
from tconv_swap.verification.aliases import share_memory
from tconv_swap.verification.changed import change_weights
from tconv_swap.verification.tree import Tree, dense, flatten


@dataclass(frozen=True)
class Pass:
    """How a network is run: with which gradients, how they are computed, and with which weights.

    `accumulate` calls `backward()` instead of `torch.autograd.grad`, which re-entrant checkpointing refuses.
    `inference` runs under `torch.inference_mode()`. `changed` runs with other weights (see `changed.py`), which
    overwrite the old ones in place and are restored afterwards.
    """

    gradients: bool = True
    of_inputs: bool = True
    accumulate: bool = False
    inference: bool = False
    changed: bool = False


# These are tried on the original in this order; every network is then run with the first that works.
PASSES = (Pass(), Pass(accumulate=True), Pass(of_inputs=False), Pass(gradients=False, of_inputs=False))


#: A run without any gradients.
NOTHING = PASSES[-1]
#: The reader's name for the way in which other weights are used.
CHANGED = "with changed weights"


def other_ways(how: Pass) -> dict[str, Pass]:
    """Returns other ways than `how`, by their names for the reader: as a first layer is trained, as a network is
    served, and with weights that have changed since the first run.

    A layer distinguishes whether gradients are needed, and of what, so each of these is a separate way.
    """
    ways = {}
    if how.gradients and how.of_inputs:
        ways["inputs without gradients"] = replace(how, of_inputs=False)
    if how.gradients:
        ways["without gradients"] = NOTHING
    ways["under inference_mode"] = replace(NOTHING, inference=True)
    ways[CHANGED] = replace(NOTHING, changed=True)
    return ways


def may_be_compiled() -> bool:
    """Returns whether this process may have used `torch.compile`: whether its compiler is imported."""
    return "torch._dynamo" in sys.modules


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, code of `torch.compile` runs eagerly.

    An observed run calls hooks. Dynamo would compile the network anew with the hooks in it, which takes long, and what
    then ran would not be what was compiled before.
    """
    if not may_be_compiled():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@dataclass
class Outcome:
    """The results of one run: outputs, gradients by name (None: no gradient reached it), and the buffers that it
    changed."""

    output: Tree
    grad_inputs: dict[str, Tensor | None] = field(default_factory=dict)
    grad_parameters: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    differentiable: frozenset[str] = frozenset()
    random_state: tuple[bytes, ...] = ()

    def identical(self, other: Outcome) -> bool:
        """Returns whether all tensors of the two are equal; NaN equals NaN."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            if mine.keys() != theirs.keys() or not all(_equal(mine[n], theirs[n]) for n in mine):
                return False
        return True

    def in_same_memory(self, other: Outcome) -> set[str]:
        """Returns the paths of the outputs that share memory with those of another run."""
        mine, theirs = self.output.tensors, other.output.tensors
        return {path for path in mine.keys() & theirs.keys() if share_memory(mine[path], theirs[path])}

    def has_numbers(self) -> bool:
        """Returns whether any output has a finite element."""
        return any(bool(value.isfinite().any()) for value in self.output.tensors.values())

    def _tensors(self) -> list[dict[str, Any]]:
        return [dict(self.output.tensors), dict(self.grad_inputs), dict(self.grad_parameters), self.buffers]


class Subject:
    """A network whose state can be restored to what it was when this object was made.

    Covers every parameter and buffer (object and value), every training flag, every `.grad`, the frozen layers, and the
    tensors computed from parameters that the modules hold.
    """

    def __init__(
        self, module: nn.Module, beside: Subject | None = None, changing: Sequence[str] = ()
    ) -> None:
        """
        Args:
            beside: another Subject made just before; what the two networks share is kept once.
            changing: dotted names of the layers whose weights are changed by a run with changed weights.
        """
        self.module = module
        self._changing = changing
        self._modules = list(module.modules())
        self._flags = [m.training for m in self._modules]
        self._state: ModuleState = ModuleState(self._modules, beside._state if beside else None)
        self._gradients = [(p, p.grad) for p in module.parameters()]
        self._computed = ComputedState(self._modules)
        self._frozen = FrozenState(self._modules)

    def rewind(self) -> None:
        """Restores parameters, buffers and computed tensors, and removes gradients: every run begins so."""
        self._computed.put_back()
        self._state.put_back()
        for parameter, _ in self._gradients:
            parameter.grad = None

    def set_mode(self, mode: str) -> None:
        """Sets `eval` or `train`, in which layers are never frozen; words behind it are for the reader."""
        train = mode.startswith("train")
        self.module.train(train)
        if not train:
            self._frozen.put_back()

    def change_weights(self) -> None:
        """Writes other numbers into the parameters of the layers named at first, in place, until `rewind`."""
        change_weights(self.module, self._changing)

    def restore(self) -> None:
        """Restores everything."""
        self.rewind()
        for module, flag in zip(self._modules, self._flags, strict=True):
            module.training = flag
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._frozen.put_back()

    def changed_buffers(self) -> dict[str, Tensor]:
        """Returns copies of the buffers that have changed."""
        found = {}
        for name, buffer in self.module.named_buffers():
            before = self._state.value_of(buffer)
            if before is None or not same_numbers(buffer, before.to(buffer.device)):
                found[name] = buffer.detach().clone()
        return found


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else same_numbers(a, b)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors of one shape and dtype are equal; NaN equals NaN."""
    if a.is_nested and b.is_nested:
        ours, theirs = a.unbind(), b.unbind()
        return len(ours) == len(theirs) and all(map(same_numbers, ours, theirs))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = dense(a), dense(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def devices_of(*sources: nn.Module | Inputs) -> list[torch.device]:
    """Returns the devices of parameters, buffers and inputs, in a fixed order."""
    tensors = [
        tensor
        for source in sources
        for tensor in (
            (*source.parameters(), *source.buffers())
            if isinstance(source, nn.Module)
            else [t for _, t in source.named_tensors()]
        )
    ]
    return sorted({tensor.device for tensor in tensors}, key=str)


def _numpy() -> Any:
    """Returns numpy if it is imported; only then a network may draw numbers from it."""
    return sys.modules.get("numpy")


@contextmanager
def untouched(subjects: list[Subject], devices: list[torch.device]) -> Iterator[None]:
    """Restores the networks and all random states afterwards, also after an exception."""
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if (numpy := _numpy()) else None
    cuda = [device.index for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda), torch.inference_mode(False), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
            for subject in subjects:
                subject.restore()


class Runner:
    """Runs networks repeatedly on the same inputs, random numbers and output gradients.

    Attributes:
        scale: the size of the output gradients.
    """

    def __init__(self, inputs: Inputs, devices: list[torch.device], seed: int) -> None:
        self.inputs = inputs
        self.devices = devices
        self.seed = seed
        self.scale = 1.0
        self._cuda = [d for d in devices if d.type == "cuda"]

    def run(self, subject: Subject, mode: str, how: Pass, *, double: bool = False) -> Outcome:
        """Raises whatever the network raises."""
        subject.rewind()
        try:
            return self._run(subject, mode, how, double)
        finally:
            if how.changed:
                subject.rewind()

    def _run(self, subject: Subject, mode: str, how: Pass, double: bool) -> Outcome:
        subject.set_mode(mode)
        if how.changed:
            subject.change_weights()
        # A weight that a run without gradients has cast and cached would cut the graph of the next run.
        torch.clear_autocast_cache()
        self._seed()
        leaves: dict[str, Tensor] = {}
        inputs = self._fresh_inputs(how, leaves, double)
        with _gradients(how):
            output = flatten(inputs(subject.module))
        outcome = Outcome(output, random_state=self._random_state())
        if how.gradients:
            self._differentiate(subject, how, leaves, outcome)
        output.leaves = {k: v.detach() if isinstance(v, Tensor) else v for k, v in output.leaves.items()}
        outcome.buffers = subject.changed_buffers()
        return outcome

    def _seed(self) -> None:
        random.seed(self.seed)
        if numpy := _numpy():
            numpy.random.seed(self.seed % 2**32)
        torch.default_generator.manual_seed(self.seed)
        for device in self._cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(self.seed)

    def _random_state(self) -> tuple[bytes, ...]:
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._cuda)]
        return tuple(bytes(state.tolist()) for state in states)

    def _fresh_inputs(self, how: Pass, leaves: dict[str, Tensor], double: bool) -> Inputs:
        names = iter(self.inputs.named_tensors())

        def fresh(tensor: Tensor) -> Tensor:
            name, _ = next(names)
            copy = tensor.detach().clone()
            if double and copy.is_floating_point():
                copy = copy.double()
            if how.of_inputs and (copy.is_floating_point() or copy.is_complex()):
                leaves[name] = copy.requires_grad_()
                # A network may write to its input, which autograd forbids for a leaf that requires grad.
                return copy.clone()
            return copy

        return self.inputs.map(fresh)

    def _differentiate(
        self, subject: Subject, how: Pass, leaves: dict[str, Tensor], outcome: Outcome
    ) -> None:
        outputs = {path: t for path, t in outcome.output.tensors.items() if t.requires_grad}
        outcome.differentiable = frozenset(outputs)
        if not outputs:
            return
        cotangents = [self._cotangent(path, t) for path, t in outputs.items()]
        parameters = {n: p for n, p in subject.module.named_parameters() if p.requires_grad}
        targets = [*leaves.values(), *parameters.values()]
        if not targets:
            return
        gradients: tuple[Tensor | None, ...]
        if how.accumulate:
            torch.autograd.backward(list(outputs.values()), cotangents)
            gradients = tuple(target.grad for target in targets)
        else:
            gradients = torch.autograd.grad(
                list(outputs.values()), targets, cotangents, allow_unused=True, materialize_grads=False
            )
        outcome.grad_inputs = dict(zip(leaves, gradients[: len(leaves)], strict=True))
        outcome.grad_parameters = dict(zip(parameters, gradients[len(leaves) :], strict=True))

    def _cotangent(self, path: str, output: Tensor) -> Tensor:
        """Returns standard normal numbers, 1 for a scalar, times `scale`; they are rounded to bfloat16, and to float16
        where a small scale needs it, so they are the same in every dtype."""
        if output.numel() == 1:
            return torch.full_like(output, self.scale)
        numbers = normal(output.shape, output.device, f"{self.seed} {path}")
        if self.scale != 1.0:
            numbers = numbers.mul_(self.scale).half()
        return numbers.to(output.dtype)


def _gradients(how: Pass) -> AbstractContextManager[None]:
    if how.inference:
        return torch.inference_mode()
    return torch.enable_grad() if how.gradients else torch.no_grad()


def normal(shape: torch.Size, device: torch.device, key: str) -> Tensor:
    """Returns standard normal float32 numbers that bfloat16 can hold; the seed is `key`, and no global state is
    used."""
    place = device if device.type in ("cpu", "cuda") else torch.device("cpu")
    generator = torch.Generator(place).manual_seed(random.Random(key).getrandbits(62))
    numbers = torch.randn(shape, generator=generator, device=place, dtype=torch.float32)
    return numbers.bfloat16().float().to(device)

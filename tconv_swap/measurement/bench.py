"""Times the original and the swapped network: forward, backward, training step; per layer and as a whole.

Both are measured in one run, alternately (`timing`), on the same inputs, in the memory format of these inputs, with
`torch.backends.cudnn.benchmark` on so that PyTorch runs at its best. Each layer is also measured alone, on the tensors
that reach it in the original network. The state of both networks is restored (`preserving.preserved`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from tconv_swap.freezing import FrozenState
from tconv_swap.inputs import Inputs, model_device
from tconv_swap.layer import SWAPPED
from tconv_swap.measurement.environment import environment
from tconv_swap.measurement.modes import cudnn_benchmark
from tconv_swap.measurement.stages import (
    LayerCall,
    Loss,
    Stage,
    autocast_of,
    capture_calls,
    layer_variant,
    network_variant,
    sum_of_squares,
)
from tconv_swap.measurement.timing import (
    MIN_ITERS,
    Launches,
    Timing,
    Variant,
    speedup_interval,
    time_interleaved,
)
from tconv_swap.memory import is_out_of_memory
from tconv_swap.preserving import preserved

logger = logging.getLogger("tconv_swap")

MODEL_ITSELF = "(the model itself)"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Comparison:
    """The same stage of the original and of the swapped network (or layer), measured in one run."""

    name: str
    """Dotted name of the layer, or "network"."""
    stage: Stage
    original: Timing
    swapped: Timing

    @property
    def speedup(self) -> float:
        """Returns how many times faster the swapped one is, by the medians; below 1 it is slower."""
        return self.original.median_ms / self.swapped.median_ms

    @property
    def interval(self) -> tuple[float, float]:
        """Returns the 95 % confidence interval of the speedup, from the paired samples; it contains 1 if noise can
        explain the difference."""
        return speedup_interval(self.original, self.swapped)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "stage": self.stage,
            "original": self.original.to_dict(),
            "swapped": self.swapped.to_dict(),
            "speedup": self.speedup,
            "speedup_interval": list(self.interval),
        }


@dataclass(frozen=True)
class LayerComparison(Comparison):
    """A layer alone, on the tensors that reach it in the network."""

    input_shape: tuple[int, ...] = ()
    dtype: str = ""
    """The dtype of the computation: that of autocast if the layer runs under it."""
    memory_format: str = ""
    """"contiguous", "channels_last" or "strided" (neither)."""
    calls: int = 1
    """How often one forward pass of the network calls the layer with such an input."""

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "input_shape": list(self.input_shape),
            "dtype": self.dtype,
            "memory_format": self.memory_format,
            "calls": self.calls,
        }


@dataclass(frozen=True)
class PeakMemory:
    """The largest number of bytes allocated at once during one run, without those allocated before it (weights,
    inputs)."""

    stage: Stage
    original: int
    swapped: int

    def to_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "original_bytes": self.original, "swapped_bytes": self.swapped}


@dataclass
class BenchmarkReport:
    """The measurements of `benchmark`."""

    network: list[Comparison] = field(default_factory=list)
    layers: list[LayerComparison] = field(default_factory=list)
    peak_memory: list[PeakMemory] | None = None
    """None on the CPU, where PyTorch does not count."""
    environment: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    """How it was measured: warm-up, iterations, budget, and what is included."""
    notes: list[str] = field(default_factory=list)
    """What could not be measured, and why."""

    def transposed_share(self, stage: Stage) -> float | None:
        """Returns the share of the original network's time that its swapped layers take (0 to 1): Amdahl's bound.

        It is an estimate, since the layers are timed alone. None if the stage or the layers were not measured.
        """
        whole = next((c.original.median_ms for c in self.network if c.stage == stage), None)
        parts = [c.original.median_ms * c.calls for c in self.layers if c.stage == stage]
        if not whole or not parts:
            return None
        return min(1.0, sum(parts) / whole)

    def to_dict(self) -> dict[str, Any]:
        return {
            "network": [comparison.to_dict() for comparison in self.network],
            "layers": [comparison.to_dict() for comparison in self.layers],
            "transposed_share": {
                "forward": self.transposed_share("forward"),
                "backward": self.transposed_share("backward"),
            },
            "peak_memory": None
            if self.peak_memory is None
            else [peak.to_dict() for peak in self.peak_memory],
            "environment": dict(self.environment),
            "method": dict(self.method),
            "notes": list(self.notes),
        }


def benchmark(
    original: nn.Module,
    swapped: nn.Module,
    inputs: Any,
    *,
    warmup: int | None = None,
    iters: int | None = None,
    budget_s: float = 1.0,
    backward: bool = True,
    per_layer: bool = True,
    loss: Loss | None = None,
    progress: Progress | None = None,
) -> BenchmarkReport:
    """Times `swapped` against `original`, on the device of the networks and the inputs.

    forward: eval mode, no gradients. backward: train mode, from a loss of all floating-point outputs to the inputs and
        all parameters; the forward pass before it is not counted. step: zero_grad, forward, loss, backward and an SGD
        step with learning rate 0, which does all the work and leaves the weights unchanged. Frozen layers
        (`tconv_swap.freeze`) are frozen in forward only. On CUDA the time of a layer is that of its kernels; the time
        of a network includes the CPU's time to launch them.

    A stage that the original cannot run (no gradient anywhere, no train mode without targets, not enough memory) is
    left out, and a line in `notes` says so.

    Args:
        original: the network before the swap.
        swapped: the network after it; another object, with the same layer names.
        inputs: whatever `Inputs.of` accepts, on the networks' device. They are never written to.
        warmup, iters, budget_s: as in `timing.time_interleaved`, for each comparison.
        backward: also times backward and step.
        per_layer: also times every swapped layer alone.
        loss: from the network's output in train mode to a scalar; `stages.sum_of_squares` if None.
        progress: called with (the next step, comparisons done, comparisons in all).

    Raises:
        ValueError: `original` is `swapped`, a layer of `swapped` is not in `original`, or the networks lie on
            a device that is neither the CPU nor a CUDA device.
        Exception: whatever `swapped` raises and `original` does not.
    """
    if original is swapped:
        raise ValueError(
            "original and swapped are the same object: swap a copy (inplace=False) to compare them"
        )
    run = _Run(
        original,
        swapped,
        Inputs.of(inputs),
        loss or sum_of_squares,
        {"warmup": warmup, "iters": iters, "budget_s": budget_s},
    )
    stages: tuple[Stage, ...] = ("forward", "backward", "step") if backward else ("forward",)
    with preserved(original, swapped), cudnn_benchmark():
        run.record_circumstances()
        jobs: list[tuple[str, Callable[[], None]]] = []
        for call in run.layer_calls() if per_layer else []:
            jobs += [
                (f"{call.name or MODEL_ITSELF} {stage}", partial(run.time_layer, call, stage))
                for stage in stages[:2]
            ]
        jobs += [(f"network {stage}", partial(run.time_network, stage)) for stage in stages]
        for done, (what, job) in enumerate(jobs):
            logger.debug("timing %s", what)
            if progress is not None:
                progress(what, done, len(jobs))
            job()
        if progress is not None:
            progress("done", len(jobs), len(jobs))
    return run.report


class _Run:
    """One call of `benchmark`: what is compared, and the report so far."""

    def __init__(
        self, original: nn.Module, swapped: nn.Module, inputs: Inputs, loss: Loss, settings: dict[str, Any]
    ) -> None:
        self.models = {"original": original, "swapped": swapped}
        self.frozen = FrozenState([*original.modules(), *swapped.modules()])
        self.inputs = inputs
        self.loss = loss
        self.settings = settings
        self.device = _device_of(original, inputs)
        self.report = BenchmarkReport()
        if self.device.type == "cuda":
            self.report.peak_memory = []

    def record_circumstances(self) -> None:
        cuda = self.device.type == "cuda"
        self.report.environment = environment(self.device)
        iters = self.settings["iters"]
        if iters is not None and iters < MIN_ITERS:
            self._note(f"{iters} samples per timing are too few to tell a difference from noise")
        self.report.method = self.settings | {
            "order": "interleaved",
            "statistic": "median, quartiles",
            "clock": "cuda events" if cuda else "wall clock",
            "cold_l2": cuda,
            "layer_launches": "hidden" if cuda else "included",
            "network_launches": "included",
        }

    def layer_calls(self) -> list[LayerCall]:
        """Returns the calls that reach the swapped layers in one forward pass of the original."""
        names = [name for name, m in self.models["swapped"].named_modules() if isinstance(m, SWAPPED)]
        original = self.models["original"]
        for name in names:
            try:
                original.get_submodule(name)
            except AttributeError:
                raise ValueError(f"swapped has a layer {name!r} that original has not") from None
        errors = []
        for training in (False, True):  # some networks run only in one of the modes
            original.train(training)
            forward = network_variant(original, self.inputs, "forward", self.loss)
            try:
                calls = capture_calls(original, names, lambda: forward.run(forward.prepare()))  # noqa: B023
            except Exception as error:
                errors.append(_reason(error))
                continue
            unreached = [name for name in names if name not in {call.name for call in calls}]
            if unreached:
                self._note(
                    f"not timed, no call of theirs was seen in the forward pass: {', '.join(unreached)}"
                )
            return calls
        self._note(f"layers not timed: the original network raises {errors[0]}")
        return []

    def time_layer(self, call: LayerCall, stage: Stage) -> None:
        what = f"{call.name or MODEL_ITSELF} {stage}"
        self._set_mode(stage)
        variants = {
            side: partial(layer_variant, model.get_submodule(call.name), call, stage)
            for side, model in self.models.items()
        }
        with autocast_of(call):
            timings = self._time(what, variants, "hidden")
        if timings is not None:
            self.report.layers.append(
                LayerComparison(
                    call.name,
                    stage,
                    *timings,
                    input_shape=tuple(call.input.shape),
                    dtype=call.dtype,
                    memory_format=call.memory_format,
                    calls=call.calls,
                )
            )

    def time_network(self, stage: Stage) -> None:
        self._set_mode(stage)
        variants = {
            side: partial(network_variant, model, self.inputs, stage, self.loss)
            for side, model in self.models.items()
        }
        timings = self._time(f"network {stage}", variants, "included")
        if timings is None:
            return
        self.report.network.append(Comparison("network", stage, *timings))
        if self.report.peak_memory is not None and stage != "backward":
            peaks = {side: _peak_bytes(variant(), self.device) for side, variant in variants.items()}
            self.report.peak_memory.append(PeakMemory(stage, **peaks))

    def _set_mode(self, stage: Stage) -> None:
        """Sets the mode of the networks, not of the layers: a network's own `train` may leave some layers in eval
        mode."""
        for model in self.models.values():
            model.train(stage != "forward")
        if stage == "forward":  # the train mode of another stage has unfrozen them
            self.frozen.put_back()

    def _time(
        self, what: str, variants: Mapping[str, Callable[[], Variant]], launches: Launches
    ) -> tuple[Timing, Timing] | None:
        """Returns both timings; None and a note if the original cannot run the stage, or if there is not enough
        memory."""
        side = "original"
        try:
            # The original runs once first: what PyTorch cannot do is not the swap's fault, but any other error is.
            _once(variants["original"]())
            side = "swapped"
            _once(variants["swapped"]())
            made = {name: variant() for name, variant in variants.items()}
            timings = time_interleaved(made, device=self.device, launches=launches, **self.settings)
        except torch.AcceleratorError:  # the GPU has failed: no later result can be trusted
            raise
        except Exception as error:
            if side != "original" and not is_out_of_memory(error):
                raise
            self._note(f"{what} not timed: the {side} network raises {_reason(error)}")
            return None
        finally:
            for model in self.models.values():
                model.zero_grad(set_to_none=True)
        return timings["original"], timings["swapped"]

    def _note(self, text: str) -> None:
        logger.info(text)
        self.report.notes.append(text)


def _once(variant: Variant) -> None:
    variant.run(variant.prepare())


def _reason(error: Exception) -> str:
    """Returns the exception's class and the first line of its message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _device_of(model: nn.Module, inputs: Inputs) -> torch.device:
    if next(model.parameters(), None) is None and next(model.buffers(), None) is None:
        return next((tensor.device for _, tensor in inputs.named_tensors()), torch.device("cpu"))
    return model_device(model)


def _peak_bytes(variant: Variant, device: torch.device) -> int:
    state = variant.prepare()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = variant.run(state)
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before

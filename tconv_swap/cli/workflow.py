"""One swap from file to file: load, plan, find inputs, swap, verify, time, save.

This is the work of the command line, without options, printing or exit codes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from tconv_swap.cli import network_file, way_choice
from tconv_swap.cli.block_choice import BlockChoice
from tconv_swap.cli.device import device_of
from tconv_swap.cli.places import PlaceError, check_not_imported
from tconv_swap.cli.request import (
    Explained,
    ExplainRequest,
    NetworkRequest,
    Place,
    PrepareRequest,
    Progress,
    Request,
    RequestError,
    Result,
)
from tconv_swap.computed import deep_copy
from tconv_swap.explanation import Explanation, explain
from tconv_swap.files.fileformat import first_line
from tconv_swap.files.loading import LoadedModel, load_inputs, load_model
from tconv_swap.files.saving import SaveError, check_target
from tconv_swap.functional import find_functional_calls
from tconv_swap.input_search import InferredInputs, InputShapeError, advice, infer_inputs, try_modes
from tconv_swap.inputs import Inputs, model_device, random_inputs
from tconv_swap.layer_calls import DEVICES
from tconv_swap.measurement.bench import benchmark
from tconv_swap.measurement.ceilings import mode_of
from tconv_swap.measurement.measured_ceilings import measure_ceilings
from tconv_swap.measurement.roof import Ceilings
from tconv_swap.memory import free_bytes, is_out_of_memory
from tconv_swap.preparation import PrepareReport, prepare
from tconv_swap.report import Facts
from tconv_swap.surgery import SwapPlan, SwapWarning, plan_swap, swap_layers, unswap_layers
from tconv_swap.tuning import TuneReport, tune
from tconv_swap.verification import VerifyReport, verify
from tconv_swap.verification.tree import flatten, lack_of_numbers

#: Nothing is left out.
NO_BLOCKS: Mapping[str, str] = MappingProxyType({})


def run(request: Request, progress: Progress, placed: Callable[[Path], None] | None = None) -> Result:
    """Do what `request` says. The output file is written last, and only if the verification has passed.

    Args:
        request: what to do.
        progress: called with what comes next.
        placed: called with the output file once it is in its place.

    Raises:
        LoadError: the file is not a network that may be loaded.
        RequestError: there is no such device, there are no inputs on which the network runs, or an output is not
        possible.
        SaveError: the verified network could not be written.
    """
    device = device_of(request.device)
    out = request.out
    if out is not None:
        _checked(lambda: check_target(out))
    progress(f"loading {request.model}")
    loaded = _load(request, () if out is None else (("--out", out),))
    if loaded.program is not None and request.out_format != "module":
        raise RequestError("--out-format state_dict: a torch.export archive is written as one")
    if out is not None:
        _checked(lambda: network_file.check_name(out, loaded, request))
    way_choice.check_request(request, device, exported=loaded.program is not None)
    plan = _plan(loaded.model, request)
    notes = _notes(loaded)
    if request.dry_run or not plan.swapped:
        notes += map(str, find_functional_calls(loaded.model))
        return Result(plan, _facts(request, device, "none", "nothing was run", notes))
    if out is not None:
        _checked(lambda: network_file.check_writable(loaded, request))

    original, swapped = original_and_swapped(loaded.model, request, device)
    found = _inputs_that_run(request, original, loaded.inputs, progress)
    notes += map(str, find_functional_calls(original, found.inputs))
    choice = BlockChoice(plan)
    if choice.leave_slower(original, swapped, found.inputs, request, progress):
        del original, swapped
        original, swapped = original_and_swapped(loaded.model, request, device, choice.left)
    progress(f"verifying on {found.inputs.describe()}")
    verification = _verified(original, swapped, found.inputs, request)
    while choice.leave_failing(verification):
        progress("verifying without the blocks that fail")
        del original, swapped
        original, swapped = original_and_swapped(loaded.model, request, device, choice.left)
        verification = _verified(original, swapped, found.inputs, request)
    notes += choice.notes(device)
    plan = _plan(loaded.model, request, choice.left)
    timing = None
    if request.benchmark and verification.passed:
        timing = benchmark(
            original,
            swapped,
            found.inputs,
            warmup=request.warmup,
            iters=request.iters,
            backward=request.backward,
            progress=lambda what, done, total: progress(f"timing {what}", done, total),
        )
    ways = way_choice.choose_way(swapped, found.inputs, request, verification, progress)
    explanation = _explanation(swapped, found.inputs, request.backward, notes)
    # On the CPU, all formulations consist of PyTorch's operators.
    native = explanation.native if explanation is not None and device.type == "cuda" else ()
    ceilings = None
    if timing is not None and explanation is not None and device.type == "cuda":
        progress("measuring the ceilings of this GPU")
        ceilings = _ceilings(device, explanation, notes)
    written = ""
    if out is not None and verification.passed:
        del original, swapped
        progress(f"writing {out}")
        names = [name for layer in plan.swapped for name in layer.names]
        prepared = way_choice.prepared(_swap(loaded.model, request, choice.left), ways)
        notes += network_file.write(loaded, prepared, names, request, placed)
        written = way_choice.with_run(network_file.load_snippet(loaded, request, plan), ways, device)
    elif verification.passed:
        notes.append("nothing was written: --out FILE writes the swapped network")
    else:
        notes.append("nothing was written")
    facts = _facts(request, device, found.inputs.describe(), found.how, notes, written, native)
    return Result(plan, facts, verification, timing, explanation, ceilings, ways)


def tune_layers(request: NetworkRequest, progress: Progress) -> TuneReport | None:
    """Measure what computes the layers that a swap would swap, and keep the winners for this machine. No other file
    is written.

    Returns:
        What was measured; None if there is nothing to swap.

    Raises:
        LoadError, RequestError: as ``run``.
    """
    device = device_of(request.device)
    progress(f"loading {request.model}")
    loaded = _load(request)
    if not _plan(loaded.model, request).swapped:
        return None
    original, swapped = original_and_swapped(loaded.model, request, device)
    found = _inputs_that_run(request, original, loaded.inputs, progress)
    progress(f"tuning on {found.inputs.describe()}")
    return tune(swapped, found.inputs, backward=None if request.backward else False)


def prepare_layers(request: PrepareRequest, progress: Progress) -> PrepareReport | None:
    """Compile what the layers that a swap would swap need on a GPU, and keep it for this machine. No other file is
    written.

    Returns:
        What was done; None if there is nothing to swap.

    Raises:
        LoadError, RequestError: as ``run``; there is no such architecture, or none is named and there is no GPU.
    """
    if request.architecture is not None and request.architecture not in DEVICES:
        raise RequestError(f"--arch {request.architecture}: expected one of {', '.join(DEVICES)}")
    device = device_of(request.device)
    if request.architecture is None and device.type != "cuda":
        raise RequestError(f"there is no GPU to prepare for: name its --arch, one of {', '.join(DEVICES)}")
    progress(f"loading {request.model}")
    loaded = _load(request)
    if not _plan(loaded.model, request).swapped:
        return None
    place = device if request.architecture is None else torch.device("cpu")
    original, swapped = original_and_swapped(loaded.model, request, place)
    inputs = None
    if request.inputs is not None or request.input_shapes or loaded.inputs is not None:
        inputs = _inputs_that_run(request, original, loaded.inputs, progress).inputs
    return prepare(
        swapped.train(request.training),
        inputs,
        training=request.training,
        architecture=request.architecture,
        dtypes=None if request.autocast is None else [request.autocast],
        memory_formats=[torch.channels_last] if request.channels_last else None,
        progress=progress,
    )


def explain_request(request: ExplainRequest, progress: Progress) -> Explained:
    """Load and plan, and follow the shapes through the network, without data if that is possible.

    Args:
        request: the network, and the GPU to plan for, if it is another one than the network's.
        progress: called with what comes next.

    Raises:
        LoadError, RequestError: as `run`.
    """
    if request.architecture is not None and request.architecture not in DEVICES:
        raise RequestError(f"--arch {request.architecture}: expected one of {', '.join(DEVICES)}")
    device = device_of(request.device)
    progress(f"loading {request.model}")
    loaded = _load(request)
    plan = _plan(loaded.model, request)
    notes = _notes(loaded)
    if not plan.swapped:
        return Explained(plan, notes=tuple(notes))
    progress("planning")
    # The plan for a GPU of this machine uses what was tuned on it, so the network has to be on that GPU.
    here = device.type == "cuda" and request.architecture is None
    places = (device,) if here else (torch.device("meta"), torch.device("cpu"))
    for place in places:
        try:
            original, swapped = original_and_swapped(loaded.model, request, place)
            found = _inputs(request, original, loaded.inputs)
            made = explain(
                swapped, found.inputs, architecture=request.architecture, backward=request.backward
            )
        except Exception as error:  # a foreign forward may raise anything
            if place != places[-1]:
                notes.append(f"run once on the CPU, since without numbers it raises {first_line(error)}")
                continue
            if isinstance(error, RequestError) or is_out_of_memory(error):
                raise
            raise RequestError(
                f"the network does not run ({first_line(error)}): {advice(loaded.model)}"
            ) from error
        break
    return Explained(plan, found.inputs.describe(), found.how, made, tuple(notes))


def _load(request: NetworkRequest, out: Sequence[Place] = ()) -> LoadedModel:
    loaded = load_model(
        request.model,
        trust=request.trust,
        unsafe_pickle=request.unsafe_pickle,
        module=request.module,
        factory=request.factory,
        key=request.key,
    )
    try:
        check_not_imported([*out, *request.written])
    except PlaceError as error:
        raise RequestError(str(error)) from None
    return loaded


def _verified(original: nn.Module, swapped: nn.Module, inputs: Inputs, request: Request) -> VerifyReport:
    return verify(
        original,
        swapped,
        inputs,
        backward=request.backward,
        atol=request.atol,
        rtol=request.rtol,
        autocast=request.autocast,
        seed=request.seed,
    )


def _explanation(swapped: nn.Module, inputs: Inputs, backward: bool, notes: list[str]) -> Explanation | None:
    """Returns what computes each layer, for the report. If the network raises, a note says so and the command goes
    on."""
    try:
        return explain(swapped, inputs, backward=backward)
    except Exception as error:  # a foreign forward may raise anything
        notes.append(f"not explained which kernels run: the network raises {first_line(error)}")
        return None


def _ceilings(device: torch.device, explanation: Explanation, notes: list[str]) -> Ceilings | None:
    """Measures the rates that bound the layers, in the modes in which they are computed."""
    found = {mode_of(getattr(torch, layer.dtype), layer.precision) for layer in explanation.layers}
    torch.cuda.empty_cache()
    try:
        return measure_ceilings(device, iters=10, modes=[mode for mode in found if mode is not None])
    except torch.OutOfMemoryError:
        notes.append("the ceilings of this GPU were not measured: not enough memory")
        return None


def _checked(check: Callable[[], None]) -> None:
    """Turns a SaveError into a usage error, for checks that are made before any work is done."""
    try:
        check()
    except SaveError as error:
        raise RequestError(str(error)) from None


def original_and_swapped(
    model: nn.Module, request: NetworkRequest, device: torch.device, left: Mapping[str, str] = NO_BLOCKS
) -> tuple[nn.Module, nn.Module]:
    """Returns the original and the swapped network on `device`, with the same parameters. The file may be swapped
    already.

    So the weights are in memory twice: as the file has them, and here. They are there once if they are on a GPU
    already that could not hold more. (Verification and timing do not change parameters.)
    """
    original = deep_copy(model, _shared(model) if _fills(model, device, request) else {})
    try:
        original.to(device=device, dtype=request.dtype)
        if request.channels_last:
            original.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
    ) as error:  # no memory; the meta device; integer dtypes
        raise RequestError(f"the network cannot be moved to {device} ({first_line(error)})") from error
    swapped = _swap(deep_copy(original, _shared(original)), request, left)
    return unswap_layers(original), swapped


def _shared(model: nn.Module) -> dict[int, object]:
    """Returns a memo for `deep_copy` that makes the copy share the parameters."""
    return {id(parameter): parameter for parameter in model.parameters()}


def _fills(model: nn.Module, device: torch.device, request: NetworkRequest) -> bool:
    """Returns whether the network is already on this GPU in the form in which it runs, and a second one would not
    fit."""
    if device.type != "cuda" or request.dtype is not None or request.channels_last:
        return False
    held = list(model.parameters())
    free = free_bytes(device)
    size = sum(parameter.numel() * parameter.element_size() for parameter in held)
    return (
        free is not None
        and size > free / 2
        and {p.device for p in held} == {torch.empty(0, device=device).device}
    )


def _plan(model: nn.Module, request: NetworkRequest, left: Mapping[str, str] = NO_BLOCKS) -> SwapPlan:
    return plan_swap(
        model,
        include=request.include or None,
        exclude=request.exclude,
        include_1d=request.include_1d,
        fuse=request.fuse,
        leave_blocks=left,
    )


def _swap(model: nn.Module, request: NetworkRequest, left: Mapping[str, str]) -> nn.Module:
    with warnings.catch_warnings():
        # The plan says the same, and the report shows the plan.
        warnings.simplefilter("ignore", SwapWarning)
        return swap_layers(
            model,
            include=request.include or None,
            exclude=request.exclude,
            backend=request.backend,
            include_1d=request.include_1d,
            fuse=request.fuse,
            leave_blocks=left,
        )


def _inputs_that_run(
    request: NetworkRequest, model: nn.Module, exported: Inputs | None, progress: Progress
) -> InferredInputs:
    progress("finding inputs")
    found = _inputs(request, model, exported)
    trials = try_modes(model, found.inputs, lambda output: lack_of_numbers(flatten(output)))
    if all(trial.error for trial in trials):
        raise RequestError(
            f"the network does not run on {found.inputs.describe()} ({trials[0].error}): {advice(model)}"
        )
    for trial in trials:
        if trial.remark:
            raise RequestError(f"nothing to compare in {trial.mode} mode: the network {trial.remark}")
    return found


def _inputs(request: NetworkRequest, model: nn.Module, exported: Inputs | None) -> InferredInputs:
    device = model_device(model)
    if request.inputs is not None:
        given = load_inputs(request.inputs)
        found = InferredInputs(given.to(device, request.dtype), f"read from {request.inputs}")
    elif request.input_shapes:
        found = InferredInputs(
            random_inputs(request.input_shapes, model, seed=request.seed),
            f"--input-shape, random with seed {request.seed}",
        )
    elif exported is not None:
        found = InferredInputs(exported.to(device, request.dtype), "those the program was exported with")
    else:
        try:
            found = infer_inputs(model, seed=request.seed)
        except InputShapeError as error:
            raise RequestError(str(error)) from None
    if not request.channels_last:
        return found
    inputs: Inputs = found.inputs.to(memory_format=torch.channels_last)
    return InferredInputs(inputs, f"{found.how}, channels_last")


def _notes(loaded: LoadedModel) -> list[str]:
    notes = list(loaded.notes)
    if loaded.missing_devices:
        missing = ", ".join(loaded.missing_devices)
        notes.append(
            f"the file's tensors were on {missing}, which is not here: they are on the CPU, also in the output"
        )
    return notes


def _facts(
    request: Request,
    device: torch.device,
    inputs: str,
    origin: str,
    notes: list[str],
    snippet: str = "",
    native: tuple[str, ...] = (),
) -> Facts:
    return Facts(
        model=str(request.model),
        inputs=inputs,
        inputs_origin=origin,
        device=str(device),
        output=str(request.out) if snippet else None,
        load_snippet=snippet,
        warnings=tuple(notes),
        native=native,
    )

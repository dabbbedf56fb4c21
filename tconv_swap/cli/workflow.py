"""Does the work of the commands that take a network, such as a swap from file to file: load, plan, find inputs, swap,
verify, time, save.

Options, printing and exit codes are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from tconv_swap.cli import network_file, way_choice
from tconv_swap.cli.block_choice import BlockChoice
from tconv_swap.cli.device import device_of
from tconv_swap.cli.network_inputs import inputs_for, inputs_that_run
from tconv_swap.cli.networks import original_and_swapped, plan_for, swap_for
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
from tconv_swap.explanation import Explanation, explain
from tconv_swap.files.fileformat import first_line
from tconv_swap.files.loading import LoadedModel, load_model
from tconv_swap.files.saving import SaveError, check_target
from tconv_swap.functional import find_functional_calls
from tconv_swap.input_search import advice
from tconv_swap.inputs import Inputs
from tconv_swap.layer_calls import DEVICES
from tconv_swap.measurement.bench import benchmark
from tconv_swap.measurement.ceilings import mode_of
from tconv_swap.measurement.measured_ceilings import measure_ceilings
from tconv_swap.measurement.roof import Ceilings
from tconv_swap.memory import is_out_of_memory
from tconv_swap.preparation import PrepareReport, prepare
from tconv_swap.report import Facts
from tconv_swap.tuning import TuneReport, tune
from tconv_swap.verification import VerifyReport, verify


def run(request: Request, progress: Progress, placed: Callable[[Path], None] | None = None) -> Result:
    """Does what `request` says. The output file is written last, and only if the verification has passed.

    Args:
        request: the request.
        progress: called with the next step.
        placed: called with the output file once it has its final name.

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
    plan = plan_for(loaded.model, request)
    notes = _notes(loaded)
    if request.dry_run or not plan.swapped:
        notes += map(str, find_functional_calls(loaded.model))
        return Result(plan, _facts(request, device, "none", "nothing was run", notes))
    if out is not None:
        _checked(lambda: network_file.check_writable(loaded, request))

    original, swapped = original_and_swapped(loaded.model, request, device)
    found = inputs_that_run(request, original, loaded.inputs, progress)
    notes += map(str, find_functional_calls(original, found.inputs))
    choice = BlockChoice(plan)
    if choice.leave_slower(original, swapped, found.inputs, request, progress):
        del original, swapped
        original, swapped = original_and_swapped(loaded.model, request, device, choice.left_out)
    progress(f"verifying on {found.inputs.describe()}")
    verification = _verified(original, swapped, found.inputs, request)
    while choice.leave_failing(verification):
        progress("verifying without the blocks that fail")
        del original, swapped
        original, swapped = original_and_swapped(loaded.model, request, device, choice.left_out)
        verification = _verified(original, swapped, found.inputs, request)
    notes += choice.notes(device)
    plan = plan_for(loaded.model, request, choice.left_out)
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
        prepared = way_choice.prepared(swap_for(loaded.model, request, choice.left_out), ways)
        notes += network_file.write(loaded, prepared, names, request, placed)
        written = way_choice.with_run(network_file.load_snippet(loaded, request, plan), ways, device)
    elif verification.passed:
        notes.append("nothing was written: --out FILE writes the swapped network")
    else:
        notes.append("nothing was written")
    facts = _facts(request, device, found.inputs.describe(), found.how, notes, written, native)
    return Result(plan, facts, verification, timing, explanation, ceilings, ways)


def tune_layers(request: NetworkRequest, progress: Progress) -> TuneReport | None:
    """Measures what computes the swapped layers of a network fastest, and keeps the winners for this machine. Writes no
    other file.

    Returns:
        The measurements; None if there is nothing to swap.

    Raises:
        LoadError, RequestError: as ``run``.
    """
    device = device_of(request.device)
    progress(f"loading {request.model}")
    loaded = _load(request)
    if not plan_for(loaded.model, request).swapped:
        return None
    original, swapped = original_and_swapped(loaded.model, request, device)
    found = inputs_that_run(request, original, loaded.inputs, progress)
    progress(f"tuning on {found.inputs.describe()}")
    return tune(swapped, found.inputs, backward=None if request.backward else False)


def prepare_layers(request: PrepareRequest, progress: Progress) -> PrepareReport | None:
    """Compiles the kernels that the swapped layers of a network need on a GPU, and keeps them. Writes no
    other file.

    Returns:
        A report; None if there is nothing to swap.

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
    if not plan_for(loaded.model, request).swapped:
        return None
    place = device if request.architecture is None else torch.device("cpu")
    original, swapped = original_and_swapped(loaded.model, request, place)
    inputs = None
    if request.inputs is not None or request.input_shapes or loaded.inputs is not None:
        inputs = inputs_that_run(request, original, loaded.inputs, progress).inputs
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
    """Loads and plans, and propagates the shapes through the network, without data if that is possible.

    Args:
        request: the network, and the GPU to plan for if it is not the network's.
        progress: called with the next step.

    Raises:
        LoadError, RequestError: as `run`.
    """
    if request.architecture is not None and request.architecture not in DEVICES:
        raise RequestError(f"--arch {request.architecture}: expected one of {', '.join(DEVICES)}")
    device = device_of(request.device)
    progress(f"loading {request.model}")
    loaded = _load(request)
    plan = plan_for(loaded.model, request)
    notes = _notes(loaded)
    if not plan.swapped:
        return Explained(plan, notes=tuple(notes))
    progress("planning")
    # The plan for a GPU of this machine uses the winners of `tune` on it, so the network has to be on that GPU.
    here = device.type == "cuda" and request.architecture is None
    places = (device,) if here else (torch.device("meta"), torch.device("cpu"))
    for place in places:
        try:
            original, swapped = original_and_swapped(loaded.model, request, place)
            found = inputs_for(request, original, loaded.inputs)
            made = explain(
                swapped, found.inputs, architecture=request.architecture, backward=request.backward
            )
        except Exception as error:  # a user's forward may raise anything
            if place != places[-1]:
                notes.append(f"run once on the CPU, since without data it raises {first_line(error)}")
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
    except Exception as error:  # a user's forward may raise anything
        notes.append(f"the report does not say which kernels run: the network raises {first_line(error)}")
        return None


def _ceilings(device: torch.device, explanation: Explanation, notes: list[str]) -> Ceilings | None:
    """Measures the rates that bound the layers, in the modes in which they are computed."""
    found = {mode_of(getattr(torch, layer.dtype), layer.precision) for layer in explanation.layers}
    torch.cuda.empty_cache()
    try:
        return measure_ceilings(device, iters=10, modes=[mode for mode in found if mode is not None])
    except torch.OutOfMemoryError:
        notes.append("the ceilings of this GPU were not measured: there is not enough memory")
        return None


def _checked(check: Callable[[], None]) -> None:
    """Turns a SaveError into a usage error, for checks that are made before any work is done."""
    try:
        check()
    except SaveError as error:
        raise RequestError(str(error)) from None


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

"""Finds the inputs of a request: from a file, of given shapes, of an exported program, or of inferred shapes."""

from __future__ import annotations

import torch
from torch import nn

from tconv_swap.cli.request import NetworkRequest, Progress, RequestError
from tconv_swap.files.loading import load_inputs
from tconv_swap.input_search import InferredInputs, InputShapeError, advice, infer_inputs, try_modes
from tconv_swap.inputs import Inputs, model_device, random_inputs
from tconv_swap.verification.tree import flatten, lack_of_numbers


def inputs_that_run(
    request: NetworkRequest, model: nn.Module, exported: Inputs | None, progress: Progress
) -> InferredInputs:
    """Returns the inputs of a request, on which the network runs in eval or train mode.

    Args:
        request: says which inputs to use, if any.
        model: the network, on the device on which it runs.
        exported: the inputs with which a program was exported.
        progress: called with the next step.

    Raises:
        RequestError: the network does not run on them, or returns nothing that can be compared; or none were found.
    """
    progress("finding inputs")
    found = inputs_for(request, model, exported)
    trials = try_modes(model, found.inputs, lambda output: lack_of_numbers(flatten(output)))
    if all(trial.error for trial in trials):
        raise RequestError(
            f"the network does not run on {found.inputs.describe()} ({trials[0].error}): {advice(model)}"
        )
    for trial in trials:
        if trial.remark:
            raise RequestError(f"nothing to compare in {trial.mode} mode: the network {trial.remark}")
    return found


def inputs_for(request: NetworkRequest, model: nn.Module, exported: Inputs | None) -> InferredInputs:
    """Returns the inputs of a request, without running the network on them.

    Raises:
        RequestError: the request names none, and none were found.
    """
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

"""The epilogue of a forward plan, which changes a sum before it is stored: constants and one argument for
csrc/kernels/common/epilogue.cuh."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from tconv_swap.kernels.norm.shape import Activation
from tconv_swap.runtime.program import ELEMENT_TYPES, Constant, Launch, Plan, fields, input_, int64, output

Constants = tuple[tuple[str, Constant], ...]

#: The inputs of a plan with an epilogue behind input, weight and bias: the norm's weight, bias, running_mean and
#: running_var.
_VECTORS = (input_(3), input_(4), input_(5), input_(6))
_BIAS = input_(2)
#: Activations that need few registers beside the sums of a forward kernel. The code of others may spill a few sums to
#: local memory, once for each output, which is a small part of what another kernel would read and write.
_SMALL = frozenset({Activation.IDENTITY, Activation.RELU, Activation.TANH})


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What is computed after the bias of the layer: ``activation((x - mean) / sqrt(variance + eps) * weight + bias)``.

    Attributes:
        normalizes: whether there is a norm, which uses running statistics.
        parameters: the dtype of the norm's vectors.
        slope: the slope of a leaky ReLU.
    """

    normalizes: bool
    activation: Activation
    parameters: torch.dtype = torch.float32
    eps: float = 0.0
    slope: float = 0.0

    def constants(self, has_bias: bool) -> Constants:
        """Returns the constants of a kernel that stores outputs."""
        return (
            ("HAS_BIAS", has_bias),
            ("NORMALIZES", self.normalizes),
            ("ACTIVATION", int(self.activation)),
            ("Parameter", ELEMENT_TYPES[self.parameters]),
        )


_BIAS_ALONE = Epilogue(False, Activation.IDENTITY)


def bias_alone(has_bias: bool) -> Constants:
    """Returns the constants of a kernel whose epilogue only adds the bias."""
    return _BIAS_ALONE.constants(has_bias)


def with_epilogue(plan: Plan, epilogue: Epilogue) -> Plan | None:
    """Returns the forward plan with an epilogue. Its seven inputs are input, weight, bias, the norm's weight and bias,
    running_mean and running_var. Returns None if the last kernel of the plan has no epilogue."""
    if epilogue == _BIAS_ALONE:
        return plan
    *before, last = plan.launches or (None,)
    if last is None:
        return plan
    if not _has_epilogue(last) or any(one is not None and output(0) in one.operands for one in before):
        return None
    return plan._replace(launches=(*plan.launches[:-1], _change_epilogue(last, epilogue)))


def _has_epilogue(launch: Launch) -> bool:
    names = {name for name, _ in launch.kernel.constants}
    return output(0) in launch.operands and _BIAS in launch.arguments and "NORMALIZES" in names


def _change_epilogue(launch: Launch, epilogue: Epilogue) -> Launch:
    has_bias = bool(dict(launch.kernel.constants)["HAS_BIAS"])
    changed = dict(epilogue.constants(has_bias))
    constants = tuple((name, changed.get(name, value)) for name, value in launch.kernel.constants)
    (numbers,) = struct.unpack("<q", struct.pack("<2f", epilogue.eps, epilogue.slope))
    argument = fields(_BIAS, *_VECTORS, int64(numbers))
    at = launch.arguments.index(_BIAS)
    return launch._replace(
        kernel=launch.kernel._replace(constants=constants, spills=epilogue.activation not in _SMALL),
        arguments=(*launch.arguments[:at], *argument, *launch.arguments[at + 1 :]),
    )

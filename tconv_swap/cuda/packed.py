"""A weight that its owner promises not to change. It is packed once for each kind of call instead of at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tconv_swap.cuda import call
from tconv_swap.geometry import Arguments, as_pair
from tconv_swap.runtime import launch


class PackedWeight:
    """The packed forms of one weight. It notices when its owner puts another object or storage in place or changes
    the weight in place; it does not notice ``weight.data.mul_``.

    Calls may come from any stream: the packed weight is complete before the first call returns.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._state = weight._version, weight.data_ptr(), weight.stride()
        #: For each kind of call: the handle of a plan that reads the packed weight, and that weight; None if the plan
        #: packs nothing.
        self._plans: dict[tuple[Any, ...], tuple[int, Tensor] | None] = {}
        #: Input shapes whose plans do not pack the weight.
        self.unpacked_shapes: set[torch.Size] = set()

    def is_unchanged(self) -> bool:
        weight = self.weight
        return (weight._version, weight.data_ptr(), weight.stride()) == self._state

    def forward(
        self, input: Tensor, bias: Tensor | None, arguments: Arguments, backend: str
    ) -> Tensor | None:
        """Returns the output for a plain CUDA tensor; None if the call has to be computed as any other call.

        While a CUDA graph is captured it returns None: the graph may be replayed after the weight has changed.
        """
        layouts = tuple(
            None if one is None else (one.shape, one.stride(), one.data_ptr() % call.ALIGNMENT)
            for one in (input, bias)
        )
        kind = (*layouts, input.dtype, input.get_device(), arguments, backend, call.precision())
        if kind not in self._plans and not torch.cuda.is_current_stream_capturing():
            self._plans[kind] = self._pack(input, bias, arguments, backend)
            if self._plans[kind] is None:
                self.unpacked_shapes.add(input.shape)
        plan = self._plans.get(kind)
        if plan is None or torch.cuda.is_current_stream_capturing():
            return None
        handle, packed = plan
        return torch.ops.tconv_swap.launch.default(handle, [input, packed, bias])[0]  # type: ignore[no-any-return]

    def release(self) -> None:
        """Release the packed weights once no stream reads them any more."""
        if any(self._plans.values()):
            torch.cuda.synchronize(self.weight.device)
        for plan in self._plans.values():
            if plan is not None:
                launch.drop_plan(plan[0])
        self._plans.clear()

    @torch.no_grad()
    def _pack(
        self, input: Tensor, bias: Tensor | None, arguments: Arguments, backend: str
    ) -> tuple[int, Tensor] | None:
        weight = self.weight
        stride, padding, output_padding, groups, dilation = arguments
        arguments = (
            as_pair(stride, "stride"),
            as_pair(padding, "padding"),
            as_pair(output_padding, "output_padding"),
            groups,
            as_pair(dilation, "dilation"),
        )
        step = call.step_for(input, weight, bias, arguments, backend)
        problem = call.problem_of(input, weight, bias, arguments)
        activations = torch.channels_last if problem.channels_last else torch.contiguous_format
        weights = torch.channels_last if problem.weight_channels_last else torch.contiguous_format
        is_read_as_it_lies = (
            call.reads_as_it_lies(input, activations)
            and call.reads_as_it_lies(weight, weights)
            and (bias is None or call.reads_as_it_lies(bias, torch.contiguous_format))
        )
        parts = None if step.plan is None else step.plan.without_packing(input.element_size())
        if parts is None or not is_read_as_it_lies:
            return None
        architecture = call.device_facts(input.get_device()).architecture
        packing, rest = parts
        to_pack = launch.add_plan(packing, input.dtype, input.device, architecture)
        (packed,) = torch.ops.tconv_swap.launch.default(to_pack, [input, weight, bias])
        launch.drop_plan(to_pack)
        torch.cuda.current_stream(input.device).synchronize()
        return launch.add_plan(rest, input.dtype, input.device, architecture), packed

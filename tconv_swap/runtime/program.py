"""The form of a plan, which the launcher executes: the kernels in order, and their tensors and workspace.

A :class:`Plan` is plain data: it can be compared, printed and compiled for an architecture without a GPU. Its pieces
are named tuples, which take less time to make and to hash than frozen dataclasses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from enum import IntEnum
from itertools import takewhile
from typing import NamedTuple

import torch

#: A kernel constant, rendered as one ``constexpr`` line: an int or bool as it is, a str as the name of a type.
Constant = int | bool | str

#: The name that csrc/kernels/common/types.cuh gives the elements of a dtype.
ELEMENT_TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
}


class ArgumentKind(IntEnum):
    """Where a kernel argument comes from. csrc/launch.cpp uses the same numbers."""

    INPUT = 0  # pointer to the value-th input tensor, null where that is None
    OUTPUT = 1  # pointer to the value-th output tensor
    WORKSPACE = 2  # pointer value bytes into the workspace
    INT64 = 3  # the value itself, as a long long
    TENSOR_MAP = 4  # the launch's value-th tensor map, for TMA (sm_90 and later)
    STRUCT = 5  # the launch's value-th struct of 32-bit words, passed by value
    FIELDS = 6  # a struct passed by value, whose fields, of 8 bytes each, are the next value arguments


class Argument(NamedTuple):
    kind: ArgumentKind
    value: int


def input_(index: int) -> Argument:
    return Argument(ArgumentKind.INPUT, index)


def output(index: int) -> Argument:
    return Argument(ArgumentKind.OUTPUT, index)


def workspace(offset: int) -> Argument:
    return Argument(ArgumentKind.WORKSPACE, offset)


def int64(value: int) -> Argument:
    return Argument(ArgumentKind.INT64, value)


def tensor_map(index: int) -> Argument:
    return Argument(ArgumentKind.TENSOR_MAP, index)


def struct(index: int) -> Argument:
    return Argument(ArgumentKind.STRUCT, index)


def fields(*of: Argument) -> tuple[Argument, ...]:
    """Returns the arguments of a struct of pointers and numbers."""
    return Argument(ArgumentKind.FIELDS, len(of)), *of


class ElementKind(IntEnum):
    """The element type that a tensor map copies, with the numbers of CUtensorMapDataType."""

    FLOAT16 = 6
    FLOAT32 = 7
    BFLOAT16 = 9
    TFLOAT32 = 11  # float32 in memory, rounded to TF32 by the copy


class TensorMap(NamedTuple):
    """The boxes of a tensor that TMA copies: the arguments of cuTensorMapEncodeTiled, or of cuTensorMapEncodeIm2col,
    one of which is called for every launch.

    What of a box lies outside the tensor is read as zeros, and not written. In shared memory a box is dense, rows of
    ``box[0]`` elements, which the swizzle permutes by 16 bytes within ``swizzle_bytes`` by the address's higher bits.

    With ``corners`` (im2col mode; dimensions channels, columns, rows, images) a copy is ``box[1]`` pixels in a row of
    ``box[0]`` channels each: column by column, row by row and image by image of what lies between the corners.
    """

    base: Argument
    element: ElementKind
    #: The sizes of the tensor in elements, innermost first; 1 to 5 dimensions.
    sizes: tuple[int, ...]
    #: The strides of all dimensions but the innermost, in bytes: multiples of 16.
    strides: tuple[int, ...]
    #: The sizes of one copy, in elements of the tensor, at most 256 each. With a step, it takes the first of every
    #: ``step`` elements.
    box: tuple[int, ...]
    #: 1 to 8 for each dimension; 1 for the innermost.
    steps: tuple[int, ...]
    #: 0 (none), 32, 64 or 128: no less than ``box[0]`` takes.
    swizzle_bytes: int = 128
    #: 64, 128 or 256: the bytes that the L2 cache fetches from memory at a time for any part of a box.
    fetched_bytes: int = 256
    #: From the base to the tensor's first element, in bytes: a multiple of 16.
    offset: int = 0
    #: In im2col mode, from the first column and row to those of the first pixel, and from the last column and row to
    #: those of the last one: each from -128 to 127.
    corners: tuple[int, ...] = ()


class Kernel(NamedTuple):
    """One ``extern "C"`` kernel of a file in csrc/kernels, specialised by named constants."""

    source: str
    entry: str
    constants: tuple[tuple[str, Constant], ...]
    #: Whether registers may spill to local memory; if not, the plan promises that the compiler's report shows none.
    spills: bool = False


class Launch(NamedTuple):
    """One launch: ``grid`` blocks (1-D: no 65535 limit) of ``block`` threads, ``shared_bytes`` of dynamic
    shared memory each."""

    kernel: Kernel
    grid: int
    block: int
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    #: Whether it may start while the launch before it still runs (programmatic dependent launch, sm_90 and later).
    #: The kernel then calls griddepcontrol.wait before it reads what the earlier launch wrote.
    overlaps_previous: bool = False
    tensor_maps: tuple[TensorMap, ...] = ()
    #: The 32-bit words of the kernel's struct; unsigned ones are given as signed integers with the same bits.
    structs: tuple[tuple[int, ...], ...] = ()
    #: Pairs (input, struct): the struct holds the strides of the input, in elements, so that the kernel reads any
    #: layout.
    strides: tuple[tuple[int, int], ...] = ()

    @property
    def operands(self) -> tuple[Argument, ...]:
        """The arguments, with the tensors of the tensor maps among them."""
        return self.arguments + tuple(one.base for one in self.tensor_maps)


class Output(NamedTuple):
    """A tensor to allocate. If ``dtype`` is None, it has the plan's dtype."""

    shape: tuple[int, ...]
    channels_last: bool = False
    dtype: torch.dtype | None = None


class Part(NamedTuple):
    """The computation of some of a plan's outputs: ``output(k)`` is the k-th of the part's own outputs, and its
    workspace begins at byte 0. ``family`` and ``why`` as a plan's."""

    family: str
    why: str
    launches: tuple[Launch, ...]
    workspace_bytes: int = 0

    def with_outputs(self, *indices: int) -> tuple[Launch, ...]:
        """Returns the launches, with the part's outputs at the places that the plan gives them."""
        if indices == tuple(range(len(indices))):
            return self.launches  # those of a plan's first part, or of its only one

        def placed(argument: Argument) -> Argument:
            if argument.kind is not ArgumentKind.OUTPUT:
                return argument
            return output(indices[argument.value])

        return tuple(with_operands(launch, placed) for launch in self.launches)


class Plan(NamedTuple):
    """The computation of one call. ``family`` names the kernels in reports, ``why`` is one readable clause."""

    family: str
    why: str
    outputs: tuple[Output, ...]
    launches: tuple[Launch, ...]
    workspace_bytes: int = 0
    notes: tuple[str, ...] = ()

    def without_packing(self, item_bytes: int) -> tuple[Plan, Plan] | None:
        """Splits the plan, for a weight that does not change: returns a plan whose only output is the packed weight,
        and the plan of the rest, whose second input is the packed weight. None for a plan that does not begin by
        packing.

        ``item_bytes``: of an element of the plan's dtype.
        """
        packing = tuple(takewhile(_packs, self.launches))
        rest = self.launches[len(packing) :]
        packed = {a.value for one in packing for a in one.operands if a.kind == ArgumentKind.WORKSPACE}
        used = {a.value for one in rest for a in one.operands if a.kind == ArgumentKind.WORKSPACE}
        if not rest or packed != {0} or 0 not in used or any(map(_reads_weight, rest)):
            return None
        size = min(used - {0}, default=self.workspace_bytes)

        def unpacked(argument: Argument) -> Argument:
            if argument.kind is not ArgumentKind.WORKSPACE:
                return argument
            return input_(1) if argument.value == 0 else workspace(argument.value - size)

        def packing_into(argument: Argument) -> Argument:
            return output(0) if argument.kind is ArgumentKind.WORKSPACE else argument

        going_on = [with_operands(one, unpacked) for one in rest]
        # It overlapped with the packing and waited for it. Without the packing, another kernel runs before it.
        going_on[0] = going_on[0]._replace(overlaps_previous=False)
        return (
            Plan(
                f"{self.family}, packing",
                self.why,
                (Output((size // item_bytes,)),),
                tuple(with_operands(one, packing_into) for one in packing),
            ),
            self._replace(launches=tuple(going_on), workspace_bytes=self.workspace_bytes - size),
        )

    @property
    def read_as_they_lie(self) -> frozenset[int]:
        """The inputs that may have any strides: every launch gets their strides."""
        indices = [{index for index, _ in launch.strides} for launch in self.launches]
        return frozenset(set.intersection(*indices)) if indices else frozenset()

    def with_strides(self, strides: Mapping[int, tuple[int, ...]]) -> Plan:
        """Returns the plan for inputs with these strides, of those in ``read_as_they_lie``."""

        def with_strides_of(launch: Launch) -> Launch:
            structs = list(launch.structs)
            for index, place in launch.strides:
                structs[place] = strides.get(index, structs[place])
            return launch._replace(structs=tuple(structs))

        return self._replace(launches=tuple(map(with_strides_of, self.launches)))

    @property
    def digest(self) -> str:
        """A digest that is equal for plans with the same launches."""
        launched = (self.outputs, self.launches, self.workspace_bytes)
        return hashlib.sha256(repr(launched).encode()).hexdigest()[:16]

    @property
    def kernels_digest(self) -> str:
        """A digest that is equal for plans with the same kernels, whatever sizes their launches pass."""
        kernels = tuple(launch.kernel for launch in self.launches)
        return hashlib.sha256(repr((self.family, kernels)).encode()).hexdigest()[:16]


def _packs(launch: Launch) -> bool:
    """Returns whether a launch of a forward plan reads only the weight and writes only to the workspace."""
    read = {a.value for a in launch.operands if a.kind == ArgumentKind.INPUT}
    return read == {1} and not any(a.kind == ArgumentKind.OUTPUT for a in launch.operands)


def _reads_weight(launch: Launch) -> bool:
    return input_(1) in launch.operands


def with_operands(launch: Launch, change: Callable[[Argument], Argument]) -> Launch:
    """Returns the same launch on other tensors."""
    arguments = tuple(map(change, launch.arguments))
    bases = [change(one.base) for one in launch.tensor_maps]
    changed = any(base != one.base for base, one in zip(bases, launch.tensor_maps, strict=True))
    if not changed and arguments == launch.arguments:
        return launch  # the usual case, and cheaper than a copy
    maps = launch.tensor_maps
    if changed:
        maps = tuple(one._replace(base=base) for one, base in zip(maps, bases, strict=True))
    return launch._replace(arguments=arguments, tensor_maps=maps)

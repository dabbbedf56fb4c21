"""Writes the output file of a swap: a network, its weights or an exported program. The temporary file is read back
before it gets its final name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from tconv_swap.cli.request import Request
from tconv_swap.files import exported, weights
from tconv_swap.files.fileformat import LoadError, printable
from tconv_swap.files.loading import LoadedModel, load_model, load_weights
from tconv_swap.files.saving import SaveError, save_model, save_whole
from tconv_swap.surgery import SwapPlan


def check_name(out: Path, loaded: LoadedModel, request: Request) -> None:
    """Checks, before any work is done, that the name of `out` fits what is written there.

    Raises:
        SaveError: it does not, so that loading by the name's suffix would fail.
    """
    suffix = out.suffix.lower()
    if loaded.program is not None:
        if suffix != ".pt2":
            raise SaveError(f"{out}: a torch.export archive is written, whose name must end in .pt2")
    elif suffix == ".pt2":
        raise SaveError(
            f"{out}: .pt2 is for torch.export archives, and {request.model} is not one: give another name"
        )
    elif _is_safetensors(out) and request.out_format == "module":
        raise SaveError(
            f"{out}: safetensors hold weights only: add --out-format state_dict, or give another name"
        )


def check_writable(loaded: LoadedModel, request: Request) -> None:
    """Checks, before the verification, that the network can be written in the requested form.

    Raises:
        SaveError: it cannot.
    """
    if loaded.program is not None or request.out_format != "module":
        return
    for name, module in loaded.model.named_modules():
        if is_parametrized(module):
            where = f" ({printable(name)}: {', '.join(module.parametrizations)})" if name else ""
            raise SaveError(
                f"{request.out} cannot be written: PyTorch does not pickle parametrized networks{where}: add "
                "--out-format state_dict"
            )


def write(
    loaded: LoadedModel,
    swapped: nn.Module,
    names: Collection[str],
    request: Request,
    placed: Callable[[Path], None] | None,
) -> list[str]:
    """Writes the requested form to `request.out`, atomically. Returns lines that the user should know about it.

    Args:
        loaded: the content of the input file.
        swapped: its network after the swap, never moved or run.
        names: the names of the swapped layers.
        placed: called with the file once it has its final name.

    Raises:
        SaveError: it could not be written, or reading it back gave something else. Then nothing was written.
    """
    if loaded.program is not None:
        return _write_program(loaded.program, names, request, placed)
    if request.out_format == "state_dict":
        return _write_weights(loaded, swapped, request, placed)
    return _write_network(swapped, request, placed)


def load_snippet(loaded: LoadedModel, request: Request, plan: SwapPlan) -> str:
    """Returns the lines of Python that load the written file."""
    out = str(request.out)
    if loaded.program is not None:
        return f"import torch, tconv_swap\nmodel = torch.export.load({out!r}).module()"
    if request.out_format == "state_dict":
        library = "safetensors.torch" if _is_safetensors(Path(out)) else "torch"
        read = f"{library}.load{'_file' if _is_safetensors(Path(out)) else ''}({out!r})"
        return (
            f"import {library}, tconv_swap\n"
            f"model = tconv_swap.swap_layers(...{_fused(request, plan)})  # the network, built as before\n"
            f"model.load_state_dict({read})"
        )
    place, _, _ = (request.factory or "").rpartition(":")
    file = request.module or (Path(place) if place.endswith(".py") else None)
    path = f"import sys; sys.path.append({str(file.resolve().parent)!r})\n" if file is not None else ""
    return f"{path}import torch, tconv_swap\nmodel = torch.load({out!r}, weights_only=False)"


def _fused(request: Request, plan: SwapPlan) -> str:
    """Returns the arguments with which `swap_layers` swaps the same blocks."""
    if not any(block.swap for block in plan.blocks):
        return ""
    left = [block.name for block in plan.blocks if not block.swap]
    return f", fuse={request.fuse!r}" + (f", leave_blocks={left!r}" if left else "")


def _write_network(swapped: nn.Module, request: Request, placed: Callable[[Path], None] | None) -> list[str]:
    out = request.out
    assert out is not None
    expected = _structure(swapped)

    def check(temporary: Path) -> None:
        again = load_model(
            temporary,
            trust=request.trust,
            # The classes of a factory's network belong to objects of this process, which has just written them.
            unsafe_pickle=request.unsafe_pickle or request.factory is not None,
            module=request.module,
        ).model
        if _structure(again) != expected:
            raise SaveError(f"{out} was not written: read back, the network is not the same")

    save_model(swapped, out, check=check, placed=placed)
    return []


def _write_weights(
    loaded: LoadedModel, swapped: nn.Module, request: Request, placed: Callable[[Path], None] | None
) -> list[str]:
    out = request.out
    assert out is not None
    # Weights that were converted for the network are written as they were read.
    content = dict(swapped.state_dict() if loaded.weights is None else loaded.weights)
    if others := [key for key, value in content.items() if not isinstance(value, Tensor)]:
        raise SaveError(f"{out} cannot be written: {others[0]} of the state_dict is not a tensor")

    def check(temporary: Path) -> None:
        if not weights.same_weights(load_weights(temporary), content):
            raise SaveError(f"{out} was not written: read back, the weights are not the same")

    def write(stream: object) -> None:
        if _is_safetensors(out):
            weights.write_safetensors(content, stream)  # type: ignore[arg-type]
        else:
            torch.save(content, stream)  # type: ignore[arg-type]

    try:
        save_whole(write, out, check=check, placed=placed)
    except LoadError as error:  # safetensors is not installed
        raise SaveError(str(error)) from error
    names = ", ".join(printable(repr(key)) for key in loaded.left_out)
    left_out = [f"{out} holds these weights only, without {names} of {request.model}"] if names else []
    return [
        f"{out} holds the same names and tensors as before: a swap changes no weight. Swap the network where it "
        "is built: tconv_swap.swap_layers(model)",
        *left_out,
    ]


def _write_program(
    program: torch.export.ExportedProgram,
    names: Collection[str],
    request: Request,
    placed: Callable[[Path], None] | None,
) -> list[str]:
    out = request.out
    assert out is not None
    swapped = exported.swap_program(program, names=names, backend=request.backend)
    expected = exported.count_swapped(swapped)

    def check(temporary: Path) -> None:
        again = exported.load_program(temporary)
        same = weights.same_weights(dict(again.state_dict), dict(swapped.state_dict))
        if exported.count_swapped(again) != expected or not same:
            raise SaveError(f"{out} was not written: read back, the program is not the same")

    save_whole(lambda stream: exported.save_program(swapped, stream), out, check=check, placed=placed)
    return []


def _is_safetensors(path: Path) -> bool:
    return path.suffix.lower() == ".safetensors"


def _structure(model: nn.Module) -> list[tuple[str, object]]:
    layers: list[tuple[str, object]] = [(name, type(m).__name__) for name, m in model.named_modules()]
    tensors = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    return layers + [(name, (_shape(tensor), tensor.dtype)) for name, tensor in tensors.items()]


def _shape(tensor: Tensor) -> object:
    # The shape of a nested tensor equals only itself.
    return [part.shape for part in tensor.unbind()] if tensor.is_nested else tensor.shape

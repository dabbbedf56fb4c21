"""The options of the command line, each defined once for the subcommands that take it, and their parsers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
import typer

from tconv_swap import op
from tconv_swap.cuda.choice import check_backend
from tconv_swap.files.loading import parse_trust
from tconv_swap.files.usercode import parse_factory, parse_file
from tconv_swap.request import Request
from tconv_swap.way_choice import check_way

_T = TypeVar("_T")

#: PyTorch counts a tensor's bytes in 64 bits with a sign; the largest elements, of float64, have eight.
MOST_ELEMENTS = (2**63 - 1) // 8

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A network saved with torch.save(model, path) or torch.export.save; with --model its weights: a "
        "state_dict, a checkpoint, a safetensors file.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Write the swapped network here, once it is verified; never over MODEL. Devices and dtypes are "
        "those in MODEL; with --model the devices are the function's, and so are the dtypes if it mixes some. "
        "FILE.pt2 is for a torch.export archive, FILE.safetensors for --out-format state_dict. "
        "Without --out nothing is written.",
    ),
]
InputShape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N,C,H,W",
        help="Shape of one positional input, filled with random numbers; repeat it for further ones. Without "
        "it, what the first layers allow is tried.",
    ),
]
InputsFile = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="FILE",
        help="Inputs saved with torch.save: a tensor, a tuple or list (positional arguments) or a dict "
        "(keyword arguments); an argument that is a list or dict itself goes into a tuple, ([a, b],).",
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Where to verify and time.", show_default="cuda if there is one, else cpu")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="Verify and time in this dtype, such as float16.", show_default="as in MODEL"),
]
Autocast = Annotated[
    Literal["float16", "bfloat16"] | None,
    typer.Option(
        help="Verify once more, under torch.autocast of this dtype. Not timed.", show_default="not tried"
    ),
]
ChannelsLast = Annotated[bool, typer.Option("--channels-last", help="Verify and time in channels_last.")]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Swap only layers whose dotted name matches, such as 'decoder.**': * stands for part of one "
        "name, ** for any number of names. Repeatable.",
    ),
]
Exclude = Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Leave these layers. Repeatable.")]
BackendOption = Annotated[
    str | None,
    typer.Option(
        metavar="auto|kernel|native",
        help="What computes the swapped layers: kernel is ours, native PyTorch's, auto ours save where "
        "measurements say that PyTorch's is faster.",
        show_default="as in MODEL, auto where newly swapped",
    ),
]
Include1d = Annotated[
    bool,
    typer.Option("--include-1d", help="Swap nn.ConvTranspose1d too, as a 2-D problem of height 1."),
]
FuseOption = Annotated[
    Literal["blocks", "all", "none"],
    typer.Option(
        help="Compute as one kernel a norm and the activation behind it: behind a swapped layer (blocks) or everywhere "
        "(all). What is slower by itself or does not verify is left out, and the report says why."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say which layers would be swapped.")]
NoBackward = Annotated[bool, typer.Option("--no-backward", help="Neither verify nor time gradients.")]
NoBenchmark = Annotated[bool, typer.Option("--no-benchmark", help="Verify, but do not time.")]
Tolerance = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Instead of the limit that follows from the dtype.",
        show_default=False,
        callback=lambda number: check_finite(number),
    ),
]
Seed = Annotated[
    int,
    typer.Option(help="Of random inputs and of dropout.", callback=lambda seed: check_seed(seed)),
]
Warmup = Annotated[
    int | None, typer.Option(min=0, help="Untimed runs before each timing.", show_default="by time")
]
Iters = Annotated[int | None, typer.Option(min=1, help="Timed runs of each.", show_default="by time")]
WayOption = Annotated[
    str,
    typer.Option(
        "--way",
        metavar="keep|auto|NAME",
        help="auto: time the ways to run the network (its layout or channels_last; eager, CUDA graph, torch.compile, "
        "both; PyTorch's layers or ours), verify the fastest, and write the network in its memory format. NAME: that "
        "way, such as channels_last+compile+graph.",
        callback=lambda way: parsed("--way", check_way, way),
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        metavar="S",
        min=0,
        help="With --way: try no further way that would take longer. Ctrl-C keeps what was measured.",
    ),
]
JsonTarget = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Write the whole result as JSON; - means stdout, instead of the report.",
    ),
]
ReportFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write the report as Markdown (FILE.md) or as one self-contained page with charts (FILE.html). "
        "Repeatable.",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="In the report, every timing's spread, every kind of error, every kernel."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and --json -).")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:CLASS",
        help="Let MODEL use this class. Its module is imported, which executes the module's code. "
        "Repeatable.",
    ),
]
UserModule = Annotated[
    str | None,
    typer.Option(
        "--module",
        metavar="FILE.py",
        help="Let MODEL use the classes of this Python file, which is executed if MODEL names some.",
    ),
]
Factory = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FUNCTION",
        help="MODEL holds weights: this function (or FILE.py:FUNCTION), called without arguments, builds the "
        "network for them. Its code is executed.",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --model: the weights are under this key of the checkpoint in MODEL.",
        show_default="state_dict, model, params_ema and their like",
    ),
]
OutFormat = Annotated[
    Literal["module", "state_dict"],
    typer.Option(
        help="What --out is written as. A state_dict is as it was, since a swap changes no weight, without what else "
        "is in a checkpoint."
    ),
]
UnsafePickle = Annotated[
    bool,
    typer.Option(
        "--unsafe-pickle",
        help="Let MODEL execute whatever it contains. Only for files of your own. A torch.export archive needs it.",
    ),
]


def parse_shape(text: str) -> tuple[int, ...]:
    """`2,3,64,64` (or `2x3x64x64`) as a tuple.

    Raises:
        ValueError: it is not a list of positive whole numbers, or no tensor can be as large.
    """
    sizes = text.lower().replace("x", ",").split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"{text!r} is not a shape such as 2,3,64,64")
    shape = tuple(int(size) for size in sizes)
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError(f"{text!r} is more than a tensor can hold")
    return shape


def parse_dtype(text: str) -> torch.dtype:
    """`float16`, `half` or `torch.float16` as a dtype.

    Raises:
        ValueError: there is none of this name that networks run in.
    """
    found = getattr(torch, text.removeprefix("torch."), None)
    # Not every floating-point one: float8 is a storage format, for which PyTorch has no layers.
    if not isinstance(found, torch.dtype) or found not in op.SUPPORTED_DTYPES:
        raise ValueError(f"{text!r} is not one of the dtypes float64, float32, float16 and bfloat16")
    return found


def check_seed(seed: int) -> int:
    """`seed` itself, if PyTorch's generators take it and some more counted from it.

    Raises:
        typer.BadParameter: they do not.
    """
    if not -(2**63) <= seed < 2**63:
        raise typer.BadParameter(f"{seed} is not a whole number of 64 bits")
    return seed


def check_finite(number: float | None) -> float | None:
    """`number` itself. A tolerance without a bound would let everything pass, and NaN is no number.

    Raises:
        typer.BadParameter: it is infinite or NaN.
    """
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


def parsed(option: str, parse: Callable[[str], _T], text: str) -> _T:
    """`parse(text)`; a ValueError or RuntimeError becomes a usage error that names the option."""
    try:
        return parse(text)
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error).splitlines()[0], param_hint=option) from None


def network_request(
    model: Path,
    *,
    input_shape: Sequence[str] | None,
    inputs: Path | None,
    device: str | None,
    dtype: str | None,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    trust: Sequence[str] | None,
    module: str | None,
    factory: str | None,
    key: str | None,
    channels_last: bool,
    include_1d: bool,
    no_backward: bool,
    unsafe_pickle: bool,
    backend: str | None = None,
) -> Request:
    """The options that every command on a saved network takes, as a request.

    Raises:
        typer.BadParameter: an option cannot be read, or excludes another.
    """
    if inputs is not None and input_shape:
        raise typer.BadParameter("give either --input-shape or --inputs, not both")
    if factory is not None:
        parsed("--model", parse_factory, factory)
    elif key is not None:
        raise typer.BadParameter("--key is for weights: it needs --model")
    for option in trust or ():
        parsed("--trust", parse_trust, option)
    return Request(
        model=model,
        input_shapes=tuple(parsed("--input-shape", parse_shape, text) for text in input_shape or ()),
        inputs=inputs,
        device=None if device is None else parsed("--device", torch.device, device),
        dtype=None if dtype is None else parsed("--dtype", parse_dtype, dtype),
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        backend=None if backend is None else parsed("--backend", check_backend, backend),
        trust=tuple(trust or ()),
        module=None if module is None else parsed("--module", parse_file, module),
        factory=factory,
        key=key,
        channels_last=channels_last,
        include_1d=include_1d,
        backward=not no_backward,
        unsafe_pickle=unsafe_pickle,
    )

"""Declares each option of the command line once, for the dataclasses that have it as a field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import torch

from tconv_swap.blocks.modules import Fuse
from tconv_swap.cli.declare import argument, option
from tconv_swap.cli.parsers import (
    check_finite,
    check_seed,
    check_way,
    if_valid,
    parse_dtype,
    parse_fuse,
    parse_shape,
)
from tconv_swap.cuda.choice import Backend, check_backend
from tconv_swap.files.loading import parse_trust
from tconv_swap.files.usercode import parse_factory, parse_file
from tconv_swap.layer_calls import DEVICES
from tconv_swap.measurement.modes import MODES

Shape: TypeAlias = tuple[int, ...]

Model = Annotated[
    Path,
    argument(
        "MODEL",
        help="A network saved with torch.save(model, path) or torch.export.save; with --model its weights: a "
        "state_dict, a checkpoint or a safetensors file.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    option(
        "--out",
        "-o",
        metavar="FILE",
        help="Write the swapped network to FILE once it is verified, never over MODEL. It keeps the devices and "
        "dtypes of MODEL; with --model it has the devices of the function's network, and its dtypes if they are "
        "mixed. A torch.export archive is written to FILE.pt2; FILE.safetensors needs --out-format state_dict. "
        "Without --out nothing is written.",
    ),
]
InputShapes = Annotated[
    tuple[Shape, ...],
    option(
        "--input-shape",
        parse=parse_shape,
        metavar="N,C,H,W",
        help="The shape of one positional input, which is filled with random numbers. Repeat it for further inputs. "
        "Without it, shapes that the first layers allow are tried.",
    ),
]
InputsFile = Annotated[
    Path | None,
    option(
        "--inputs",
        metavar="FILE",
        help="Inputs saved with torch.save: a tensor, a tuple or list (positional arguments) or a dict "
        "(keyword arguments). Wrap an argument that is itself a list or dict in a tuple: ([a, b],).",
    ),
]
Device = Annotated[
    torch.device | None,
    option(
        "--device",
        parse=torch.device,
        metavar="TEXT",
        help="Where to verify and time.",
        show_default="cuda if there is one, otherwise cpu",
    ),
]
Dtype = Annotated[
    torch.dtype | None,
    option(
        "--dtype",
        parse=parse_dtype,
        metavar="TEXT",
        help="Verify and time in this dtype, such as float16.",
        show_default="as in MODEL",
    ),
]
Autocast = Annotated[
    torch.dtype | None,
    option(
        "--autocast",
        given=Literal["float16", "bfloat16"],
        parse=parse_dtype,
        help="Verify a second time under torch.autocast with this dtype. This is not timed.",
        show_default="not tried",
    ),
]
ChannelsLast = Annotated[bool, option("--channels-last", help="Verify and time in channels_last.")]
Include = Annotated[
    tuple[str, ...],
    option(
        "--include",
        metavar="PATTERN",
        help="Swap only layers whose dotted name matches, such as 'decoder.**': * matches part of one name, "
        "** any number of names. Repeatable.",
    ),
]
Exclude = Annotated[
    tuple[str, ...],
    option("--exclude", metavar="PATTERN", help="Do not swap layers whose dotted name matches. Repeatable."),
]
ChosenBackend = Annotated[
    Backend | None,
    option(
        "--backend",
        parse=check_backend,
        metavar="auto|rules|kernel|native",
        help="What computes the swapped layers: kernel means our kernels, native PyTorch's operator, and auto our "
        "kernels unless measurements say that PyTorch's operator is faster. On a GPU for which nothing was measured, "
        "auto measures at the first use of each layer, and rules does not.",
        show_default="as in MODEL, auto for newly swapped layers",
    ),
]
Include1d = Annotated[
    bool, option("--include-1d", help="Swap nn.ConvTranspose1d too, as a 2-D problem of height 1.")
]
ChosenFuse = Annotated[
    Fuse,
    option(
        "--fuse",
        given=Literal["blocks", "all", "none"],
        parse=parse_fuse,
        help="Compute a norm and the activation behind it with one kernel: those behind a swapped layer (blocks), or "
        "everywhere, and reflection padding too (all). A block that is slower by itself or does not verify is left "
        "out; the report says why.",
    ),
]
DryRun = Annotated[bool, option("--dry-run", help="Only list the layers that would be swapped.")]
Backward = Annotated[
    bool, option("--no-backward", is_negated=True, help="Neither verify nor time gradients.")
]
Benchmark = Annotated[bool, option("--no-benchmark", is_negated=True, help="Verify, but do not time.")]
Atol = Annotated[
    float | None,
    option(
        "--atol",
        given=float,
        parse=check_finite,
        min=0,
        help="The absolute tolerance, instead of the one that follows from the dtype.",
        show_default=False,
    ),
]
Rtol = Annotated[
    float | None,
    option(
        "--rtol",
        given=float,
        parse=check_finite,
        min=0,
        help="The relative tolerance, instead of the one that follows from the dtype.",
        show_default=False,
    ),
]
Seed = Annotated[
    int, option("--seed", given=int, parse=check_seed, help="The seed of random inputs and of dropout.")
]
Warmup = Annotated[
    int | None,
    option("--warmup", min=0, help="The number of untimed runs before each timing.", show_default="by time"),
]
Iters = Annotated[
    int | None, option("--iters", min=1, help="The number of timed runs.", show_default="by time")
]
ChosenWay = Annotated[
    str,
    option(
        "--way",
        parse=check_way,
        metavar="keep|auto|NAME",
        help="auto: time the ways to run the network (its layout or channels_last; eager, CUDA graph, torch.compile, "
        "both; PyTorch's layers or ours), verify the fastest, and write the network in its memory format. NAME: use "
        "this way, such as channels_last+compile+graph. keep: run the network as MODEL has it.",
    ),
]
WaySeconds = Annotated[
    float,
    option(
        "--seconds",
        metavar="S",
        min=0,
        help="With --way: try no further way once this time has passed. Ctrl-C keeps what was measured.",
    ),
]
JsonTarget = Annotated[
    Path | None,
    option(
        "--json",
        metavar="FILE|-",
        help="Write the whole result as JSON to FILE, or to stdout (-) instead of the report.",
    ),
]
ReportFiles = Annotated[
    tuple[Path, ...],
    option(
        "--report",
        metavar="FILE",
        help="Write the report as Markdown (FILE.md) or as one self-contained page with charts (FILE.html). "
        "Repeatable.",
    ),
]
Verbose = Annotated[
    bool,
    option(
        "--verbose", "-v", help="Report the spread of every timing, every kind of error and every kernel too."
    ),
]
Quiet = Annotated[bool, option("--quiet", "-q", help="Print nothing but errors (and --json -).")]
Trust = Annotated[
    tuple[str, ...],
    option(
        "--trust",
        parse=if_valid(parse_trust),
        metavar="MODULE:CLASS",
        help="Let MODEL use this class. Its module is imported, which executes the module's code. "
        "Repeatable.",
    ),
]
UserModule = Annotated[
    Path | None,
    option(
        "--module",
        parse=parse_file,
        metavar="FILE.py",
        help="Let MODEL use the classes of this Python file, which is executed if MODEL names one of them.",
    ),
]
Factory = Annotated[
    str | None,
    option(
        "--model",
        parse=if_valid(parse_factory),
        metavar="MODULE:FUNCTION",
        help="MODEL holds weights: this function (or FILE.py:FUNCTION), called without arguments, builds the "
        "network for them. Its code is executed.",
    ),
]
Key = Annotated[
    str | None,
    option(
        "--key",
        metavar="NAME",
        help="With --model: the key of the checkpoint in MODEL that holds the weights.",
        show_default="state_dict, model, params_ema and similar ones",
    ),
]
OutFormat = Annotated[
    Literal["module", "state_dict"],
    option(
        "--out-format",
        help="What --out writes: the module or its state_dict. The state_dict has the same names and tensors as "
        "MODEL, since a swap changes no weight, but nothing else that a checkpoint may hold.",
    ),
]
UnsafePickle = Annotated[
    bool,
    option(
        "--unsafe-pickle",
        help="Let MODEL execute any code that it contains. Use it for your own files only. A torch.export archive "
        "needs it.",
    ),
]
Architecture = Annotated[
    str | None,
    option(
        "--arch",
        metavar="|".join(DEVICES),
        help="Plan for this GPU, whether or not this machine has one.",
    ),
]
PreparedShapes = Annotated[
    tuple[Shape, ...],
    option(
        "--input-shape",
        parse=parse_shape,
        metavar="N,C,H,W",
        help="The shape of one positional input, which is filled with random numbers. Repeat it for further inputs. "
        "Without it and --inputs, layers are prepared for representative sizes.",
    ),
]
Training = Annotated[bool, option("--training", help="Prepare the gradients too.")]
PreparedAutocast = Annotated[
    torch.dtype | None,
    option(
        "--autocast",
        given=Literal["float16", "bfloat16"],
        parse=parse_dtype,
        help="Prepare for torch.autocast with this dtype.",
        show_default="without autocast",
    ),
]
Directory = Annotated[
    Path | None,
    option(
        "--dir",
        metavar="DIR",
        help="Where to write dcgan.pt and dcgan-fast.pt.",
        show_default="a new directory",
    ),
]
Only = Annotated[
    tuple[str, ...],
    option(
        "--only", metavar="NAME[,NAME]", help="Run these layers only. Repeatable; --list shows their names."
    ),
]
ListLayers = Annotated[bool, option("--list", help="Only list the layers of the suite.")]
ModeName = Annotated[
    str | None,
    option(
        "--dtype",
        metavar="|".join(MODES),
        help="The arithmetic; fp32 is float32 with TF32 off.",
        show_default="tf32 on a GPU, fp32 on a CPU",
    ),
]
Verify = Annotated[bool, option("--no-verify", is_negated=True, help="Time, but do not verify.")]
LayerSeconds = Annotated[
    float,
    option(
        "--seconds",
        given=float,
        parse=check_finite,
        metavar="S",
        min=0.01,
        help="How long each layer is timed in each stage.",
    ),
]

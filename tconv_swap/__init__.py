"""tconv-swap: swap every ``nn.ConvTranspose2d`` of a network for a faster one that computes the same.

model = tconv_swap.swap_layers(model)                       # the same parameters, our kernels
report = tconv_swap.verify(original, model, inputs)         # the same outputs and gradients?
timing = tconv_swap.benchmark(original, model, inputs)      # how much faster?
"""

# Importing torch takes seconds; Ctrl-C during them would print a traceback.
from tconv_swap.interruption import end_while_importing

end_while_importing()

from tconv_swap.explanation import Explanation, explain
from tconv_swap.files.exported import swap_program, unswap_program
from tconv_swap.freezing import freeze, unfreeze
from tconv_swap.functional import FunctionalCall, find_functional_calls
from tconv_swap.inputs import Inputs
from tconv_swap.layer import ConvTranspose1d, ConvTranspose2d
from tconv_swap.measurement.bench import BenchmarkReport, benchmark
from tconv_swap.op import conv_transpose2d
from tconv_swap.preparation import PrepareReport, prepare
from tconv_swap.surgery import (
    LayerPlan,
    SwapPlan,
    SwapWarning,
    plan_swap,
    swap_layers,
    unswap_layers,
)
from tconv_swap.tuning import TuneReport, tune
from tconv_swap.verification import VerifyReport, verify
from tconv_swap.version import __version__
from tconv_swap.ways.optimize import Optimized, in_way, optimize
from tconv_swap.ways.report import WaysReport
from tconv_swap.ways.run import WayWarning

__all__ = [
    "BenchmarkReport",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "Explanation",
    "FunctionalCall",
    "Inputs",
    "LayerPlan",
    "Optimized",
    "PrepareReport",
    "SwapPlan",
    "SwapWarning",
    "TuneReport",
    "VerifyReport",
    "WayWarning",
    "WaysReport",
    "__version__",
    "benchmark",
    "conv_transpose2d",
    "explain",
    "find_functional_calls",
    "freeze",
    "in_way",
    "optimize",
    "plan_swap",
    "prepare",
    "swap_layers",
    "swap_program",
    "tune",
    "unfreeze",
    "unswap_layers",
    "unswap_program",
    "verify",
]

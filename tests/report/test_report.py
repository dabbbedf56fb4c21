"""The report as text, at 80 columns and not on a terminal, and as JSON."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from report_cases import MACHINE, check, full_case, steady
from rich.console import Console

from tconv_swap.measurement.bench import BenchmarkReport, Comparison, LayerComparison, PeakMemory
from tconv_swap.measurement.timing import Timing
from tconv_swap.report import (
    SCHEMA_VERSION,
    Facts,
    make_console,
    outcome,
    print_report,
    to_json_dict,
)
from tconv_swap.report.rows import speedup_text
from tconv_swap.report.summary import summarise
from tconv_swap.surgery import LayerPlan, SwapPlan
from tconv_swap.verification.report import VerifyReport

LONG_NAME = "decoder.blocks.11.residual_upsampling_branch.transposed_convolution_with_a_long_name"
PLAN = SwapPlan(
    (
        LayerPlan(("main.0", "tied"), "ConvTranspose2d", "100->512 k4", 819_200, True),
        LayerPlan(
            (LONG_NAME,),
            "ConvTranspose2d",
            "2048->1024 k3x7 s2x3 p1x2 op1x2 d2x1 g128",
            352_322_560,
            True,
        ),
        LayerPlan(("up",), "Scaled", "8->8 k2 s2", 256, False, reason="Scaled has a forward of its own"),
    ),
    ("decoder.*",),
)
NOTHING = SwapPlan((LayerPlan(("up",), "ConvTranspose1d", "8->8 k2", 128, False, reason="1-D; only 2-D"),))
FACTS = Facts(
    model="/home/somebody/networks/dcgan.pt",
    inputs="2x100x1x1 float32",
    inputs_origin="inferred from main.0 (ConvTranspose2d)",
    device="cuda:0",
    output="/home/somebody/networks/a/rather/long/directory/name/for/the/result/in/fast.pt",
    load_snippet="import torch, tconv_swap\n"
    "model = torch.load('/home/somebody/networks/a/rather/long/directory/name/for/the/result/in/fast.pt', "
    "weights_only=False)",
    warnings=("the file's tensors were on cuda:7, which is not here",),
)


def verified() -> VerifyReport:
    return VerifyReport(
        checks=[
            check("output", "0", 3.1e-7, 2.9e-7, 2.5e-6),
            check("output", "1.boxes", 1.0e-7, 1.9e-6, 2.0e-6),
            check("grad_parameter", f"{LONG_NAME}.weight", 4.2e-7, 4.4e-7, 3.4e-6, "train"),
            check("layer_output", "", 0.0, 0.0, 2.4e-7, "train"),
        ],
        notes=["dropout was on"],
    )


def mismatched() -> VerifyReport:
    report = verified()
    report.checks += [
        check("output", "2", 3.1e-7, math.inf, 2.5e-6),
        check("output", "3", 3.1e-7, 7.7e-2, 2.5e-6),
        check("layer_grad_bias", "main.0", 3.1e-7, math.nan, 2.5e-6),
    ]
    report.failures = [f"eval: output 3: error 7.70e-02, [odd] line {i}" for i in range(12)]
    report.first_divergence = "main.0, by 7.7e-02"
    return report


def timed(**fields: Any) -> BenchmarkReport:
    report = BenchmarkReport(
        network=[
            Comparison("network", "forward", steady(1234.6), steady(639.64)),
            Comparison("network", "backward", steady(9.0), steady(10.0)),
            Comparison("network", "step", steady(20.0), steady(20.0)),
        ],
        layers=[
            LayerComparison(
                LONG_NAME,
                stage,
                steady(0.04125),
                steady(0.000123),
                (128, 2048, 128, 256),
                "bfloat16",
                "channels_last",
                3,
            )
            for stage in ("forward", "backward")
        ],
        environment=MACHINE,
    )
    for name, value in fields.items():
        setattr(report, name, value)
    return report


def render(
    plan: SwapPlan,
    verification: VerifyReport | None,
    benchmark: BenchmarkReport | None,
    facts: Facts = FACTS,
    *,
    verbose: bool = False,
) -> str:
    stream = io.StringIO()
    print_report(make_console(stream), plan, verification, benchmark, facts, verbose=verbose)
    return stream.getvalue()


def squeezed(text: str) -> str:
    """Without line breaks and indentation, for phrases that a table may fold."""
    return " ".join(text.split())


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize(
    ("plan", "verification", "benchmark"),
    [
        (PLAN, verified(), timed(peak_memory=[PeakMemory("step", 3 << 30, 700 << 20)])),
        (PLAN, mismatched(), None),
        (PLAN, verified(), None),
        (PLAN, None, None),
        (
            PLAN,
            verified(),
            BenchmarkReport(environment=MACHINE, notes=["network forward not timed: " + "x " * 99]),
        ),
        (NOTHING, None, None),
        (SwapPlan(()), None, None),
    ],
    ids=["all", "mismatch", "not timed", "nothing done", "nothing timed", "nothing to swap", "no layers"],
)
def test_plain_text_of_80_columns_where_there_is_no_terminal(
    plan: SwapPlan,
    verification: VerifyReport | None,
    benchmark: BenchmarkReport | None,
    verbose: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = render(plan, verification, benchmark, verbose=verbose)
    assert "\x1b" not in text
    assert "…" not in text  # rich's sign for "there was more"
    body, _, snippet = text.partition("Load it\n")
    assert max(len(line) for line in body.splitlines()) <= 80
    assert all(line == line.rstrip() for line in text.splitlines())
    assert [line.removeprefix("    ") for line in snippet.splitlines()] == FACTS.load_snippet.splitlines()


def test_the_short_report_of_a_verified_and_timed_swap() -> None:
    text = render(PLAN, verified(), timed(peak_memory=[PeakMemory("step", 3 << 30, 700 << 20)]))
    flat = squeezed(text)
    assert "2 of 3 transposed convolutions swapped" in flat
    assert "VERIFIED: 4 comparisons, the largest error is 95% of its limit" in flat
    assert "forward 1.93x faster, backward 0.90x slower, step 1.00x" in flat
    assert "NVIDIA H200 (sm_90), driver 580.65.06, CUDA 13.0, cuDNN 9.19.0, torch 2.11.0+cu130" in flat
    assert "2x100x1x1 float32 (inferred from main.0 (ConvTranspose2d))" in flat
    assert "Peak memory, step: PyTorch 3.00 GiB, ours 700.0 MiB." in flat
    assert "These layers are about" in flat
    for note in ("cuda:7", "pattern 'decoder.*' matches no", "dropout was on"):
        assert note in flat


def test_swapped_layers_and_those_that_are_left() -> None:
    text = render(PLAN, verified(), None)
    flat = squeezed(text)
    assert "main.0 = tied" in flat
    assert "100->512 k4" in flat
    assert "Layers that stay as they are" in text
    assert "up 8->8 k2 s2 Scaled has a forward of its own" in flat
    assert LONG_NAME in "".join(line[2:50].strip() for line in text.splitlines())


def test_one_row_of_lines_for_each_layer() -> None:
    """Name, geometry and form on the left; times, error and who computes it on the right."""
    stream = io.StringIO()
    print_report(Console(file=stream, width=90), **full_case())
    lines = stream.getvalue().splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("  up.1 "))
    assert [line.split() for line in lines[at : at + 3]] == [
        ["up.1", "forward", "0.0800", "0.0510", "1.57x", "faster", "implicit", "gemm", "31%"],
        ["512->256", "k4", "s2", "p1", "backward", "0.133", "0.0900", "1.48x", "faster", "PyTorch", "35%"],
        ["128x512x4x4", "float32", "error", "8.0e-05", "7.5e-05", "12%", "of", "limit"],
    ]
    at = next(place for place, line in enumerate(lines) if line.startswith("  whole network "))
    assert [line.split() for line in lines[at : at + 5]] == [
        ["whole", "network", "forward", "0.810", "0.390", "2.08x", "faster"],
        ["backward", "1.31", "0.830", "1.58x", "faster"],
        ["step", "2.30", "1.52", "1.51x", "faster"],
        ["output", "4.1e-04", "3.9e-04", "12%", "of", "limit"],
        ["gradient", "4.6e-04", "4.7e-04", "13%", "of", "limit"],
    ]
    assert "4256 GB/s, 417 TFLOP/s tf32, measured in the same run" in squeezed(stream.getvalue())


def test_errors_stand_side_by_side_and_the_one_nearest_to_its_limit_is_shown() -> None:
    short = [line.split() for line in render(PLAN, verified(), None).splitlines()]
    assert any(row[-6:] == ["output", "1.0e-07", "1.9e-06", "95%", "of", "limit"] for row in short)
    rows = [line.split() for line in render(PLAN, verified(), None, verbose=True).splitlines()]
    assert ["output", "eval", "1.boxes", "1.0e-07", "1.9e-06", "2.0e-06"] in rows
    assert not any("3.1e-07" in row for row in rows)
    assert any(row[-3:] == ["0", "0", "2.4e-07"] for row in rows)
    assert any(row[-3:] == ["4.2e-07", "4.4e-07", "3.4e-06"] for row in rows)


def test_every_kernel_and_why_when_verbose() -> None:
    stream = io.StringIO()
    print_report(make_console(stream), **full_case(), verbose=True)
    flat = squeezed(stream.getvalue())
    assert "forward: implicit gemm (TF32 tensor cores" in flat
    assert "forward_implicit_gemm_wgmma: 128 blocks of 256 threads" in flat
    assert "both 0.213 0.141 1.51x faster" in flat


def test_a_mismatch_says_what_is_wrong_and_where_it_begins() -> None:
    text = render(PLAN, mismatched(), None, verbose=True)
    flat = squeezed(text)
    assert "MISMATCH: 12 failures" in flat
    assert "VERIFIED" not in flat
    assert "[odd] line 0" in flat  # brackets are no markup
    assert "[odd] line 9" in flat
    assert "[odd] line 10" not in flat
    assert "and 2 more" in flat
    assert "first layer that diverges: main.0, by 7.7e-02" in flat
    rows = [line.split() for line in text.splitlines()]
    assert ["output", "eval", "2", "3.1e-07", "inf", "2.5e-06"] in rows  # worse than the finite one
    assert any(row[-2:] == ["nan", "2.5e-06"] for row in rows)


def test_all_exact() -> None:
    report = VerifyReport(checks=[check("output", "", 0.0, 0.0, 1e-6)])
    assert "VERIFIED: 1 comparisons, all exact" in squeezed(render(PLAN, report, None))


def test_parts_that_were_not_done_are_named() -> None:
    flat = squeezed(render(PLAN, None, None))
    assert "NOT VERIFIED: nothing was compared" in flat
    assert "not timed" in flat
    assert "Nothing to swap" in render(NOTHING, None, None)
    assert "1-D; only 2-D" in render(NOTHING, None, None)
    assert "no transposed convolution" in render(SwapPlan(()), None, None)
    for plan in (NOTHING, SwapPlan(())):
        assert "VERIFIED" not in render(plan, None, None)


def test_layer_timings_keep_their_digits_beside_a_long_name() -> None:
    text = render(PLAN, verified(), timed(), verbose=True)
    rows = [line.split() for line in text.splitlines()]
    assert any(row[-5:] == ["forward", "0.0413", "0.0001", "335x", "faster"] for row in rows)
    assert any(row[-6:] == ["0.0413", "+-1%", "0.0001", "+-1%", "335x", "faster"] for row in rows)
    assert any(row[-7:] == ["forward", "1235", "+-1%", "640", "+-1%", "1.93x", "faster"] for row in rows)
    assert any(row[-7:] == ["backward", "9.00", "+-1%", "10.0", "+-1%", "0.90x", "slower"] for row in rows)
    label = "".join(line[2:26].replace(" ", "") for line in text.splitlines())
    assert LONG_NAME in label
    assert "128x2048x128x256bfloat16channels_last,3calls" in label


@pytest.mark.parametrize("width", [40, 50, 60, 71])
def test_nothing_is_cut_on_a_narrow_terminal(width: int) -> None:
    def narrow(verbose: bool) -> list[str]:
        stream = io.StringIO()
        print_report(Console(file=stream, width=width), **full_case(), verbose=verbose)
        return stream.getvalue().partition("Load it")[0].splitlines()

    lines = narrow(False)
    assert max(map(len, lines)) <= width
    for words in (["up.1"], ["512->256", "k4", "s2", "p1"], ["whole", "network"]):
        assert words in [line.split() for line in lines]
    rows = [line.split()[:5] for line in lines]
    assert ["forward", "0.0800", "0.0510", "1.57x", "faster"] in rows
    assert ["error", "8.0e-05", "7.5e-05", "12%", "of"] in rows
    assert any("implicit gemm" in line for line in lines) == (width >= 60)
    for verbose in (False, True):
        assert "…" not in "".join(narrow(verbose))
    assert ["up.1", "forward", "0.0800", "+-1%", "0.0510", "+-1%", "1.57x", "faster"] in [
        line.split() for line in narrow(True)
    ]


def test_a_busy_machine_is_noticed() -> None:
    assert "unsteady" not in render(PLAN, verified(), timed())
    rows = [Comparison("network", "forward", steady(1.0, spread), steady(1.0)) for spread in (0.4, 0.6)]
    assert "1 of 4 timings are unsteady" in squeezed(render(PLAN, verified(), timed(network=rows)))


@pytest.mark.parametrize(
    ("original", "swapped", "expected"),
    [
        (steady(1.93), steady(1.0), "1.93x faster"),
        (steady(0.9), steady(1.0), "0.90x slower"),
        (steady(250.0), steady(1.0), "250x faster"),
        (steady(1.0), steady(1.0), "1.00x"),
        (steady(1.004), steady(1.0), "1.00x"),
        (steady(1.02), steady(1.0), "1.02x faster"),  # little, but in every single pair
        (steady(1.02), Timing.of(steady(1.0, 0.1).samples_ms[::-1]), "1.00x"),
        (steady(1.3), Timing.of(steady(1.0, 0.9).samples_ms[::-1]), "1.30x noisy"),
        (steady(0.7), Timing.of(steady(1.0, 0.9).samples_ms[::-1]), "0.70x noisy"),
    ],
)
def test_speedups_in_words(original: Timing, swapped: Timing, expected: str) -> None:
    benchmark = BenchmarkReport(network=[Comparison("network", "forward", original, swapped)])
    (row,) = summarise(to_json_dict(PLAN, None, benchmark, FACTS)).network
    assert speedup_text(row) == expected


def test_colours_on_a_terminal_only() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system="standard", no_color=False)
    print_report(console, PLAN, verified(), timed(), FACTS)
    assert "\x1b[" in stream.getvalue()
    assert "VERIFIED" in stream.getvalue()


def test_layers_that_pytorch_computes_are_named() -> None:
    facts = replace(FACTS, native=("main.0: PyTorch computes grad_weight (measured)",))
    text = render(PLAN, verified(), timed(), facts)
    assert "- main.0: PyTorch computes grad_weight (measured)" in text
    assert to_json_dict(PLAN, None, None, facts)["facts"]["native"] == list(facts.native)


def test_names_cannot_control_the_terminal() -> None:
    evil = "a\x1b[2J\rb"
    plan = SwapPlan((LayerPlan((evil,), "ConvTranspose2d", "1->1 k1", 1, True),))
    facts = Facts(evil, evil, evil, evil, evil, evil, (evil,), (evil,))
    report = verified()
    report.failures = [evil]
    report.first_divergence = evil
    benchmark = timed(layers=[LayerComparison(evil, "forward", steady(1), steady(1))], notes=[evil])
    text = render(plan, report, benchmark, facts)
    assert "\x1b" not in text
    assert "\r" not in text
    assert "\\x1b[2J" in text


def test_a_stream_that_can_print_ascii_only() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_report(make_console(stream), PLAN, verified(), timed(), FACTS)
    stream.flush()
    assert b"VERIFIED" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_outcomes() -> None:
    assert outcome(NOTHING, None) == "nothing_to_swap"
    assert outcome(PLAN, None) == "not_verified"
    assert outcome(PLAN, verified()) == "verified"
    assert outcome(PLAN, mismatched()) == "mismatch"


def test_json_round_trip() -> None:
    data = to_json_dict(PLAN, mismatched(), timed(peak_memory=[PeakMemory("step", 2, 1)]), FACTS)
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text) == data
    assert data["schema_version"] == SCHEMA_VERSION == 1
    assert data["outcome"] == "mismatch"
    assert data["facts"]["inputs_origin"] == FACTS.inputs_origin
    assert data["facts"]["load_snippet"] == FACTS.load_snippet
    assert [layer["swap"] for layer in data["plan"]["layers"]] == [True, True, False]
    assert {"inf", "nan"} <= {c["error_swapped"] for c in data["verification"]["checks"]}
    assert data["benchmark"]["network"][0]["speedup"] == pytest.approx(1.93, abs=0.01)
    assert data["benchmark"]["peak_memory"] == [{"stage": "step", "original_bytes": 2, "swapped_bytes": 1}]
    assert data["benchmark"]["environment"] == MACHINE


def test_json_of_missing_parts_and_special_values() -> None:
    data = to_json_dict(PLAN, None, None, FACTS)
    assert data["verification"] is None
    assert data["benchmark"] is None
    odd = timed(environment={"ratio": math.inf, "path": ("a", math.nan), 3: {"x": -math.inf}})
    data = to_json_dict(PLAN, None, odd, FACTS)
    assert data["benchmark"]["environment"] == {"ratio": "inf", "path": ["a", "nan"], "3": {"x": "-inf"}}

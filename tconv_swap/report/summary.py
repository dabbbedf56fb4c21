"""Computes the content of every form of the report from the JSON document: plain rows, once for all renderers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tconv_swap.measurement.environment import machine_name
from tconv_swap.measurement.roof import Ceilings, Work
from tconv_swap.report.document import MODEL_ITSELF
from tconv_swap.report.rows import Before, ErrorRow, LayerRow, StageRow, Summary
from tconv_swap.report.ways import way_notes, way_tables
from tconv_swap.report.words import size_text, verdict_of

FAMILIES = {"native": "PyTorch", "plain": "PyTorch"}
"""Words for the reader, for families whose own name is not clear."""
#: The spread of a timing from which on other work must have used the machine.
UNSTEADY_SPREAD = 0.25

Json = Mapping[str, Any]


def summarise(document: Json, notes: Sequence[str] = ()) -> Summary:
    """Returns the summary of a document that `to_json_dict` made, or that was read back from JSON.

    Args:
        document: see `document`.
        notes: put in front of those of the document.
    """
    plan, facts = document["plan"], document["facts"]
    verification, benchmark = document["verification"], document["benchmark"]
    ceilings = _ceilings(document.get("ceilings"))
    checks = [_error(check) for check in verification["checks"]] if verification else []
    swapped = [layer for layer in plan["layers"] if layer["swap"]]
    return Summary(
        facts=tuple(_facts(document, len(swapped), len(plan["layers"]))),
        outcome=document["outcome"],
        verdict=_verdict(document),
        network=tuple(_stage(row) for row in benchmark["network"]) if benchmark else (),
        layers=tuple(row for layer in swapped for row in _layer_rows(layer, document, checks, ceilings)),
        left=(
            *(
                (_names(layer), layer["geometry"], layer["reason"])
                for layer in plan["layers"]
                if not layer["swap"]
            ),
            *((block["name"], block["kind"], block["reason"]) for block in _left_blocks(plan)),
        ),
        errors=tuple(_worst_of_each(checks)),
        reference=verification["reference"] if verification else "",
        remarks=tuple(_remarks(benchmark)) if benchmark else (),
        ceilings=ceilings,
        no_roof=_no_roof(document),
        notes=tuple(dict.fromkeys([*notes, *_notes(document)])),
        failures=tuple(verification["failures"]) if verification else (),
        first_divergence=(verification["first_divergence"] or "") if verification else "",
        output=facts["output"] or "",
        load_snippet=facts["load_snippet"],
        ways=way_tables(document),
    )


def _facts(document: Json, swapped: int, layers: int) -> Iterator[tuple[str, str]]:
    facts, benchmark = document["facts"], document["benchmark"]
    yield "model", facts["model"]
    yield "inputs", f"{facts['inputs']} ({facts['inputs_origin']})"
    yield "device", facts["device"]
    if benchmark and benchmark["environment"]:
        yield "machine", machine_name(benchmark["environment"])
    yield "layers", f"{swapped} of {layers} transposed convolutions swapped"
    if blocks := document["plan"].get("blocks"):
        left = len(list(_left_blocks(document["plan"])))
        fused = sum(block["swap"] and bool(block["activation"]) for block in blocks)
        pads = any("Pad2d" in block["kind"] for block in blocks)
        what = "norms and paddings" if pads else "norms"
        yield (
            "blocks",
            f"{len(blocks) - left} of {len(blocks)} {what} swapped, {fused} with the activation behind them",
        )
    # Documents of earlier versions do not say what was tried.
    verification = document["verification"] or {}
    if tried := verification.get("tried"):
        yield "tried", ", ".join(tried)
    if missing := verification.get("not_tried"):
        yield "not tried", ", ".join(missing)


def _left_blocks(plan: Json) -> Iterator[Json]:
    return (block for block in plan.get("blocks", ()) if not block["swap"])


def _verdict(document: Json) -> str:
    verification = document["verification"]
    if verification is None:
        return "NOT VERIFIED: nothing was compared"
    if not verification["passed"]:
        count = len(verification["failures"])
        return f"MISMATCH: {count} failure{'s' if count != 1 else ''}"
    count, margin = len(verification["checks"]), _number(verification["margin"])
    worst = f"the largest error is {1 / margin:.0%} of its limit" if math.isfinite(margin) else "all exact"
    return f"VERIFIED: {count} comparisons, {worst}"


def _no_roof(document: Json) -> str:
    if document.get("ceilings") or not document["benchmark"]:
        return ""
    if str(document["facts"]["device"]).startswith("cuda"):
        return "no roof: the ceilings of this GPU were not measured"
    return "no roof: ceilings are measured on CUDA GPUs only, since on a CPU the caches can hold all data of a layer"


def _notes(document: Json) -> Iterator[str]:
    facts, plan = document["facts"], document["plan"]
    verification, benchmark = document["verification"], document["benchmark"]
    yield from facts["warnings"]
    yield from facts.get("native", ())
    yield from plan.get("unused_hints", ())
    if verification:
        yield from verification["notes"]
    if benchmark:
        yield from benchmark["notes"]
        rows = [*benchmark["network"], *benchmark["layers"]]
        if unsteady := sum(max(map(_spread, (r["original"], r["swapped"]))) > UNSTEADY_SPREAD for r in rows):
            yield f"{unsteady} of {len(rows)} timings are unsteady: the machine was busy; measure again"
    elif document["outcome"] != "nothing_to_swap":
        yield "not timed"
    yield from way_notes(document)


def _names(layer: Json) -> str:
    return " = ".join(name or MODEL_ITSELF for name in layer["names"])


def _number(value: Any) -> float:
    """Returns the number that a JSON value stands for: infinities and NaN are strings there."""
    return float(value)


def _error(check: Json) -> ErrorRow:
    return ErrorRow(
        check["kind"],
        check["mode"],
        check["name"],
        _number(check["error_original"]),
        _number(check["error_swapped"]),
        _number(check["limit"]),
        check["passed"],
        check["detail"],
    )


def _badness(row: ErrorRow) -> tuple[bool, float]:
    return (not row.passed, math.inf if math.isnan(row.of_limit) else row.of_limit)


def _worst_of_each(checks: Sequence[ErrorRow]) -> Iterator[ErrorRow]:
    worst: dict[tuple[str, str], ErrorRow] = {}
    for check in checks:
        key = (check.what, check.mode)
        if key not in worst or _badness(check) > _badness(worst[key]):
            worst[key] = check
    yield from worst.values()


def _spread(timing: Json) -> float:
    median = timing["median_ms"]
    return (timing["q3_ms"] - timing["q1_ms"]) / 2 / median if median > 0 else 0.0


def _stage(row: Json, **known: Any) -> StageRow:
    original, swapped = row["original"], row["swapped"]
    times = Before(original["median_ms"], swapped["median_ms"], _spread(original), _spread(swapped))
    verdict = verdict_of(_number(row["speedup"]), [_number(value) for value in row["speedup_interval"]])
    return StageRow(row["stage"], times, verdict, **known)


def _layer_rows(
    layer: Json, document: Json, checks: Sequence[ErrorRow], ceilings: Ceilings | None
) -> Iterator[LayerRow]:
    """Yields a row for each form of the layer's inputs that was timed; one row without times if none was."""
    own = [check for check in checks if check.what.startswith("layer_") and check.name in layer["names"]]
    same = {
        "name": _names(layer),
        "geometry": layer["geometry"],
        "parameters": layer["parameters"],
        "error": max(own, key=_badness, default=None),
    }
    forms: dict[tuple[Any, ...], list[Json]] = {}
    for timed in document["benchmark"]["layers"] if document["benchmark"] else ():
        if timed["name"] in layer["names"]:
            forms.setdefault((*_key(timed), timed["memory_format"]), []).append(timed)
    if not forms:
        yield LayerRow(**same)
    for timings in forms.values():
        first = timings[0]
        explained = _explained(first, document)
        mode = _mode(first["dtype"], explained["precision"] if explained else "")
        stages = [_layer_stage(row, explained, mode, ceilings) for row in timings]
        yield LayerRow(
            **same,
            form=_form(first),
            mode=mode,
            stages=(*stages, *_both(stages)),
            kernels=tuple(_kernels(explained)) if explained else (),
        )


def _key(layer: Json) -> tuple[Any, ...]:
    return layer["name"], tuple(layer["input_shape"]), layer["dtype"]


def _explained(timed: Json, document: Json) -> Json | None:
    """Returns the explanation of the layer for the inputs that were timed."""
    explanation = document.get("explanation")
    found = [layer for layer in explanation["layers"] if _key(layer) == _key(timed)] if explanation else []
    # The layout decides between several: that of a layer may differ from its input's, because of its weight.
    same = [layer for layer in found if layer["layout"] == timed["memory_format"]]
    return next(iter([*same, *found]), None)


def _mode(dtype: str, precision: str) -> str:
    if dtype == "float32":
        return "tf32" if precision == "tf32" else "fp32"
    return {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, "")


def _form(timed: Json) -> str:
    shape = "x".join(map(str, timed["input_shape"]))
    form = "" if timed["memory_format"] == "contiguous" else f" {timed['memory_format']}"
    calls = f", {timed['calls']} calls" if timed["calls"] > 1 else ""
    return f"{shape} {timed['dtype']}{form}{calls}"


def _layer_stage(timed: Json, explained: Json | None, mode: str, ceilings: Ceilings | None) -> StageRow:
    if explained is None or not explained["stages"]:
        return _stage(timed)
    forward, *gradients = explained["stages"]
    parts = [forward] if timed["stage"] == "forward" else gradients
    # All gradients together move each tensor and compute each product twice.
    times = 1 if timed["stage"] == "forward" else 2
    work = Work(times * forward["flops"], times * forward["bytes"])
    known = ceilings is not None and mode in ceilings.tflops
    return _stage(
        timed,
        family=", ".join(dict.fromkeys(map(_family, parts))),
        why=tuple(f"{part['stage']}: {part['why']}" for part in parts),
        roof_ms=work.roof_ms(ceilings, mode) if known and ceilings is not None else None,
        work=work,
    )


def _family(part: Json) -> str:
    name = FAMILIES.get(part["family"], part["family"])
    return str("PyTorch" if part["backend"] == "native" else name).replace("_", " ")


def _both(stages: Sequence[StageRow]) -> Iterator[StageRow]:
    """Yields the times of forward and backward together, which a layer adds to a training step."""
    if [row.stage for row in stages] != ["forward", "backward"]:
        return
    forward, backward = (row.times for row in stages)
    times = Before(forward.original_ms + backward.original_ms, forward.swapped_ms + backward.swapped_ms)
    ratio = times.original_ms / times.swapped_ms
    certain = {row.verdict for row in stages} - {"same"}
    verdict = next(iter(certain)) if len(certain) == 1 else "noisy" if "noisy" in certain else ""
    verdict = verdict or ("faster" if ratio > 1 else "slower")
    yield StageRow("both", times, "same" if f"{ratio:.2f}" == "1.00" or not certain else verdict)


def _kernels(explained: Json) -> Iterator[str]:
    for stage in explained["stages"]:
        yield f"{stage['stage']}: {_family(stage)} ({stage['why']})"
        for kernel in stage["kernels"]:
            yield (
                f"  {kernel['entry']}: {kernel['grid']} blocks of {kernel['block']} threads, "
                f"{kernel['shared_bytes']} bytes shared"
            )


def _ceilings(found: Json | None) -> Ceilings | None:
    return None if found is None else Ceilings(found["copy_gbps"], found["tflops"])


def _remarks(benchmark: Json) -> Iterator[str]:
    shares = benchmark["transposed_share"]
    known = [f"{share:.0%} of the {stage} pass" for stage, share in shares.items() if share is not None]
    if known:
        yield f"These layers are about {' and '.join(known)} of the original network."
    for peak in benchmark["peak_memory"] or ():
        original, swapped = map(size_text, (peak["original_bytes"], peak["swapped_bytes"]))
        yield f"Peak memory, {peak['stage']}: PyTorch {original}, ours {swapped}."

"""The report as JSON by its schema, as Markdown and as a page."""

from __future__ import annotations

import copy
import functools
import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report_cases import CEILINGS, full_case

from tconv_swap.report import Facts, json_schema, to_json_dict, written
from tconv_swap.report.charts import bars, roofline
from tconv_swap.report.markdown import markdown
from tconv_swap.report.page import page
from tconv_swap.report.rows import LayerRow, Summary
from tconv_swap.report.summary import summarise
from tconv_swap.surgery import LayerPlan, SwapPlan
from tconv_swap.verification.report import VerifyReport

EVIL = "a|b<script>alert(1)</script>`*[x](http://evil.example)\x1b[2J$\\alpha$ {{ 7 * 7 }}"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return to_json_dict(**full_case())


def without(*keys: str) -> dict[str, Any]:
    """The document of a run that did less."""
    return to_json_dict(**(full_case() | dict.fromkeys(keys)))


def failed() -> dict[str, Any]:
    case = full_case()
    checks = [*case["verification"].checks]
    checks[0] = replace(checks[0], error_swapped=math.nan, passed=False)
    failures = ["eval: output: error 7.70e-02"]
    report = VerifyReport(checks, failures, first_divergence="layer up.1, by 7.7e-02")
    return to_json_dict(**(case | {"verification": report, "benchmark": None, "ceilings": None}))


def evil() -> dict[str, Any]:
    """Every text that comes out of a foreign file tries to break out of its place."""
    found: dict[str, Any] = json.loads(json.dumps(to_json_dict(**full_case())))
    names = {"up.0": EVIL}
    for layer in found["plan"]["layers"]:
        layer["names"] = [names.get(name, name) for name in layer["names"]]
        layer["reason"] = EVIL if layer["reason"] else ""
    for rows in (
        found["benchmark"]["layers"],
        found["explanation"]["layers"],
        found["verification"]["checks"],
    ):
        for row in rows:
            row["name"] = names.get(row["name"], row["name"])
    found["facts"] |= dict.fromkeys(("model", "inputs", "inputs_origin", "output"), EVIL)
    found["facts"]["load_snippet"] = f"torch.load('```{EVIL}')"
    found["facts"]["warnings"] = [EVIL]
    found["verification"]["notes"] = [EVIL]
    return found


NOTHING = to_json_dict(SwapPlan(()), None, None, Facts("m.pt", "none", "nothing was run", "cpu"))
LEFT = SwapPlan((LayerPlan(("up",), "ConvTranspose1d", "8->8 k2", 128, False, reason="1-D"),), ("x.*",))
CASES = {
    "no ways": without("ways"),
    "all": to_json_dict(**full_case()),
    "not timed": without("benchmark", "ceilings"),
    "not explained": without("explanation", "ceilings"),
    "no ceilings": without("ceilings"),
    "not verified": without("verification", "benchmark", "explanation", "ceilings"),
    "mismatch": failed(),
    "nothing to swap": to_json_dict(LEFT, None, None, Facts("m.pt", "none", "nothing was run", "cpu")),
    "no layers": NOTHING,
    "evil": evil(),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@functools.cache
def drawn(name: str) -> str:
    """Returns the page of a case, whose charts take a second."""
    return page(CASES[name])


class TestSchema:
    def test_the_schema_is_valid(self) -> None:
        jsonschema.Draft202012Validator.check_schema(json_schema())

    @ALL
    def test_documents_are_valid(self, case: dict[str, Any]) -> None:
        jsonschema.validate(json.loads(json.dumps(case, allow_nan=False)), json_schema())

    def test_error_documents_are_valid(self) -> None:
        error = {"schema_version": 1, "tool": "tconv-swap", "outcome": "error", "error": "no", "exit_code": 3}
        jsonschema.validate(error, json_schema())
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(error | {"outcome": "verified"}, json_schema())

    @ALL
    def test_every_field_of_a_document_is_described(self, case: dict[str, Any]) -> None:
        strict = copy.deepcopy(json_schema())
        for part in (strict, *strict["$defs"].values(), *strict["properties"].values()):
            _forbid_unknown(part)
        jsonschema.validate(json.loads(json.dumps(case)), strict)

    def test_every_field_has_a_description(self) -> None:
        schema = json_schema()
        for part in (schema, *schema["$defs"].values(), *schema["properties"].values()):
            for name, field in part.get("properties", {}).items():
                assert field.get("description") or "$ref" in field, name


def _forbid_unknown(schema: dict[str, Any]) -> None:
    if "properties" in schema:
        schema["additionalProperties"] = False
        for field in schema["properties"].values():
            _forbid_unknown(field)


class TestSummary:
    def test_of_the_roof(self, document: dict[str, Any]) -> None:
        """up.1 forward: 128x512x4x4 -> 256 k4 s2 p1, by hand. Every tap of 4x4 input pixels but the outermost."""
        (layer,) = [row for row in summarise(document).layers if row.name == "up.1"]
        forward, backward = layer.stage("forward"), layer.stage("backward")
        assert forward is not None
        assert backward is not None
        flops = 2 * 128 * 512 * 256 * (4 * 4 - 2) ** 2
        size = 4 * (128 * 512 * 16 + 512 * 256 * 16 + 128 * 256 * 64)
        assert layer.mode == "tf32"
        assert (forward.work.flops, forward.work.bytes) == (flops, size)  # type: ignore[union-attr]
        roof_ms = max(flops / CEILINGS.tflops["tf32"] * 1e-9, size / CEILINGS.copy_gbps * 1e-6)
        assert forward.roof_ms == pytest.approx(roof_ms)
        assert backward.roof_ms == pytest.approx(2 * roof_ms)
        assert forward.of_roof == pytest.approx(roof_ms / 0.051)
        assert forward.of_roof_before == pytest.approx(roof_ms / 0.080)

    def test_both_is_what_a_layer_adds_to_a_training_step(self, document: dict[str, Any]) -> None:
        both = summarise(document).layers[0].stage("both")
        assert both is not None
        assert both.speedup == pytest.approx((0.042 + 0.052) / (0.031 + 0.056))

    def test_each_layer_has_its_own_worst_error(self, document: dict[str, Any]) -> None:
        for layer in summarise(document).layers:
            assert layer.error is not None
            assert layer.error.name == layer.name

    def test_why_there_is_no_roof(self) -> None:
        assert summarise(CASES["all"]).no_roof == ""
        assert "were not measured" in summarise(CASES["no ceilings"]).no_roof
        on_cpu = copy.deepcopy(CASES["no ceilings"])
        on_cpu["facts"]["device"] = "cpu"
        assert "CUDA GPUs only" in summarise(on_cpu).no_roof

    def test_the_same_from_the_json_file(self, document: dict[str, Any]) -> None:
        assert summarise(json.loads(json.dumps(document))) == summarise(document)


class TestMarkdown:
    @ALL
    def test_tables_are_whole(self, case: dict[str, Any]) -> None:
        """As many columns in every row as in the head of its table, escaped bars apart."""
        columns = 0
        for line in markdown(case).splitlines():
            if not line.startswith("|"):
                columns = 0
                continue
            count = len(re.findall(r"(?<!\\)\|", line))
            assert columns in (0, count), line
            columns = count

    def test_content(self, document: dict[str, Any]) -> None:
        text = markdown(document)
        assert "VERIFIED: 17 comparisons" in text
        assert (
            "| up.1<br>512-\\>256 k4 s2 p1<br>128x512x4x4 float32 | forward | 0.0800 | 0.0510 | 1.57x faster"
            in text
        )
        assert "**0.93x slower**" in text
        assert "Peak memory, step: PyTorch 3.00 GiB, ours 700.0 MiB." in text
        assert "4256 GB/s" in text
        assert "1-D; only 2-D layers are swapped" in text

    def test_failures(self) -> None:
        text = markdown(CASES["mismatch"])
        assert text.startswith("# tconv-swap: MISMATCH: 1 failure\n")
        assert "- first layer that diverges: layer up.1" in text
        assert "**nan**" in text

    def test_names_from_files_are_text(self) -> None:
        text = markdown(evil())
        fence = "````python\n"
        outside = text[: text.index(fence)] + text[text.index("\n````\n") + 5 :]
        assert "\x1b" not in text
        assert not re.search(r"(?<!\\)<(?!br>)", outside)
        assert not re.search(r"(?<!\\)\[x", outside)


def page_text(content: str) -> str:
    """Without style and drawings."""
    plain = re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", content, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", plain))


class TestPage:
    @pytest.mark.parametrize("name", CASES)
    def test_self_contained(self, name: str) -> None:
        content = drawn(name)
        assert "<script" not in content
        assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", content)
        assert not re.search(r"url\((?!#)", content)
        assert "@import" not in content
        assert "default-src 'none'" in content

    def test_content(self, document: dict[str, Any]) -> None:
        text = " ".join(page_text(drawn("all")).split())
        for words in (
            "VERIFIED: 17 comparisons, the largest error is 13% of its limit",
            "2.08x faster",
            "implicit gemm",
            "grad_input, grad_weight: of ours only the general kernels claim it",
            "Peak memory, step: PyTorch 3.00 GiB, ours 700.0 MiB.",
            "1-D; only 2-D layers are swapped",
            "multiprocessors" if "multiprocessors" in document["benchmark"]["environment"] else "driver",
        ):
            assert words in text

    def test_names_from_files_are_text(self) -> None:
        content = drawn("evil")
        assert "\x1b" not in content
        assert "<script" not in content
        assert "{{ 7 * 7 }}" in page_text(content)

    def test_the_same_document_gives_the_same_page(self, document: dict[str, Any]) -> None:
        assert page(document) == drawn("all")

    def test_charts_exist_if_there_is_something_to_draw(self) -> None:
        assert drawn("all").count("<svg") == 3
        assert drawn("no ways").count("<svg") == 2
        assert drawn("no ceilings").count("<svg") == 2
        assert page(without("benchmark", "ceilings", "ways")).count("<svg") == 0


class TestCharts:
    def test_bars(self, document: dict[str, Any]) -> None:
        chart = bars(summarise(document))
        assert chart is not None
        for words in ("1  up.0", "5  head", "0.93x slower", "13.9x", "PyTorch", "ours", "milliseconds"):
            assert f">{words}<" in chart
        assert set(re.findall(r"#[0-9a-fA-F]{6}\b", chart)) == set(), "a colour that the theme does not know"

    def test_roofline(self, document: dict[str, Any]) -> None:
        chart = roofline(summarise(document))
        assert chart is not None
        assert ">4256 GB/s<" in chart
        assert ">tf32: 417 TFLOP/s<" in chart
        assert "fp32" not in chart, "no layer is bound by it"
        assert set(re.findall(r"#[0-9a-fA-F]{6}\b", chart)) == set()

    def test_none_without_times(self) -> None:
        for case in ("not timed", "no layers"):
            assert bars(summarise(CASES[case])) is None
            assert roofline(summarise(CASES[case])) is None
        assert roofline(summarise(CASES["no ceilings"])) is None

    def test_long_names_keep_their_end(self, document: dict[str, Any]) -> None:
        summary: Summary = summarise(document)
        layers: tuple[LayerRow, ...] = (replace(summary.layers[0], name="decoder." * 30 + "last"),)
        chart = bars(replace(summary, layers=layers))
        assert chart is not None
        assert "decoder.last<" in chart
        assert "decoder." * 10 not in chart


class TestFiles:
    def test_forms_by_name(self, document: dict[str, Any]) -> None:
        assert written.render(Path("r.md"), document) == markdown(document)
        assert written.render(Path("R.HTML"), document) == drawn("all")

    def test_another_name_is_refused(self) -> None:
        with pytest.raises(written.ReportError, match=r"r\.pdf: give a name that ends in \.md or \.html"):
            written.check(Path("r.pdf"))

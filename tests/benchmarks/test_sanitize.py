"""benchmarks.sanitize runs every kernel source, and says when one computes something else than PyTorch."""

from __future__ import annotations

import pytest
import torch

from benchmarks import sanitize
from tconv_swap.cuda import call
from tconv_swap.kernels import plan

H200 = plan.Device("sm_90a", 132, 227 << 10)


def test_every_kernel_source_is_run_by_something() -> None:
    """A new kernel that no geometry there leads to would be checked by no sanitizer."""
    found: list[sanitize.Case] = []
    for geometry in sanitize.GEOMETRIES:
        found += sanitize.cases([geometry], H200, each=1, modes=sanitize.MODES[:2])
        if not sanitize.sources_without_case(found):
            break
    assert sanitize.sources_without_case(found) == []
    families = {(case.stage, case.problem.channels_last) for case in found}
    assert families == {(stage, layout) for stage in sanitize.STAGES for layout in (False, True)}


def test_a_source_without_a_case_is_named() -> None:
    found = sanitize.cases(sanitize.GEOMETRIES[:1], H200, each=1, modes=sanitize.MODES[4:])
    missing = sanitize.sources_without_case(found)
    assert "forward/implicit_gemm_wgmma.cu" in missing
    assert "forward/general.cu" not in missing


def test_shares_contain_every_plan_once() -> None:
    plans = list(range(11))
    shares = [sanitize.share(f"{first}/4") for first in range(4)]
    assert sorted(plan for first, every in shares for plan in plans[first::every]) == plans
    for wrong in ("4/4", "-1/4", "1", "a/b"):
        with pytest.raises(ValueError):
            sanitize.share(wrong)


def test_without_a_gpu_the_exit_code_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_wrong_result_is_detected() -> None:
    facts, device = call.device_facts(0), torch.device("cuda", 0)
    found = sanitize.cases(sanitize.GEOMETRIES[:1], facts, each=1, modes=sanitize.MODES[1:2])
    assert [sanitize.run(case, device, facts.architecture) for case in found] == [""] * len(found)
    case = found[0]
    without_bias = case._replace(made=plan.plan_forward(case.problem, False, facts))
    assert "from PyTorch's result" in sanitize.run(without_bias, device, facts.architecture)

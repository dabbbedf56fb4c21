"""benchmarks.sanitize runs every kernel source, and says when one computes something else than PyTorch."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from benchmarks import sanitize
from tconv_swap.cuda import call
from tconv_swap.kernels import plan
from tconv_swap.runtime.program import Plan

H200 = plan.Device("sm_90a", 132, 227 << 10)


#: Geometries that lead to kernels which no other leads to, and together to all kernels. They are asked first.
SPECIAL = (19, 18, 16, 13, 11, 6, 3, 15)
#: The stages that may launch the kernels of a folder; those of others are launched by any.
STAGES_OF = {
    "forward": ["forward"],
    "grad_input": ["grad_input"],
    "grad_weight": ["grad_weight", "grad_weight alone"],
    "gradients": ["all gradients"],
}


def test_every_kernel_source_is_run_by_something() -> None:
    """A new kernel that no geometry there leads to would be checked by no sanitizer."""
    missing = set(sanitize.sources_without_case([]))
    assert {"forward/general.cu", "gradients/tiny.cu"} < missing
    order = (*SPECIAL, *(at for at in range(len(sanitize.GEOMETRIES)) if at not in SPECIAL))
    problems = (
        plan.Problem(sanitize.GEOMETRIES[at], *mode, layout, layout)
        for at in order
        if at < len(sanitize.GEOMETRIES)
        for mode in sanitize.MODES[:2]
        for layout in (False, True)
    )
    for problem, stage in product(problems, sanitize.STAGES):
        if any(stage in STAGES_OF.get(name.partition("/")[0], sanitize.STAGES) for name in missing):
            for made in sanitize.candidates(problem, stage, H200):
                missing -= {one.kernel.source for one in made.launches}
    assert missing == set()


def test_cases_are_of_every_stage_and_layout_and_have_every_sequence_of_kernels() -> None:
    (geometry,), (mode,) = sanitize.GEOMETRIES[:1], sanitize.MODES[1:2]
    found = sanitize.cases([geometry, geometry], H200, each=1, modes=[mode])
    sequences = [(case.stage, case.problem.channels_last, sources(case.made)) for case in found]
    assert len(sequences) == len(set(sequences))
    assert set(sequences) == {
        (stage, layout, sources(made))
        for stage in sanitize.STAGES
        for layout in (False, True)
        for made in sanitize.candidates(plan.Problem(geometry, *mode, layout, layout), stage, H200)
    }


def sources(made: Plan) -> tuple[str, ...]:
    return tuple(one.kernel.source for one in made.launches)


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

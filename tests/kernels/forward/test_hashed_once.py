"""Problems whose hash is computed once: copies with other fields are what dataclasses.replace makes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from size_cases import H200, LAYERS

from tconv_swap.kernels import plan
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem
from tconv_swap.kernels.forward.plan import posed
from tconv_swap.kernels.grad_input.implicit_gemm_layout import as_convolution

PROBLEM = plan.Problem(LAYERS[0].geometry, torch.float16, "ieee", False, False)


@pytest.mark.parametrize("problem", [posed(PROBLEM, True), as_convolution(PROBLEM)], ids=["output", "input"])
def test_a_copy_has_other_fields_and_nothing_that_was_computed_before(problem: TileProblem) -> None:
    assert problem.positions
    assert {problem: H200}[problem] is H200
    other = problem.geometry._replace(batch=3, height=problem.geometry.height + 5)
    made = problem._replace(geometry=other, aligned=True)
    expected = replace(problem, geometry=other, aligned=True)
    assert (made, hash(made), made.positions) == (expected, hash(expected), expected.positions)
    assert made.positions != problem.positions
    assert type(made) is type(problem)
    assert pickle.loads(pickle.dumps(made)) == made


def test_there_is_no_other_field() -> None:
    with pytest.raises(ValueError, match="TileProblem has no colour"):
        posed(PROBLEM, True)._replace(colour=1)

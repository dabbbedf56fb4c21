"""The time that tiles of the narrow FFMA kernel are expected to take. No GPU."""

from __future__ import annotations

import pytest
import torch
from size_cases import H200

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.forward import narrow_ffma, narrow_ffma_cost
from tconv_swap.kernels.forward.narrow_ffma_choice import expected_time
from tconv_swap.kernels.forward.narrow_ffma_tile import footprint
from tconv_swap.kernels.plan import Problem


def test_short_rows_of_outputs_take_longer_in_nchw_beyond_the_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    near = Geometry(4, 16, 128, 128, 3, (4, 4), (2, 2), (1, 1))
    far = near._replace(batch=64)
    tile = narrow_ffma.of_size(Problem(far, torch.float32, "ieee", False, False), H200)[0]
    # Rows of 128 bytes, and of 256: one line of memory, and two.
    short, long = (tile._replace(lanes_w=lanes, thread_columns=2) for lanes in (8, 16))

    def times() -> dict[str, float]:
        cases = {
            "short": (far, False, short),
            "long": (far, False, long),
            "near": (near, False, short),
            "channels_last": (far, True, short),
        }
        return {
            name: expected_time(Problem(size, torch.float32, "ieee", last, last), H200)(
                one, footprint(size, one, last)
            )[0]
            for name, (size, last, one) in cases.items()
        }

    before = times()
    monkeypatch.setattr(narrow_ffma_cost, "FAR_SHORT_ROWS", 2 * narrow_ffma_cost.FAR_SHORT_ROWS)
    after = times()
    assert after.pop("short") == pytest.approx(2 * before.pop("short"))
    assert after == before

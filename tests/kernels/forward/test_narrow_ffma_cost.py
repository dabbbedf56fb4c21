"""The time that tiles of the narrow FFMA kernel are expected to take. No GPU."""

from __future__ import annotations

import pytest
import torch
from size_cases import H200

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.layer_sizes import out_row_multiple, power_of_two_dividing
from tconv_swap.kernels.forward import narrow_ffma, narrow_ffma_cost
from tconv_swap.kernels.forward.narrow_ffma_choice import _row_multiples, expected_time
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6, 8, 20, 64])
def test_a_row_of_whole_vectors_of_channels_needs_no_multiple_of_pixels(
    channels: int, dtype: torch.dtype
) -> None:
    vector = 16 // dtype.itemsize
    for stride in (1, 2, 4, 8):
        layer = Geometry(1, 8, 64, 64, channels, (stride, stride), (stride, stride))
        multiples = _row_multiples(Problem(layer, dtype, "ieee", True, True))
        assert len(multiples) == (1 if channels * stride % vector == 0 else 2)
        # The longest store that the rows of any size, and of some sizes, allow.
        longest = [power_of_two_dividing(of_output * channels, vector) for _, of_output in multiples]
        of_any, of_some = (out_row_multiple(layer, multiple, vector) * channels for multiple in (1, vector))
        assert (longest[0], longest[-1]) == (
            power_of_two_dividing(of_any, vector),
            power_of_two_dividing(of_some, vector),
        )

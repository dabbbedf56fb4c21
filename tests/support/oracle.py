"""The definition of a transposed convolution in float64; it shares no code with the kernels or with PyTorch's.

Every input pixel is scattered, tap by tap, to where the definition says it goes. Gradients come by autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def conv_transpose2d_reference(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    output_padding: int | tuple[int, int] = 0,
    groups: int = 1,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """Returns ``[N, Co, OH, OW]`` in float64 for ``x [N, Ci, H, W]``, ``w [Ci, Co / groups, KH, KW]``, ``b [Co]``."""
    (sh, sw), (ph, pw), (oph, opw), (dh, dw) = map(_pair, (stride, padding, output_padding, dilation))
    n, ci, h, wd = x.shape
    _, co_group, kh, kw = w.shape
    x = x.double().reshape(n, groups, ci // groups, h, wd)
    w = w.double().reshape(groups, ci // groups, co_group, kh, kw)
    span_h, span_w = (h - 1) * sh + dh * (kh - 1) + 1, (wd - 1) * sw + dw * (kw - 1) + 1
    # output_padding adds positions beyond the last tap, which are zero except for the bias.
    canvas = torch.zeros(
        n, groups, co_group, span_h + oph, span_w + opw, dtype=torch.float64, device=x.device
    )
    for i in range(kh):
        for j in range(kw):
            tap = torch.einsum("ngihw,gio->ngohw", x, w[..., i, j])
            rows = torch.arange(h, device=x.device) * sh + i * dh
            columns = torch.arange(wd, device=x.device) * sw + j * dw
            canvas = _add(canvas, tap, rows, columns)
    y = canvas.reshape(n, groups * co_group, *canvas.shape[3:])
    y = y[:, :, ph : y.shape[2] - ph, pw : y.shape[3] - pw]
    return y if b is None else y + b.double().view(1, -1, 1, 1)


def _add(canvas: Tensor, tap: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    index = (rows[:, None] * canvas.shape[-1] + columns).reshape(-1)
    return canvas.flatten(-2).index_add(-1, index, tap.flatten(-2)).view_as(canvas)

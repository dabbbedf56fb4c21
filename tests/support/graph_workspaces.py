"""Replays captured matrix products after another graph is gone and cuBLAS's workspaces were freed: `python
graph_workspaces.py`.

torch.compile frees them when it captures. A fault would break the GPU's context, so this runs in a process of its own.
"""

from __future__ import annotations

import copy
import gc

import torch
from torch import Tensor, nn

from tconv_swap import in_way

#: The weight's gradient is a sum over so many rows that cuBLAS splits it, with partial sums in its workspace.
ROWS, WIDTH = 32768, 640


def trained(network: nn.Module, rows: Tensor) -> list[Tensor]:
    network.zero_grad(set_to_none=True)
    output = network(rows)
    output.float().square().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


def main() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).cuda().bfloat16()
    rows = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    expected = trained(network, rows)
    first, kept = (in_way(copy.deepcopy(network), "pytorch+graph", (rows,), training=True) for _ in range(2))
    torch.testing.assert_close(trained(kept, rows), expected)
    del first
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = torch.full((2**28,), torch.nan, device="cuda")
    torch.testing.assert_close(trained(kept, rows), expected)
    torch.cuda.synchronize()
    assert others.isnan().all(), "the graph wrote to memory that is not its own"


if __name__ == "__main__":
    main()

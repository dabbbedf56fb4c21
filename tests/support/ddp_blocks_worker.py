"""One process of a group: compares DDP of a network with fused blocks with DDP of the original network.

The test suite starts two of them with gloo on the CPU, by pretended kernels. With NCCL on two GPUs, by the real ones:

    for rank in 0 1; do python tests/support/ddp_blocks_worker.py $rank 2 /tmp/group-$$ nccl & done; wait
"""

from __future__ import annotations

import copy
import os
import sys

import pytest
import torch
import torch.distributed as dist
from pretended_norm import pretended
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tconv_swap import swap_layers
from tconv_swap.blocks import call


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=None)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)  # type: ignore[no-any-return]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(4, 8, 4, 2, 1)
    return nn.Sequential(
        up, nn.BatchNorm2d(8), nn.ReLU(), Block(), nn.InstanceNorm2d(8, affine=True), nn.Tanh()
    )


def stepped(model: nn.Module, batches: Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).pow(3).mean().backward()
        optimizer.step()
    return model


def compare(rank: int, size: int, device: torch.device) -> int:
    """Returns how many blocks were computed as one."""
    batches = torch.randn(3, 2 * size, 4, 6, 5, generator=torch.Generator().manual_seed(1)).to(device)
    mine = batches[:, 2 * rank : 2 * rank + 2]
    original = network().to(device)
    swapped = swap_layers(original, fuse="all", inplace=False)
    seen: list[nn.Module] = []
    call.observers.append(lambda norm, *_: seen.append(norm))
    ids = None if device.type == "cpu" else [rank]
    found = [
        stepped(DistributedDataParallel(copy.deepcopy(one), device_ids=ids), mine)
        for one in (original, swapped)
    ]
    states = [model.state_dict() for model in found]
    for name, value in states[0].items():
        said = f"{name}: {{}}".format
        torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-5, msg=said)
    for name, value in found[1].named_parameters():
        others = [torch.empty_like(value) for _ in range(size)]
        dist.all_gather(others, value.detach())
        assert all(torch.equal(other, value) for other in others), name
    return len(seen)


def main(rank: int, size: int, file: str, backend: str) -> None:
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False
        count = compare(rank, size, device)
    else:
        with pytest.MonkeyPatch.context() as patch, pretended(patch):
            count = compare(rank, size, device)
    print(f"rank {rank} of {size}, {backend} on {device}: {count} blocks: same", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
    # For the reason given in ddp_worker.py.
    sys.stderr.flush()
    os._exit(0)

"""One process of a group: DDP and FSDP2 of a swapped network against one unswapped, with the whole batch.

With gloo on the CPU (ways/test_ways.py), and with NCCL on GPUs (ways/test_cuda_ways.py), where our kernels compute
whatever PyTorch's would be faster at.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tconv_swap import ConvTranspose2d, swap_layers


def outputs_of(size: int, backend: str, file: Path) -> list[str]:
    """Returns what each process of a group printed.

    Raises:
        AssertionError: one ended with an error.
    """
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(size), str(file), backend],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
    return outputs


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 3, 2, 1, 1, bias=False),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, 2),
    )


def stepped(model: nn.Module, batches: Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model


def main(rank: int, size: int, file: str, backend: str) -> None:
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size)
    batches = torch.randn(3, 2 * size, 8, 6, 5, generator=torch.Generator().manual_seed(1)).to(device)
    mine = batches[:, 2 * rank : 2 * rank + 2]
    original = network().to(device)
    reference = dict(stepped(copy.deepcopy(original), batches).named_parameters())
    swapped = swap_layers(original, backend="kernel" if device.type == "cuda" else None)
    assert sum(isinstance(module, ConvTranspose2d) for module in swapped.modules()) == 3

    replicated = copy.deepcopy(swapped)
    stepped(DistributedDataParallel(replicated, device_ids=None if backend == "gloo" else [rank]), mine)
    for name, parameter in replicated.named_parameters():
        torch.testing.assert_close(parameter, reference[name], rtol=1e-4, atol=1e-6)
    print(f"rank {rank} of {size}, {backend} on {device}: ddp: same", flush=True)

    mesh = init_device_mesh(device.type, (size,))
    sharded = copy.deepcopy(swapped)
    for module in (sharded[0], sharded):
        fully_shard(module, mesh=mesh)
    stepped(sharded, mine)
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), reference[name], rtol=1e-4, atol=1e-6)
    print(f"rank {rank} of {size}, {backend} on {device}: fsdp2: same", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
    # Everything is compared and the group is destroyed; ending the interpreter normally sometimes aborted in torch
    # ("terminate called without an active exception").
    sys.stderr.flush()
    os._exit(0)

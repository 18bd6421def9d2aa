"""Memory stays flat over iterations, and never grows with the square of the length. Worlds of one
and two; recompute off, selective (attention alone) and full (a block around it)."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_libra.executor.attention import libra_attention
from megatron_libra.executor.bind import bind
from megatron_libra.executor.inputs import pool_tensors, worker_tensors
from megatron_libra.plan.pool_plan import PoolPlan
from tests.helpers.cases import plan_of, pool
from tests.helpers.distributed import runtime_here, world

PLAN = plan_of(pool([[500], [100] * 5], 512, 1, (4, 2, 128), block_size=64, chunks=2))
ITERATIONS = 8
M_MMAP_THRESHOLD = -3


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def alive_bytes() -> int:
    """Bytes of all tensors that Python can reach; the least of half a second, because threads of
    gloo let go of what they moved some time after the call that waited for it."""
    return min(reachable_bytes() for _ in range(5))


def reachable_bytes() -> int:
    time.sleep(0.1)
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum(t.numel() * t.element_size() for t in tensors)


def map_large_blocks() -> None:
    """Give every block of 64 KiB and more its own pages, which a free returns to the system.

    Otherwise the growth of the C heap by fragmentation is measured as well (glibc before 2.38 does
    not reuse a freed aligned block for the same size).
    """
    assert ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1


def train(plan_bytes: bytes, recompute: str, mode: str) -> tuple[int, int, int]:
    """Growth of resident and of reachable memory over iterations, and one iteration's tensors."""
    plan = PoolPlan.from_bytes(plan_bytes)
    runtime = runtime_here(plan, dtype=torch.float32, backward_kv=mode)
    tensors = worker_tensors(plan, dist.get_rank(), pool_tensors(plan, 0, torch.float32))
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    sizes = []
    for iteration in range(ITERATIONS + 3):
        bound = bind(plan.worker_plan(dist.get_rank()), runtime)

        def layer(q, k, v, bound=bound):
            return libra_attention(q * 1.0, k, v, bound)

        out = (
            checkpoint(layer, q, k, v, use_reentrant=False)
            if recompute != "none"
            else layer(q, k, v)
        )
        if recompute == "full":
            out = checkpoint(layer, out, k, v, use_reentrant=True)
        out.backward(tensors["dout"])
        q.grad = k.grad = v.grad = None
        del out, bound, layer
        if iteration in (2, ITERATIONS + 2):
            sizes.append((resident_bytes(), alive_bytes()))
    return sizes[-1][0] - sizes[0][0], sizes[-1][1] - sizes[0][1], q.numel() * q.element_size()


RUNS = (("none", "save"), ("selective", "save"), ("full", "save"), ("full", "refetch"))


def train_all(plan_bytes: bytes) -> list[tuple[int, int, int]]:
    """Every run, one after the other in the same processes."""
    map_large_blocks()
    return [train(plan_bytes, recompute, mode) for recompute, mode in RUNS]


def test_memory_is_flat() -> None:
    """Keeping one tensor the size of Q in every iteration would be 4 times the limit."""
    for sizes in world(train_all, 2, PLAN.to_bytes()):
        for run, (resident, alive, query_bytes) in zip(RUNS, sizes, strict=True):
            assert alive == 0, run
            assert resident < 2 * query_bytes, run


def peak_of_long_sample(length: int) -> int:
    """Peak growth of resident memory by one forward and backward of one long sample."""
    plan = plan_of(pool([[length]], length, 1, (1, 1, 8), block_size=4096, chunks=1))
    runtime = runtime_here(plan, dtype=torch.float32)
    tensors = worker_tensors(plan, 0, pool_tensors(plan, 0, torch.float32))
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    bound = bind(plan.worker_plan(0), runtime)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    libra_attention(q, k, v, bound).backward(tensors["dout"])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_no_quadratic_buffer() -> None:
    """12,288 tokens: scores of all pairs would be 576 MiB; blocks need a small part of it."""
    length = 12_288
    (peak,) = world(peak_of_long_sample, 1, length)
    assert peak < length * length * 4 / 4

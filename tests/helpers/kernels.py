"""Rounds, rows and attention for tests of kernels. Out: what a kernel is called with, on a device,
and stand-ins for packages that compute with the reference kernel."""

from __future__ import annotations

import numpy as np
import torch

from megatron_libra.executor.kernels import BoundRound, bind_round
from megatron_libra.executor.kernels.reference import ReferenceKernel
from megatron_libra.plan.worker_plan import Round

__all__ = ["make_round", "packaged_backward", "packaged_forward", "strided_rows"]

Rows = torch.Tensor


def make_round(
    queries: list[int], keys: list[int], *, query_start: int = 0, key_start: int = 0
) -> Round:
    """A round of entries with these numbers of queries and keys."""
    cu_queries, cu_keys = (np.cumsum([0, *n]).astype(np.int32) for n in (queries, keys))
    return Round(
        query_start=query_start,
        query_stop=query_start + int(cu_queries[-1]),
        key_start=key_start,
        key_stop=key_start + int(cu_keys[-1]),
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        max_queries=max(queries),
        max_keys=max(keys),
    )


def strided_rows(
    count: int,
    heads: int,
    head_dim: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
) -> Rows:
    """(count, heads, head_dim) random rows, every second row of a buffer, as K and V arrive."""
    wide = torch.randn(
        count, 2, heads, head_dim, generator=generator, device=generator.device
    )  # same numbers for every dtype
    return wide.to(dtype)[:, 1]


def _reference(
    cu_queries: torch.Tensor, cu_keys: torch.Tensor
) -> tuple[ReferenceKernel, BoundRound]:
    kernel = ReferenceKernel()
    queries, keys = (cu.diff().tolist() for cu in (cu_queries, cu_keys))
    return kernel, bind_round(make_round(queries, keys), kernel)


def packaged_forward(
    q: Rows, k: Rows, v: Rows, cu_queries: torch.Tensor, cu_keys: torch.Tensor, scale: float
) -> tuple[Rows, torch.Tensor]:
    """What a package's forward returns: out, lse."""
    kernel, bound_round = _reference(cu_queries, cu_keys)
    return kernel.forward(q, k, v, bound_round, scale)


def packaged_backward(
    dout: Rows,
    qkv: tuple[Rows, Rows, Rows],
    results: tuple[Rows, torch.Tensor],
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    scale: float,
) -> tuple[Rows, Rows, Rows]:
    """What a package's backward computes: dq, dk, dv; results are out and lse."""
    kernel, bound_round = _reference(cu_queries, cu_keys)
    dq, dk, dv = kernel.backward(dout, *qkv, *results, bound_round, scale)
    return dq, dk.to(qkv[1].dtype), dv.to(qkv[2].dtype)

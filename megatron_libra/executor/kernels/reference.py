"""Causal varlen attention in plain torch: any dtype, CPU and CUDA; the exactness reference and the
CPU kernel.

In: rows of one round. Out: see `interface`. Queries are taken in blocks of at most QUERY_BLOCK
rows, so a call holds O(QUERY_BLOCK * keys) scores and never O(L^2). Neighbouring short samples
share a block under a block-diagonal mask. Half-precision inputs are computed and summed in float32.
Sums have a fixed order: same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_libra.executor.kernels.interface import BoundRound, written
from megatron_libra.plan.worker_plan import Round

__all__ = ["ReferenceKernel"]

QUERY_BLOCK = 256
MERGED_AREA = 2 * QUERY_BLOCK * QUERY_BLOCK
"""Most score elements per head for which samples are merged into one block."""


@dataclass(frozen=True, slots=True, eq=False)
class QueryBlock:
    """Query rows [start, stop) against key rows [key_start, key_stop); columns from mask_start on
    are masked."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    mask_start: int
    hidden: torch.Tensor
    """(stop - start, key_stop - mask_start) bool, True where a key is not visible."""

    @property
    def keys(self) -> slice:
        """The key rows that the block reads."""
        return slice(self.key_start, self.key_stop)


class ReferenceKernel:
    """See module docstring. Satisfies AttentionKernel."""

    name = "reference"
    deterministic = True

    def prepare(self, plan_round: Round, device: torch.device) -> tuple[QueryBlock, ...]:
        """Cut the round into query blocks with their masks."""
        first_key, last_key = _visible_keys(plan_round)
        return tuple(
            _query_block(start, stop, first_key, last_key, device)
            for start, stop in _block_ranges(plan_round)
        )

    def check_sizes(
        self, plan_round: Round, query_heads: int, kv_heads: int, head_dim: int
    ) -> None:
        """Torch's own kernels index with 64 bits: every size is fine."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bound_round: BoundRound,
        scale: float,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel.forward."""
        wide, groups = _wide_dtype(q.dtype), k.shape[1]
        k_GTD, v_GTD = _heads_first(k, wide), _heads_first(v, wide)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        lse = torch.empty(q.shape[1], q.shape[0], dtype=wide, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            for block in bound_round.prepared:
                scores = _scores(_grouped(q, block, groups, wide), k_GTD, block, scale)
                top = scores.amax(dim=-1, keepdim=True)
                weights = scores.sub_(top).exp_()
                total = weights.sum(dim=-1, keepdim=True)
                value = torch.matmul(weights, v_GTD[:, block.keys]).div_(total)
                out[block.start : block.stop] = _ungrouped(value, block)
                lse[:, block.start : block.stop] = top.add_(total.log_()).view(q.shape[1], -1)
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        bound_round: BoundRound,
        scale: float,
        *,
        dq: torch.Tensor | None = None,
        dk: torch.Tensor | None = None,
        dv: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See AttentionKernel.backward. dk and dv come in float32 (float64 for float64)."""
        wide, groups = _wide_dtype(q.dtype), k.shape[1]
        k_GTD, v_GTD = _heads_first(k, wide), _heads_first(v, wide)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if dq is None else dq
        dk_GTD, dv_GTD = torch.zeros_like(k_GTD), torch.zeros_like(v_GTD)
        with torch.autocast(q.device.type, enabled=False):
            for block in bound_round.prepared:
                keys = block.keys
                q_block = _grouped(q, block, groups, wide)
                dout_block = _grouped(dout, block, groups, wide)
                lse_block = lse[:, block.start : block.stop].reshape(groups, -1, 1)
                weights = _scores(q_block, k_GTD, block, scale).sub_(lse_block).exp_()
                dv_GTD[:, keys] += torch.matmul(weights.transpose(1, 2), dout_block)
                delta = (dout_block * _grouped(out, block, groups, wide)).sum(dim=-1, keepdim=True)
                dscores = torch.matmul(dout_block, v_GTD[:, keys].transpose(1, 2))
                dscores = dscores.sub_(delta).mul_(weights).mul_(scale)
                dk_GTD[:, keys] += torch.matmul(dscores.transpose(1, 2), q_block)
                dq[block.start : block.stop] = _ungrouped(
                    torch.matmul(dscores, k_GTD[:, keys]), block
                )
        dk_TGD, dv_TGD = dk_GTD.transpose(0, 1), dv_GTD.transpose(0, 1)
        return dq, written(dk_TGD, dk), written(dv_TGD, dv)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads_first(x_TGD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x_TGD.transpose(0, 1).to(dtype=dtype, memory_format=torch.contiguous_format)


def _grouped(
    x_TND: torch.Tensor, block: QueryBlock, groups: int, dtype: torch.dtype
) -> torch.Tensor:
    """(rows, N, D) -> (G, N/G * rows, D): the query heads of one kv head side by side, so K/V are
    not expanded."""
    rows = x_TND[block.start : block.stop].to(dtype)
    return rows.transpose(0, 1).reshape(groups, -1, x_TND.shape[-1])


def _ungrouped(x: torch.Tensor, block: QueryBlock) -> torch.Tensor:
    return x.view(-1, block.stop - block.start, x.shape[-1]).transpose(0, 1)


def _scores(
    q_block: torch.Tensor, k_GTD: torch.Tensor, block: QueryBlock, scale: float
) -> torch.Tensor:
    """Scaled, masked scores (G, N/G * rows, keys)."""
    k_block = k_GTD[:, block.keys]
    scores = torch.matmul(q_block, k_block.transpose(1, 2)).mul_(scale)
    by_head = scores.view(k_GTD.shape[0], -1, block.stop - block.start, k_block.shape[1])
    by_head[..., block.mask_start - block.key_start :].masked_fill_(block.hidden, -torch.inf)
    return scores


def _visible_keys(plan_round: Round) -> tuple[np.ndarray, np.ndarray]:
    """First and one-past-last visible key row of every query row: bottom-right aligned causal."""
    cu_queries = plan_round.cu_queries.astype(np.int64)
    cu_keys = plan_round.cu_keys.astype(np.int64)
    counts = np.diff(cu_queries)
    rows_left = np.repeat(cu_queries[1:], counts) - np.arange(counts.sum())
    return np.repeat(cu_keys[:-1], counts), np.repeat(cu_keys[1:], counts) - rows_left + 1


def _block_ranges(plan_round: Round) -> Iterator[tuple[int, int]]:
    """Query row ranges: a long entry is cut, short neighbours are merged while the masked area
    stays small."""
    cu_queries, cu_keys = plan_round.cu_queries.tolist(), plan_round.cu_keys.tolist()
    start = stop = key_start = 0
    for entry in range(len(cu_queries) - 1):
        entry_start, entry_stop = cu_queries[entry], cu_queries[entry + 1]
        if entry_start == entry_stop:
            continue
        if cu_keys[entry] == cu_keys[entry + 1]:  # nothing to attend to: not computed
            if stop > start:
                yield start, stop
            start = stop = entry_stop
            continue
        rows, area = entry_stop - start, (entry_stop - start) * (cu_keys[entry + 1] - key_start)
        if stop > start and (rows > QUERY_BLOCK or area > MERGED_AREA):
            yield start, stop
            start = stop
        if stop == start:
            key_start = cu_keys[entry]
        while entry_stop - start > QUERY_BLOCK:
            yield start, start + QUERY_BLOCK
            start += QUERY_BLOCK
        stop = entry_stop
    if stop > start:
        yield start, stop


def _query_block(
    start: int, stop: int, first_key: np.ndarray, last_key: np.ndarray, device: torch.device
) -> QueryBlock:
    key_start, key_stop = int(first_key[start]), int(last_key[stop - 1])
    one_sample = key_start == first_key[stop - 1]
    mask_start = int(last_key[start]) if one_sample else key_start
    columns = np.arange(mask_start, key_stop)
    hidden = columns >= last_key[start:stop, None]
    hidden |= columns < first_key[start:stop, None]
    return QueryBlock(
        start, stop, key_start, key_stop, mask_start, torch.from_numpy(hidden).to(device)
    )

"""Forward of one attention layer on one worker. In: home Q, K, V. Out: home O, and what backward
needs.

Shapes: T local tokens, N query heads, G kv heads, D head dim; rows are one token x one head shard
(x one chunk).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_libra.executor.bind import BoundPlan
from megatron_libra.executor.pipeliner import run_chunks
from megatron_libra.executor.transfers import PendingRows, start_chunk, start_return

__all__ = [
    "ComputedChunk",
    "ForwardResult",
    "kv_rows",
    "query_rows",
    "returned_buffer",
    "run_forward",
]


@dataclass(frozen=True, slots=True, eq=False)
class ComputedChunk:
    """What a worker computed for one head chunk."""

    q: torch.Tensor
    """(query rows, N / (H M), D), as received."""
    kv: torch.Tensor
    """(kv rows, 2, heads, D), as received; chunks that share kv heads share it."""
    out: torch.Tensor
    """(query rows, N / (H M), D)."""
    lse: tuple[torch.Tensor, ...]
    """For each round, (N / (H M), queries of the round)."""


@dataclass(slots=True, eq=False)
class ForwardResult:
    """Output of one layer."""

    out: torch.Tensor | None = None
    """(T, N, D) at home."""
    chunks: list[ComputedChunk] = field(default_factory=list)
    """By chunk; empty unless asked for."""


def query_rows(x_TND: torch.Tensor, bound: BoundPlan) -> torch.Tensor:
    """(T, N, D) -> (T * H * M, width): row (token * H + shard) * M + chunk."""
    shards = bound.heads.head_split * bound.heads.chunks
    return x_TND.contiguous().view(
        x_TND.shape[0] * shards, x_TND.shape[1] // shards * x_TND.shape[2]
    )


def kv_rows(k_TGD: torch.Tensor, v_TGD: torch.Tensor, bound: BoundPlan) -> torch.Tensor:
    """K and V of one token side by side, so that they travel together: (T * K * U, 2 * width)."""
    parts = bound.heads.kv_shards * bound.heads.kv_pieces
    rows = (k_TGD.shape[0] * parts, k_TGD.shape[1] // parts * k_TGD.shape[2])
    return torch.cat([k_TGD.reshape(rows), v_TGD.reshape(rows)], dim=1)


def returned_buffer(like: torch.Tensor, num_chunks: int, num_sent: int) -> torch.Tensor:
    """(num_chunks * num_sent + 1, width) rows that come home, chunk-major; the last is zero, for
    padding tokens."""
    returned = like.new_empty(num_chunks * num_sent + 1, like.shape[1])
    returned[-1].zero_()
    return returned


def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: BoundPlan, scale: float, *, keep: bool
) -> ForwardResult:
    """Compute the attention of this worker's tokens. Collective: every worker of the pool, in layer
    order.

    Args:
        q: (T, N, D), k and v (T, G, D), same dtype; need not be contiguous.
        keep: return what was received and computed, for backward.
    """
    layer = _Forward(q, k, v, bound, scale, keep)
    run_chunks(bound.heads.chunks, layer)
    layer.result.out = layer.returned.index_select(0, bound.query_rows_at_home).view(q.shape)
    return layer.result


class _Forward:
    """State of one forward; its three methods are the stages of the pipeliner."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bound: BoundPlan,
        scale: float,
        keep: bool,
    ) -> None:
        self.bound, self.scale, self.keep = bound, scale, keep
        self.q_rows, self.kv_rows = query_rows(q, bound), kv_rows(k, v, bound)
        self.returned = returned_buffer(self.q_rows, bound.heads.chunks, bound.query.num_sent)
        self.resident = self.kv_rows
        self.result = ForwardResult()

    def dispatch(self, chunk: int) -> list[PendingRows]:
        return start_chunk(self.q_rows, self.kv_rows, self.bound, chunk)

    def compute(self, chunk: int, arrived: list[torch.Tensor]) -> torch.Tensor:
        heads, head_dim = self.bound.heads, self.bound.plan.shape.head_dim
        q = arrived[0].view(-1, heads.query_heads_per_chunk, head_dim)
        if len(arrived) > 1:
            self.resident = arrived[1].view(-1, 2, heads.kv_heads_per_chunk, head_dim)
        k, v = self.resident.unbind(1)
        kernel, outs, lses = self.bound.runtime.kernel, [], []
        for r in self.bound.rounds:
            out, lse = kernel.forward(q[r.queries], k[r.keys], v[r.keys], r, self.scale)
            outs.append(out)
            lses.append(lse)
        out = outs[0] if len(outs) == 1 else torch.cat([q[:0], *outs])
        if self.keep:
            self.result.chunks.append(ComputedChunk(q, self.resident, out, tuple(lses)))
        return out

    def send_home(self, chunk: int, out: torch.Tensor) -> list[PendingRows]:
        bound, num_sent = self.bound, self.bound.query.num_sent
        home = self.returned[chunk * num_sent : (chunk + 1) * num_sent]
        return [start_return(out.flatten(1), bound.query, home, bound.runtime.return_)]

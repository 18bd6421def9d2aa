"""Move the rows of one chunk along a route: pack, exchange, put in order. The same code for all
eight transfers.

In: home or compute rows (N, width). Out: rows in compute order (dispatch) or travel order (return).

    | tensor    | route | direction                                       |
    | Q, dO     | query | start_dispatch                                  |
    | O, dQ     | query | start_return, then one gather at the home       |
    | K, V      | kv    | start_dispatch, K and V of a token are one row  |
    | dK, dV    | kv    | start_return, then summed at the home           |
"""

from __future__ import annotations

import torch

from megatron_libra.executor.bind import BoundPlan, BoundRoute, HomeSum, PackIndex
from megatron_libra.executor.transport import PendingExchange, RowSplits, Transport

__all__ = ["PendingRows", "start_chunk", "start_dispatch", "start_return", "sum_at_home"]


class PendingRows:
    """Rows on their way; wait() returns them in the order in which they are used."""

    def __init__(
        self, exchange: PendingExchange, staged: torch.Tensor, arrange: torch.Tensor | None
    ) -> None:
        self._exchange = exchange
        self._staged: torch.Tensor | None = staged
        self._arrange = arrange

    def wait(self) -> torch.Tensor:
        """Wait for the exchange (CUDA: only the stream waits) and return the rows. Called once."""
        self._exchange.wait()
        staged, self._staged = self._staged, None
        assert staged is not None
        return staged if self._arrange is None else staged.index_select(0, self._arrange)


def start_dispatch(
    home_rows: torch.Tensor, route: BoundRoute, chunk: int, transport: Transport
) -> PendingRows:
    """Send one chunk's home rows to the workers that compute them. Collective: every worker, in
    chunk order.

    Args:
        home_rows: (T * shards * chunks, width), contiguous; all chunks.
        chunk: head chunk (query route) or kv piece (kv route).
    """
    staged = home_rows.new_empty(route.num_rows, home_rows.shape[1])
    exchange = _start(home_rows, route.dispatch[chunk], route.splits, staged, transport)
    return PendingRows(exchange, staged, route.arrange)


def start_chunk(
    query_rows: torch.Tensor, kv_rows: torch.Tensor, bound: BoundPlan, chunk: int
) -> list[PendingRows]:
    """Dispatch a chunk's query rows and, if no earlier chunk brought them, its K/V rows.
    Collective."""
    transport = bound.runtime.dispatch
    pending = [start_dispatch(query_rows, bound.query, chunk, transport)]
    if bound.brings_kv(chunk):
        piece = bound.heads.kv_piece_of(chunk)
        pending.append(start_dispatch(kv_rows, bound.kv, piece, transport))
    return pending


def start_return(
    computed_rows: torch.Tensor,
    route: BoundRoute,
    returned_rows: torch.Tensor,
    transport: Transport,
) -> PendingRows:
    """Send one chunk's results home. Collective: every worker, in chunk order.

    Args:
        computed_rows: (num_rows, width), contiguous, in compute order.
        returned_rows: (num_sent, width), this chunk's part of the home's buffer; written in travel
            order.
    """
    exchange = _start(computed_rows, route.depart, route.splits.inverse(), returned_rows, transport)
    return PendingRows(exchange, returned_rows, None)


def sum_at_home(
    returned_rows: torch.Tensor, home_sum: HomeSum
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the contributions to dK and dV of every home token, in float32 (float64 for float64), in
    a fixed order.

    Args:
        returned_rows: (U * num_sent + 1, 2 * width), dK and dV side by side; the last row is zero.

    Returns:
        dk, dv rows (T * K * U, width) in the dtype of returned_rows; exactly zero where nothing
        came back.
    """
    rows = returned_rows
    if home_sum.passes:
        first, *later = home_sum.passes
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        total = rows.index_select(0, first).to(wide)
        for contributions in later:
            total[: len(contributions)] += rows.index_select(0, contributions)
        rows = torch.cat([total.to(rows.dtype), rows[-1:]])
    halves = rows.view(-1, rows.shape[1] // 2)
    return halves.index_select(0, home_sum.key_rows), halves.index_select(0, home_sum.value_rows)


def _start(
    rows: torch.Tensor,
    pack: PackIndex | None,
    splits: RowSplits,
    staged: torch.Tensor,
    transport: Transport,
) -> PendingExchange:
    """Pack rows in travel order; remote ones into a send buffer, local ones straight to where they
    arrive."""
    received, local = staged[: splits.num_received], staged[splits.num_received :]
    if pack is None:
        sent = rows[: splits.num_sent]
        local.copy_(rows[splits.num_sent :])
    else:
        sent = rows.index_select(0, pack.remote)
        torch.index_select(rows, 0, pack.local, out=local)
    return transport.start(received, sent, splits)

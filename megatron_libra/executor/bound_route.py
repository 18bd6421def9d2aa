"""One route on the device: which rows to pack, where they stand in a mailbox, how they are summed.

In: row numbers of one chunk, from `route_index`. Out: index tensors over all chunks of a mailbox.
Mailboxes and travel order are those of `transport.interface`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_libra.executor.route_index import NOWHERE
from megatron_libra.executor.transport import MailboxRequest, RowTraffic

__all__ = ["BoundRoute", "HomeSum", "bind_route", "bind_sum"]


@dataclass(frozen=True, slots=True, eq=False)
class BoundRoute:
    """Forward: pack, exchange, arrange. The way back: depart, exchange, gather at the home."""

    traffic: RowTraffic
    """Of the way from the homes to the workers that compute."""
    chunks: int
    """M of the query route, U of the kv route."""
    pack: torch.Tensor
    """(chunks, num_own) int32 home rows of each chunk in travel order."""
    arrange: torch.Tensor
    """(chunks, num_rows) int32 rows of the dispatch's mailbox in compute order."""
    depart: torch.Tensor
    """(num_rows,) int32 compute rows in travel order."""

    @property
    def num_rows(self) -> int:
        """Rows of one chunk that this worker computes with."""
        return len(self.depart)

    def dispatch_request(self, width: int, dtype: torch.dtype) -> MailboxRequest:
        """The mailbox of rows on their way to the workers that compute."""
        return MailboxRequest(self.traffic, self.chunks, width, dtype)

    def return_request(self, width: int, dtype: torch.dtype) -> MailboxRequest:
        """The mailbox of rows on their way home."""
        return MailboxRequest(self.traffic.inverse, self.chunks, width, dtype)

    def rows_at_home(self, position: torch.Tensor) -> torch.Tensor:
        """(n, chunks) int32 rows of the return's mailbox at travel positions (n,); its last row,
        which is zero, for NOWHERE."""
        rows = _mailbox_rows(position, self.traffic.inverse, self.chunks)
        zero_row = self.chunks * (self.traffic.num_sent + self.num_rows)
        return rows.masked_fill(position == NOWHERE, zero_row).t()


@dataclass(frozen=True, slots=True, eq=False)
class HomeSum:
    """How dK and dV are summed at the home. Rows are ranked by falling number of contributions."""

    passes: tuple[torch.Tensor, ...]
    """passes[j]: mailbox rows that are the j-th contributions, for the first ranks; empty if one
    is the most."""
    key_rows: torch.Tensor
    """(T * K * U,) half rows of dK in the sum (or in the mailbox if there are no passes)."""
    value_rows: torch.Tensor
    """(T * K * U,) half rows of dV."""


def bind_route(rows: list[torch.Tensor], traffic: RowTraffic, chunks: int) -> BoundRoute:
    """Expand sent, arrange and depart rows of one chunk to all chunks of a route."""
    sent, arrange, depart = rows
    chunk = torch.arange(chunks, dtype=torch.int32, device=sent.device)[:, None]
    return BoundRoute(
        traffic=traffic,
        chunks=chunks,
        pack=sent * chunks + chunk,
        arrange=_mailbox_rows(arrange, traffic, chunks),
        depart=depart,
    )


def bind_sum(passes: list[torch.Tensor], rank: torch.Tensor, route: BoundRoute) -> HomeSum:
    """Without passes, rank is a travel position. A row holds dK and dV: two half rows."""
    if passes:
        chunk = torch.arange(route.chunks, dtype=torch.int32, device=rank.device)
        rows = rank[:, None] * route.chunks + chunk
        rows = rows.masked_fill(rank[:, None] == NOWHERE, len(passes[0]) * route.chunks)
    else:
        rows = route.rows_at_home(rank)
    rows = rows.flatten()
    return HomeSum(
        passes=tuple(route.rows_at_home(p).flatten() for p in passes),
        key_rows=2 * rows,
        value_rows=2 * rows + 1,
    )


def _mailbox_rows(position: torch.Tensor, traffic: RowTraffic, chunks: int) -> torch.Tensor:
    """(chunks, n) rows of a mailbox: what arrived from others stands in its received part, what
    stayed behind the leaving rows of its own part."""
    chunk = torch.arange(chunks, dtype=torch.int32, device=position.device)[:, None]
    received = traffic.num_received
    arrived = position + chunk * received
    stayed = position + chunk * traffic.num_own + ((chunks - 1) * received + traffic.num_sent)
    return torch.where(position < received, arrived, stayed)

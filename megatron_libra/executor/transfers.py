"""Move the rows of a layer along its routes: pack, exchange, put in order. The same code for all
eight transfers.

In: home tensors or compute rows. Out: rows in compute order (dispatch), or the mailboxes from which
the home gathers (return). Tensors that travel together are one row: each home row is read where it
is and written where it leaves.

    | tensor    | route | direction                                        |
    | Q, dO     | query | Dispatch; with O where all three are sent again  |
    | O, dQ     | query | Return, then one gather at the home              |
    | K, V      | kv    | Dispatch, K and V of a token are one row         |
    | dK, dV    | kv    | Return as one row, then summed at the home       |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_libra.executor.bound_plan import BoundPlan
from megatron_libra.executor.bound_route import BoundRoute
from megatron_libra.executor.row_moves import RowPart, gather_columns, gather_sums, home_rows
from megatron_libra.executor.transport import ChunkOf, Mailbox, Pending

__all__ = ["Dispatch", "Return"]


class Dispatch:
    """Rows of all steps on their way to the workers that compute them."""

    def __init__(
        self,
        bound: BoundPlan,
        queries: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor] = (),
    ) -> None:
        """Start every step, in order. Collective: every worker of the pool.

        Args:
            queries: (T, N, D) each: Q, dO, or what else travels with the queries.
            keys: (T, G, D) each: K and V; none if they need not travel.
        """
        self._bound, self._transport = bound, bound.runtime.dispatch
        heads = bound.heads
        homes = [[home_rows(x, heads.head_split * heads.chunks) for x in queries]]
        if keys:
            homes.append([home_rows(x, heads.kv_shards * heads.kv_pieces) for x in keys])
        routes = [bound.query, bound.kv][: len(homes)]
        requests = [
            route.dispatch_request(sum(rows.shape[1] for rows in home), home[0].dtype)
            for route, home in zip(routes, homes, strict=True)
        ]
        self._mailboxes = self._transport.open(requests, queries[0].device)
        self._pending: list[Pending] = []
        # the first step leaves before the others are packed
        for first, last in ((0, 1), (1, len(bound.steps))):
            for mailbox, home, route in zip(self._mailboxes, homes, routes, strict=True):
                stop = len(route.segments) if first else 1
                _pack(home, route, mailbox, first, stop)
            self._pending += [self._transport.start(self._parts(s)) for s in range(first, last)]

    def arrived(self, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Wait for a step (CUDA: only the stream waits); its query rows and, if no earlier step
        brought them, its K/V rows, in compute order. Called once for each step, in order."""
        self._pending[step].wait()
        rows = [
            mailbox.rows.index_select(0, route.arrange[segment])
            for (mailbox, segment), route in zip(
                self._parts(step), (self._bound.query, self._bound.kv), strict=False
            )
        ]
        if step + 1 == len(self._bound.steps):
            self._transport.close(self._mailboxes)
            self._mailboxes = ()  # what is computed from here on may have their memory
        return rows[0], rows[1] if len(rows) > 1 else None

    def _parts(self, step: int) -> list[ChunkOf]:
        parts = [(self._mailboxes[0], step)]
        if len(self._mailboxes) > 1 and self._bound.steps[step].brings_kv:
            parts.append((self._mailboxes[1], self._bound.steps[step].kv_segment))
        return parts


class Return:
    """Rows of all steps on their way home."""

    def __init__(
        self, bound: BoundPlan, dtype: torch.dtype, *, query_width: int, kv_width: int | None = None
    ) -> None:
        """Open the mailboxes. Collective: every worker of the pool.

        Args:
            query_width: elements of a row of O or dQ of one chunk.
            kv_width: elements of a row of dK and dV of one kv piece; None if none come back.
        """
        self._bound, self._transport = bound, bound.runtime.return_
        requests = [bound.query.return_request(query_width, dtype)]
        if kv_width is not None:
            requests.append(bound.kv.return_request(kv_width, dtype))
        self._mailboxes = self._transport.open(requests, bound.runtime.device)
        self._pending: list[Pending] = []

    def send(
        self, step: int, query_rows: torch.Tensor, kv_sums: Sequence[RowPart] | None = None
    ) -> None:
        """Start one step's way home. Collective: every worker, in the order of the steps.

        Args:
            query_rows: (num_rows, query_width) in compute order.
            kv_sums: dK and dV of the step's kv piece, (num_rows, kv_width / 2) each, as parts to
                add, if no later step adds to them.
        """
        parts = [(self._mailboxes[0], step)]
        gather_columns([query_rows], *_leaving(self._bound.query, parts[0]))
        if kv_sums is not None:
            parts.append((self._mailboxes[1], self._bound.steps[step].kv_segment))
            gather_sums(kv_sums, *_leaving(self._bound.kv, parts[1]))
        self._pending.append(self._transport.start(parts))

    def wait(self) -> list[torch.Tensor]:
        """Rows of the mailboxes, when everything is home; the last row of each is zero. They must
        be read before close()."""
        for pending in self._pending:
            pending.wait()
        for mailbox in self._mailboxes:
            mailbox.rows[-1].zero_()
        return [mailbox.rows for mailbox in self._mailboxes]

    def close(self) -> None:
        """The home has gathered what it needs."""
        self._transport.close(self._mailboxes)


def _pack(
    home: Sequence[torch.Tensor], route: BoundRoute, mailbox: Mailbox, first: int, last: int
) -> None:
    """Rows of segments [first, last) from the home to where they leave or stay."""
    index = route.pack[route.pack_places[first] : route.pack_places[last]]
    gather_columns(home, index, mailbox.own(first, last))


def _leaving(route: BoundRoute, segment: ChunkOf) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute rows of a segment in travel order, and where they leave or stay."""
    mailbox, number = segment
    return route.depart(number), mailbox.own(number, number + 1)

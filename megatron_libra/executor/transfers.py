"""Move the rows of a layer along its routes: pack, exchange, put in order. The same code for all
eight transfers.

In: home or compute rows (N, width). Out: rows in compute order (dispatch), or the mailboxes from
which the home gathers (return).

    | tensor    | route | direction                                        |
    | Q, dO     | query | Dispatch                                         |
    | O, dQ     | query | Return, then one gather at the home              |
    | K, V      | kv    | Dispatch, K and V of a token are one row         |
    | dK, dV    | kv    | Return, then summed at the home                  |
"""

from __future__ import annotations

import torch

from megatron_libra.executor.bound_plan import BoundPlan
from megatron_libra.executor.bound_route import BoundRoute, HomeSum
from megatron_libra.executor.computed import wide_dtype
from megatron_libra.executor.transport import ChunkOf, Mailbox, Pending

__all__ = ["Dispatch", "Return", "add_at_home"]


class Dispatch:
    """Rows of all steps on their way to the workers that compute them."""

    def __init__(
        self, bound: BoundPlan, query_rows: torch.Tensor, kv_rows: torch.Tensor | None = None
    ) -> None:
        """Start every step, in order. Collective: every worker of the pool.

        Args:
            query_rows: (T * H * M, width), contiguous, all chunks.
            kv_rows: (n * K * U, width) of the tokens in bound.kv_tokens, or None if K and V need
                not travel.
        """
        self._bound, self._transport = bound, bound.runtime.dispatch
        routes = [bound.query] if kv_rows is None else [bound.query, bound.kv]
        homes = [query_rows] if kv_rows is None else [query_rows, kv_rows]
        requests = [
            route.dispatch_request(rows.shape[1], rows.dtype)
            for route, rows in zip(routes, homes, strict=True)
        ]
        self._mailboxes = self._transport.open(requests, query_rows.device)
        self._pending: list[Pending] = []
        # the first step leaves before the others are packed
        for first, last in ((0, 1), (1, len(bound.steps))):
            for mailbox, rows, route in zip(self._mailboxes, homes, routes, strict=True):
                stop = len(route.segments) if first else 1
                _pack(rows, route, mailbox, first, stop)
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
        self, step: int, query_rows: torch.Tensor, kv_rows: torch.Tensor | None = None
    ) -> None:
        """Start one step's way home. Collective: every worker, in the order of the steps.

        Args:
            query_rows: (num_rows, query_width) in compute order.
            kv_rows: (num_rows, kv_width) of the step's kv piece, if no later step adds to it.
        """
        parts = [(self._mailboxes[0], step)]
        _depart(query_rows, self._bound.query, parts[0])
        if kv_rows is not None:
            parts.append((self._mailboxes[1], self._bound.steps[step].kv_segment))
            _depart(kv_rows, self._bound.kv, parts[1])
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


def add_at_home(
    dk: torch.Tensor, dv: torch.Tensor, mailbox_rows: torch.Tensor, home_sum: HomeSum
) -> None:
    """Add what came back to dK and dV at the home, in float32 (float64 for float64) and in a fixed
    order.

    Args:
        dk, dv: (T, G, D), contiguous; changed.
        mailbox_rows: (rows, 2 * width), dK and dV side by side; width: elements of a kv piece.
    """
    if not len(home_sum.rows):
        return
    width = mailbox_rows.shape[1] // 2
    homes = [x.view(x.numel() // width, width) for x in (dk, dv)]
    total = dk.new_empty(len(home_sum.rows), 2 * width, dtype=wide_dtype(dk.dtype))
    for half, home in zip(total.split(width, dim=1), homes, strict=True):
        half.copy_(home.index_select(0, home_sum.rows))
    for contributions in home_sum.passes:
        total[: len(contributions)] += mailbox_rows.index_select(0, contributions)
    for half, home in zip(total.split(width, dim=1), homes, strict=True):
        home.index_copy_(0, home_sum.rows, half.to(home.dtype))


def _pack(
    home_rows: torch.Tensor, route: BoundRoute, mailbox: Mailbox, first: int, last: int
) -> None:
    """Rows of segments [first, last) from the home to where they leave or stay."""
    rows = route.pack[route.pack_places[first] : route.pack_places[last]]
    if len(rows):
        torch.index_select(home_rows, 0, rows, out=mailbox.own(first, last))


def _depart(computed_rows: torch.Tensor, route: BoundRoute, segment: ChunkOf) -> None:
    """One segment's results to where they leave or stay."""
    mailbox, number = segment
    if len(computed_rows):
        torch.index_select(
            computed_rows, 0, route.depart(number), out=mailbox.own(number, number + 1)
        )

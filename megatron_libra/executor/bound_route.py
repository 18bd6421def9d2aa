"""One route on the device: which rows to pack, where they stand in a mailbox, how they are summed.

In: row numbers of the near and the far part, from `route_index`. Out: index tensors. A mailbox has
one segment for each (part, chunk) in the order in which they leave; segments, travel order and
mailboxes are those of `transport.interface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_libra.executor.transport import MailboxPlaces, MailboxRequest, RowTraffic

__all__ = ["BoundRoute", "HomeSum", "PartRows", "bind_route", "bind_sum"]

Segment = tuple[int, int]
"""Part, and chunk (query route) or kv piece (kv route)."""


@dataclass(frozen=True, slots=True, eq=False)
class PartRows:
    """Row numbers of one part, int32, the same for all of its chunks."""

    traffic: RowTraffic
    """Of one chunk, from the homes to the workers that compute."""
    sent: torch.Tensor
    """(num_own,) home rows in travel order."""
    arrange: torch.Tensor
    """(num_rows,) travel position of every compute row."""
    depart: torch.Tensor
    """(num_rows,) compute rows in travel order."""


@dataclass(frozen=True, eq=False)
class BoundRoute:
    """Forward: pack, exchange, arrange. The way back: depart, exchange, gather at the home."""

    parts: tuple[PartRows, ...]
    segments: tuple[Segment, ...]
    chunks: int
    """M of the query route, U of the kv route."""
    pack: torch.Tensor
    """Home rows of all segments in travel order."""
    arrange: tuple[torch.Tensor, ...]
    """By segment: rows of the dispatch's mailbox in compute order."""

    @cached_property
    def traffics(self) -> tuple[RowTraffic, ...]:
        """By segment."""
        return tuple(self.parts[part].traffic for part, _ in self.segments)

    @cached_property
    def inverse_traffics(self) -> tuple[RowTraffic, ...]:
        """By segment, on the way home."""
        return tuple(traffic.inverse for traffic in self.traffics)

    @cached_property
    def pack_places(self) -> tuple[int, ...]:
        """(segments + 1,) where the rows of each segment begin in `pack`."""
        own = MailboxPlaces.of(self.traffics).own
        return tuple(start - own[0] for start in own)

    def depart(self, segment: int) -> torch.Tensor:
        """(num_rows,) compute rows of a segment in travel order."""
        return self.parts[self.segments[segment][0]].depart

    def dispatch_request(self, width: int, dtype: torch.dtype) -> MailboxRequest:
        """The mailbox of rows on their way to the workers that compute."""
        return MailboxRequest(self.traffics, width, dtype)

    def return_request(self, width: int, dtype: torch.dtype) -> MailboxRequest:
        """The mailbox of rows on their way home."""
        return MailboxRequest(self.inverse_traffics, width, dtype)

    def rows_at_home(self, position: torch.Tensor) -> torch.Tensor:
        """(n, chunks) int32 rows of the return's mailbox; its last row, which is zero, for NOWHERE.

        Args:
            position: (n,) place among the sent rows of the near part and then the far one.
        """
        places = MailboxPlaces.of(self.inverse_traffics)
        rows = position.new_full((len(position), self.chunks), places.own[-1])
        num_near = len(self.parts[0].sent)
        is_near, is_far = (position >= 0) & (position < num_near), position >= num_near
        for number, (part, chunk) in enumerate(self.segments):
            found = _mailbox_rows(
                position - part * num_near, self.inverse_traffics[number], places, number
            )
            rows[:, chunk] = torch.where(is_far if part else is_near, found, rows[:, chunk])
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class HomeSum:
    """How returned dK and dV are added at the home, row by row of token, kv shard and piece."""

    rows: torch.Tensor
    """(n,) int64 home rows that get something back, by falling number of contributions."""
    contributions: torch.Tensor
    """int32 mailbox rows: those that are the first contributions to rows, in their order, then the
    second ones to the first rows, and so on."""
    pass_starts: torch.Tensor
    """(passes + 2,) int32 where the first, second ... contributions begin, and twice their number:
    a pass without rows is the last."""
    pass_sizes: tuple[int, ...]
    """The same on the host: how many rows get a first, second ... contribution."""

    @property
    def passes(self) -> tuple[torch.Tensor, ...]:
        """passes[j]: mailbox rows that are the j-th contributions to the first rows."""
        return self.contributions.split(self.pass_sizes)


def bind_route(parts: Sequence[PartRows], segments: Sequence[Segment], chunks: int) -> BoundRoute:
    """Expand the rows of one chunk to all segments of a route."""
    traffics = [parts[part].traffic for part, _ in segments]
    places = MailboxPlaces.of(traffics)
    pack = [parts[part].sent * chunks + chunk for part, chunk in segments]
    return BoundRoute(
        parts=tuple(parts),
        segments=tuple(segments),
        chunks=chunks,
        pack=torch.cat(pack) if pack else parts[0].sent,
        arrange=tuple(
            _mailbox_rows(parts[part].arrange, traffics[number], places, number)
            for number, (part, _) in enumerate(segments)
        ),
    )


def bind_sum(
    rows: torch.Tensor,
    contributions: torch.Tensor,
    pass_starts: torch.Tensor,
    pass_sizes: Sequence[int],
    route: BoundRoute,
) -> HomeSum:
    """Expand the rows and contributions of one kv piece to all pieces.

    Args:
        rows: home rows of token and kv shard.
        contributions: positions as in rows_at_home.
        pass_starts, pass_sizes: of all pieces, see HomeSum.
    """
    chunk = torch.arange(route.chunks, device=rows.device)
    return HomeSum(
        rows=(rows.long()[:, None] * route.chunks + chunk).flatten(),
        contributions=route.rows_at_home(contributions).flatten(),
        pass_starts=pass_starts,
        pass_sizes=tuple(pass_sizes),
    )


def _mailbox_rows(
    position: torch.Tensor, traffic: RowTraffic, places: MailboxPlaces, segment: int
) -> torch.Tensor:
    """(n,) rows of a mailbox: what arrived from others stands in its received part, what stayed
    behind the leaving rows of its own part."""
    arrived = position + places.received[segment]
    stayed = position + (places.own[segment] + traffic.num_sent - traffic.num_received)
    return torch.where(position < traffic.num_received, arrived, stayed)

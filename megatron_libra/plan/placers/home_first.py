"""Start every tile at its home and shed what exceeds the load target.

In: problem. Out: worker per tile.

Beyond the paper: Algorithm 2 starts from nothing and so moves tiles that were fine where they were.
Here the most loaded worker gives tiles away, cheapest added bytes per pair first, to workers that
stay at or below C. When nothing fits below C (coarse tiles), the move, or else the swap with a
lightly loaded worker, that lowers the larger of the two loads most is made, until neither helps.
Ties: tile id, worker id.

Example, two workers, tau = 0, tiles of pairs 5, 3, 2 at home on worker 0: C = 5. Worker 0 sheds
tiles until its load is 5; worker 1, empty, takes them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.placers.problem import PlacementProblem, ResidentKV

__all__ = ["place"]

Int64 = NDArray[np.int64]
SWAP_RECEIVERS = 8
"""Least loaded workers that a swap looks at."""


def place(problem: PlacementProblem) -> Int64:
    """(T,) the worker of each tile."""
    shedding = _Shedding(problem)
    while (donor := shedding.next_donor()) is not None:
        shedding.relieve(donor)
    return shedding.worker


class _Shedding:
    """Loads, residency and tile owners while tiles leave overloaded workers."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.pairs = problem.tile_pairs
        self.home = problem.tile_home
        self.query_bytes = np.repeat(problem.query_bytes, problem.heads.head_split)
        self.worker = self.home.copy()
        self.load = np.zeros(problem.num_workers, np.int64)
        np.add.at(self.load, self.home, self.pairs)
        self.resident = ResidentKV(problem)
        for tile, home in enumerate(self.home.tolist()):
            self.resident.place(tile, home)
        self.stuck = np.zeros(problem.num_workers, np.bool_)

    def next_donor(self) -> int | None:
        """The most loaded worker above C that can still give something away."""
        load = np.where(self.stuck, -1, self.load)
        donor = int(load.argmax())
        return donor if load[donor] > self.problem.load_target else None

    def relieve(self, donor: int) -> None:
        """Shed the donor's tiles until it is at or below C, or nothing helps."""
        tiles = np.flatnonzero((self.worker == donor) & (self.pairs > 0))
        added = self._added_bytes(tiles)
        while self.load[donor] > self.problem.load_target:
            move = self._cheapest(tiles, added) or self._most_levelling(tiles, donor)
            if move is None:
                self.stuck[donor] = not self._swap(tiles, donor)
                return
            row, receiver = move
            self._move(int(tiles[row]), donor, receiver)
            tiles, added = np.delete(tiles, row), np.delete(added, row, axis=0)
            keys = self.resident.added_keys_of(tiles, receiver)
            added[:, receiver] = self._bytes(tiles, keys, receiver)

    def _added_bytes(self, tiles: Int64) -> Int64:
        """(n, W) bytes that moving each tile to each worker adds."""
        keys = [self.resident.added_keys(tile) for tile in tiles.tolist()]
        added = np.array(keys, np.int64).reshape(len(tiles), -1) * self.problem.kv_token_bytes
        added += self.query_bytes[tiles, None]
        added[np.arange(len(tiles)), self.home[tiles]] -= self.query_bytes[tiles]
        return added

    def _bytes(self, tiles: Int64, keys: Int64, worker: int) -> Int64:
        """(n,) bytes that moving each tile to one worker adds."""
        away = self.home[tiles] != worker
        added: Int64 = keys * self.problem.kv_token_bytes + away * self.query_bytes[tiles]
        return added

    def _cheapest(self, tiles: Int64, added: Int64) -> tuple[int, int] | None:
        """(row, receiver) of the fewest added bytes per pair among moves that keep the receiver at
        C.
        """
        pairs = self.pairs[tiles, None]
        fits = self.load + pairs <= self.problem.load_target
        if not fits.any():
            return None
        price = np.where(fits, added / pairs, np.inf)
        row, receiver = divmod(int(price.argmin()), self.problem.num_workers)
        return row, receiver

    def _most_levelling(self, tiles: Int64, donor: int) -> tuple[int, int] | None:
        """(row, receiver) of the move that leaves the smallest larger load, if it is an
        improvement.
        """
        if not len(tiles):
            return None
        receiver = int(self.load.argmin())
        larger = np.maximum(
            self.load[donor] - self.pairs[tiles], self.load[receiver] + self.pairs[tiles]
        )
        row = int(larger.argmin())
        return (row, receiver) if larger[row] < self.load[donor] else None

    def _swap(self, tiles: Int64, donor: int) -> bool:
        """Trade one of the donor's tiles for a lighter one so that the larger load falls most;
        False: none does.
        """
        best = int(self.load[donor])
        trade: tuple[int, int, int] | None = None
        for receiver in np.argsort(self.load, kind="stable")[:SWAP_RECEIVERS].tolist():
            theirs = np.flatnonzero((self.worker == receiver) & (self.pairs > 0))
            shed = self.pairs[tiles, None] - self.pairs[theirs]
            larger = np.maximum(self.load[donor] - shed, self.load[receiver] + shed)
            if larger.size and larger.min() < best:
                best = int(larger.min())
                given, taken = divmod(int(larger.argmin()), len(theirs))
                trade = int(tiles[given]), int(theirs[taken]), receiver
        if trade is None:
            return False
        given, taken, receiver = trade
        self._move(given, donor, receiver)
        self._move(taken, receiver, donor)
        return True

    def _move(self, tile: int, donor: int, receiver: int) -> None:
        self.worker[tile] = receiver
        self.load[donor] -= self.pairs[tile]
        self.load[receiver] += self.pairs[tile]
        self.resident.place(tile, receiver)
        self.stuck[receiver] = False

"""Check every invariant of a plan, from the plan's own numbers.

In: PoolPlan. Out: nothing, or PlanError.

Independent of how the plan was made: it follows each row of the routes back to its token and reads
the varlen calls as a kernel would. Made for tests, and for whoever writes a placer: it expands
rows, so its memory grows with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.heads import HeadPartition
from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.pool_plan import PoolPlan
from megatron_libra.plan.worker_plan import ExchangedPart, LocalPart, Round, WorkerPlan, WorkerRoute

__all__ = ["check_plan"]

Int64 = NDArray[np.int64]
_Part = ExchangedPart | LocalPart
OUTSIDE = -1
"""Sample number of the padding tail."""


def check_plan(plan: PoolPlan) -> None:
    """Raise PlanError unless every invariant holds.

    Tiles partition the tokens of the samples for every head shard and know their home; bytes sent
    are bytes received; every query row arrives once and returns to where it came from; no key is
    fetched twice by one worker; every query attends to exactly its causal prefix, once; loads are
    the pairs that the calls compute.
    """
    tokens = _Tokens.of(plan)
    _check_tiles(plan, tokens)
    workers = [plan.worker_plan(worker) for worker in range(plan.num_workers)]
    _check_sent_is_received(workers)
    covered = np.zeros((plan.heads.head_split, tokens.sample.size), np.int64)
    computed = np.zeros(plan.num_workers, np.int64)
    for worker in workers:
        computed[worker.worker] = _check_worker(plan, worker, workers, tokens, covered)
    inside = (tokens.sample.ravel() != OUTSIDE).astype(np.int64)
    _require(bool((covered == inside).all()), "a query is computed never or more than once")
    _require(
        bool((computed == plan.loads).all()), "loads differ from the pairs that the calls compute"
    )


@dataclass(frozen=True)
class _Tokens:
    """(P, L) sample number and position inside the sample of every token, and its key in local
    order.
    """

    sample: Int64
    position: Int64
    local: list[Int64]
    """For each worker, (L / CP,) flat token numbers slot * L + position in local order."""

    @classmethod
    def of(cls, plan: PoolPlan) -> _Tokens:
        sample = np.full((len(plan.sequences), plan.seq_length), OUTSIDE, np.int64)
        position = np.zeros_like(sample)
        number = 0
        for slot, lengths in enumerate(plan.sequences):
            start = 0
            for length in lengths:
                sample[slot, start : start + length] = number
                position[slot, start : start + length] = np.arange(length)
                start, number = start + length, number + 1
        size = plan.context_parallel_size
        layout = TokenLayout(plan.config.layout, plan.seq_length, size)
        local = [
            worker // size * plan.seq_length + layout.positions(worker % size)
            for worker in range(plan.num_workers)
        ]
        return cls(sample, position, local)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PlanError(f"{message}; the plan must not be used.")


def _check_tiles(plan: PoolPlan, tokens: _Tokens) -> None:
    tiles = plan.tiles
    count = np.zeros((plan.heads.head_split, *tokens.sample.shape), np.int64)
    owner = np.empty(tokens.sample.size, np.int64)
    for worker, flat in enumerate(tokens.local):
        owner[flat] = worker
    for tile in range(len(tiles.slot)):
        slot, start, stop = int(tiles.slot[tile]), int(tiles.start[tile]), int(tiles.stop[tile])
        count[tiles.head_shard[tile], slot, start:stop] += 1
        homes = owner[slot * plan.seq_length + start : slot * plan.seq_length + stop]
        _require(
            bool((homes == tiles.home[tile]).all()), f"tile {tile} has queries away from its home"
        )
        pairs = int((tokens.position[slot, start:stop] + 1).sum())
        _require(pairs == tiles.pairs[tile], f"tile {tile} miscounts its pairs")
        _require(stop - start <= plan.config.block_size, f"tile {tile} is longer than a block")
    inside = (tokens.sample != OUTSIDE).astype(np.int64)
    _require(bool((count == inside).all()), "tiles do not cut the samples into disjoint parts")
    in_range = (tiles.worker >= 0) & (tiles.worker < plan.num_workers)
    _require(bool(in_range.all()), "a tile is placed on no worker")


def _check_sent_is_received(workers: list[WorkerPlan]) -> None:
    for sender in workers:
        for kind in ("query", "kv"):
            local: WorkerRoute = getattr(sender.local, kind)
            _require(
                bool((local.send_peer == sender.worker).all()),
                f"local {kind} rows of worker {sender.worker} leave it",
            )
        for receiver, part, kind in product(workers, ("near", "far"), ("query", "kv")):
            sent: WorkerRoute = getattr(getattr(sender, part), kind)
            received: WorkerRoute = getattr(getattr(receiver, part), kind)
            out = sent.send_count[sent.send_peer == receiver.worker]
            into = received.recv_count[received.recv_peer == sender.worker]
            _require(
                np.array_equal(out, into),
                f"{kind} rows {sender.worker} -> {receiver.worker} differ at the two ends",
            )


def _arrivals(
    part: _Part, worker: int, peers: Sequence[tuple[int, _Part]], kind: str, tokens: _Tokens
) -> tuple[Int64, Int64]:
    """(rows,) flat token number and shard of every row of a part's compute buffer.

    Args:
        part: an exchanged part of the worker, or its local part.
        peers: the parts that may send to it, with their workers.
    """
    own: WorkerRoute = getattr(part, kind)
    flat = np.full(own.num_rows, -1, np.int64)
    shard = np.full(own.num_rows, -1, np.int64)
    for peer, their_part in peers:
        theirs: WorkerRoute = getattr(their_part, kind)
        sent = np.flatnonzero(theirs.send_peer == worker)
        rows = own.recv_row[own.recv_peer == peer]
        for index, row in zip(sent.tolist(), rows.tolist(), strict=True):
            token, count = int(theirs.send_token[index]), int(theirs.send_count[index])
            _require(row + count <= own.num_rows, f"a {kind} row arrives behind the last")
            _require(bool((flat[row : row + count] == -1).all()), f"a {kind} row arrives twice")
            held = tokens.local[peer]
            _require(token + count <= len(held), f"a {kind} range leaves its home's tokens")
            flat[row : row + count] = held[token : token + count]
            shard[row : row + count] = theirs.send_shard[index]
    _require(bool((flat != -1).all()), f"a {kind} row never arrives")
    return flat, shard


def _check_worker(
    plan: PoolPlan,
    worker: WorkerPlan,
    workers: list[WorkerPlan],
    tokens: _Tokens,
    covered: Int64,
) -> int:
    """Follow one worker's rows and calls; returns the pairs it computes."""
    by_shard = 0
    for name in ("near", "far"):
        part: ExchangedPart = getattr(worker, name)
        peers = [(peer.worker, getattr(peer, name)) for peer in workers]
        by_shard += _check_part(plan.heads, part, worker.worker, peers, tokens, covered)
        if part.rounds:
            all_keys = part.rounds[0].key_stop == part.kv.num_rows
            _require(all_keys, f"worker {worker.worker} has keys that round 0 does not touch")
    local, early = worker.local, worker.local.num_early_rounds
    for rounds in (local.rounds[:early], local.rounds[early:]):
        for round_ in rounds:
            nested = round_.key_start == rounds[0].key_start
            nested = nested and round_.key_stop <= rounds[0].key_stop
            _require(nested, f"worker {worker.worker} has a round that its first does not cover")
    firsts = [rounds[0] for rounds in (local.rounds[:early], local.rounds[early:]) if rounds]
    stops = [0, *(round_.key_stop for round_ in firsts)]
    whole = [round_.key_start for round_ in firsts] == stops[:-1]
    _require(
        whole and stops[-1] == local.kv.num_rows,
        f"worker {worker.worker} has local keys that its first rounds do not touch",
    )
    by_heads = local.late_kv_heads > 0
    _require(
        0 <= 2 * local.late_kv_heads <= plan.shape.kv_heads
        and not (by_heads and local.num_early_rounds < len(local.rounds)),
        f"worker {worker.worker} divides its local part twice, or has more late than early heads",
    )
    own, split = [(worker.worker, local)], plan.heads.head_split
    all_heads = np.zeros((1, covered.shape[1]), np.int64)
    pairs = _check_part(plan.heads.whole, local, worker.worker, own, tokens, all_heads)
    covered += all_heads
    return by_shard + split * pairs


def _check_part(
    heads: HeadPartition,
    part: _Part,
    worker: int,
    peers: Sequence[tuple[int, _Part]],
    tokens: _Tokens,
    covered: Int64,
) -> int:
    """Follow the rows and calls of one part; returns the pairs it computes."""
    queries, shard = _arrivals(part, worker, peers, "query", tokens)
    keys, kv_shard = _arrivals(part, worker, peers, "kv", tokens)
    held = kv_shard * tokens.sample.size + keys
    _require(len(np.unique(held)) == len(held), f"worker {worker} fetches a key twice")
    np.add.at(covered, (shard, queries), 1)
    sample, position = tokens.sample.ravel(), tokens.position.ravel()
    needed = heads.kv_shard_of(np.arange(heads.head_split))
    stop, pairs = 0, 0
    for round_ in part.rounds:
        _require(round_.query_start == stop, f"worker {worker} skips query rows")
        stop = round_.query_stop
        rows = slice(round_.query_start, round_.query_stop)
        resident = slice(round_.key_start, round_.key_stop)
        pairs += _check_round(
            round_,
            (sample[queries[rows]], position[queries[rows]], needed[shard[rows]]),
            (sample[keys[resident]], position[keys[resident]], kv_shard[resident]),
        )
    _require(stop == len(queries), f"worker {worker} leaves query rows out")
    return pairs


def _check_round(
    round_: Round, queries: tuple[Int64, Int64, Int64], keys: tuple[Int64, Int64, Int64]
) -> int:
    """Every query of a call sees keys 0 .. its position of its own sample; returns the pairs."""
    num_queries, num_keys = np.diff(round_.cu_queries), np.diff(round_.cu_keys)
    _require(bool((num_keys >= num_queries).all()), "an entry has more queries than keys")
    _require(round_.max_queries == num_queries.max(), "max_queries is wrong")
    _require(round_.max_keys == num_keys.max(), "max_keys is wrong")
    resident = round_.key_stop - round_.key_start
    _require(resident == round_.cu_keys[-1], "key_stop differs from the entries")
    pairs = 0
    for entry in np.flatnonzero(num_queries).tolist():
        q = slice(round_.cu_queries[entry], round_.cu_queries[entry + 1])
        k = slice(round_.cu_keys[entry], round_.cu_keys[entry + 1])
        total = int(num_keys[entry])
        sample = queries[0][q]
        _require(bool((sample == sample[0]).all()), "an entry mixes samples")
        _require(bool((keys[0][k] == sample[0]).all()), "an entry has keys of another sample")
        _require(np.array_equal(keys[1][k], np.arange(total)), "keys are not a prefix in order")
        last = np.arange(total - int(num_queries[entry]), total)
        _require(np.array_equal(queries[1][q], last), "queries are not the last of their keys")
        _require(bool((queries[2][q] == keys[2][k][0]).all()), "queries meet another head's keys")
        _require(bool((keys[2][k] == keys[2][k][0]).all()), "an entry mixes kv shards")
        pairs += int((last + 1).sum())
    return pairs

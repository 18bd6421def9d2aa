"""Order each worker's rows and cut them into varlen calls.

In: blocks, tile workers. Out: ComputePlan.

A worker computes its tiles with an unmodified varlen FlashAttention. Adjacent fragments of one
sample and head shard merge into one query range [a, e); it attends to keys [0, e), which
bottom-right aligned causal masking gives exactly. Keys of a (sample, kv shard) are resident once: a
KV group. A call (round) uses a group at most once, so the k-th range of a group runs in round k,
the last range first. Groups with more ranges come first among the resident rows, so a later round
needs only a prefix of them. Keys behind e become the keys of an entry with zero queries (a filler).
Example, one sample of 8 tokens, B = 2, a worker with blocks [2, 4) and [6, 8):

    resident rows   0 1 2 3 4 5 6 7
    round 0         queries 6 7 on keys 0..7                  cu_queries 0 2     cu_keys 0 8
    round 1         queries 2 3 on keys 0..3, then a filler   cu_queries 0 2 2   cu_keys 0 4 8
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.heads import HeadPartition
from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.parts import EARLY, FAR, LATE, NEAR, parts_of
from megatron_libra.plan.sequences import SamplePool
from megatron_libra.plan.tiles import BlockTable

__all__ = ["ComputePlan", "EntryTable", "GroupTable", "PartTables", "RangeTable", "order_rows"]

Int64 = NDArray[np.int64]
NOBODY = -1
"""The worker of a fragment that belongs to another part."""


@dataclass(frozen=True, slots=True, eq=False)
class RangeTable:
    """Merged query ranges in kernel order: (worker, round, resident order of the group)."""

    worker: Int64
    head_shard: Int64
    sample: Int64
    start: Int64
    stop: Int64
    """Sample-local query positions [start, stop)."""
    row: Int64
    """First row in the worker's query buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupTable:
    """KV groups in resident order of each worker: (worker, most uses first, kv shard, sample)."""

    worker: Int64
    kv_shard: Int64
    sample: Int64
    num_keys: Int64
    """Resident keys [0, num_keys) of the sample."""
    row: Int64
    """First row in the worker's resident buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class EntryTable:
    """Entries of the varlen calls: (worker, round, order inside the call)."""

    worker: Int64
    round: Int64
    num_queries: Int64
    num_keys: Int64


@dataclass(frozen=True, slots=True, eq=False)
class PartTables:
    """What every worker computes in one part, and in which order."""

    ranges: RangeTable
    groups: GroupTable
    entries: EntryTable


@dataclass(frozen=True, slots=True, eq=False)
class ComputePlan:
    """The exchanged parts, and the local part, which has one head shard: all heads. Its late rows
    stand behind the early ones."""

    near: PartTables
    far: PartTables
    local: PartTables
    early_rounds: Int64
    """(W,) rounds of the local part that belong to its early half."""
    early_keys: Int64
    """(W,) resident rows of the local part that belong to its early half."""
    late_kv_heads: Int64
    """(W,) kv heads that are the late half of a local part that is divided by heads, else 0."""


def order_rows(
    samples: SamplePool,
    blocks: BlockTable,
    layout: TokenLayout,
    heads: HeadPartition,
    tile_worker: Int64,
    kv_fetch: str,
) -> ComputePlan:
    """Ranges, groups and entries of all workers, given the worker of every tile."""
    block = np.repeat(np.arange(blocks.num_blocks), np.diff(blocks.first_fragment))
    worker = tile_worker.reshape(-1, heads.head_split).T[:, block]
    parts = parts_of(samples, blocks, layout, worker, heads.kv_heads)
    part = parts.of_fragment
    near, far = (
        _order_part(samples, blocks, heads, np.where(part == p, worker, NOBODY), kv_fetch)
        for p in (NEAR, FAR)
    )
    # local ranges need no key behind them, whatever is fetched otherwise
    early, late = (
        _order_part(samples, blocks, heads.whole, np.where(part == p, worker, NOBODY)[:1], "prefix")
        for p in (EARLY, LATE)
    )
    size = samples.num_slots * layout.context_parallel_size
    rounds, rows, keys = np.zeros((3, size), np.int64)
    np.maximum.at(rounds, early.entries.worker, early.entries.round + 1)
    np.add.at(rows, early.ranges.worker, early.ranges.stop - early.ranges.start)
    np.add.at(keys, early.groups.worker, early.groups.num_keys)
    return ComputePlan(
        near=near,
        far=far,
        local=_joined(early, _moved(late, rounds, rows, keys)),
        early_rounds=rounds,
        early_keys=keys,
        late_kv_heads=parts.late_kv_heads,
    )


def _moved(late: PartTables, rounds: Int64, rows: Int64, keys: Int64) -> PartTables:
    """The late half, numbered on behind the early one."""
    r, g, e = late.ranges, late.groups, late.entries
    return PartTables(
        replace(r, row=r.row + rows[r.worker]),
        replace(g, row=g.row + keys[g.worker]),
        replace(e, round=e.round + rounds[e.worker]),
    )


def _joined(early: PartTables, late: PartTables) -> PartTables:
    """Both halves, by worker."""
    return PartTables(
        _concatenate(early.ranges, late.ranges),
        _concatenate(early.groups, late.groups),
        _concatenate(early.entries, late.entries),
    )


def _concatenate[Table: (RangeTable, GroupTable, EntryTable)](first: Table, second: Table) -> Table:
    order = np.argsort(np.concatenate([first.worker, second.worker]), kind="stable")
    columns = {
        field.name: np.concatenate([getattr(first, field.name), getattr(second, field.name)])[order]
        for field in fields(first)
    }
    return type(first)(**columns)


def _order_part(
    samples: SamplePool,
    blocks: BlockTable,
    heads: HeadPartition,
    fragment_worker: Int64,
    kv_fetch: str,
) -> PartTables:
    """Tables of the fragments (H, F) that somebody computes in this part."""
    worker, shard, sample, start, stop = _merge_fragments(blocks, fragment_worker)
    kv_shard = heads.kv_shard_of(shard)
    group_key = (worker * heads.kv_shards + kv_shard) * max(len(samples.length), 1) + sample
    order = np.lexsort((-stop, group_key))
    worker, shard, sample, start, stop, kv_shard, group_key = (
        column[order] for column in (worker, shard, sample, start, stop, kv_shard, group_key)
    )
    first = np.flatnonzero(np.diff(group_key, prepend=-1))
    uses = np.diff(first, append=len(group_key))
    round_ = np.arange(len(group_key)) - np.repeat(first, uses)
    num_keys = samples.length[sample[first]] if kv_fetch == "group" else stop[first]

    resident = np.lexsort((sample[first], kv_shard[first], -uses, worker[first]))
    groups = GroupTable(
        worker=worker[first][resident],
        kv_shard=kv_shard[first][resident],
        sample=sample[first][resident],
        num_keys=num_keys[resident],
        row=_starts_within(worker[first][resident], num_keys[resident]),
    )
    position = np.empty(len(resident), np.int64)
    position[resident] = np.arange(len(resident))
    kernel = np.lexsort((np.repeat(position, uses), round_, worker))
    ranges = RangeTable(
        worker=worker[kernel],
        head_shard=shard[kernel],
        sample=sample[kernel],
        start=start[kernel],
        stop=stop[kernel],
        row=_starts_within(worker[kernel], (stop - start)[kernel]),
    )
    return PartTables(
        ranges, groups, _entries(ranges, round_[kernel], np.repeat(num_keys, uses)[kernel])
    )


def _merge_fragments(
    blocks: BlockTable, fragment_worker: Int64
) -> tuple[Int64, Int64, Int64, Int64, Int64]:
    """Columns worker, head shard, sample, start, stop of the merged query ranges."""
    shard, fragment = np.nonzero(fragment_worker != NOBODY)
    worker = fragment_worker[shard, fragment]
    order = np.argsort(worker, kind="stable")
    worker, shard, fragment = worker[order], shard[order], fragment[order]
    sample = blocks.fragment_sample[fragment]
    start, stop = blocks.fragment_start[fragment], blocks.fragment_stop[fragment]
    joins = np.zeros(len(worker), np.bool_)
    joins[1:] = (
        (worker[1:] == worker[:-1])
        & (shard[1:] == shard[:-1])
        & (sample[1:] == sample[:-1])
        & (start[1:] == stop[:-1])
    )
    first = np.flatnonzero(~joins)
    last = np.append(first[1:], len(worker)) - 1 if len(first) else first
    return worker[first], shard[first], sample[first], start[first], stop[last]


def _starts_within(owner: Int64, count: Int64) -> Int64:
    """Exclusive running sum of count, restarted at each new owner (owners are sorted)."""
    total = np.cumsum(count) - count
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    return total - np.repeat(total[first], np.diff(first, append=len(owner)))


def _entries(ranges: RangeTable, round_: Int64, resident_keys: Int64) -> EntryTable:
    """One entry a range, then a filler where keys of its group remain."""
    filler = resident_keys > ranges.stop
    row = np.repeat(np.arange(len(filler)), 1 + filler)
    is_filler = np.zeros(len(row), np.bool_)
    is_filler[1:] = row[1:] == row[:-1]
    queries = ranges.stop - ranges.start
    return EntryTable(
        worker=ranges.worker[row],
        round=round_[row],
        num_queries=np.where(is_filler, 0, queries[row]),
        num_keys=np.where(is_filler, resident_keys[row] - ranges.stop[row], ranges.stop[row]),
    )

"""How much of the training thread's time does background planning take? In: nothing. Out: a table.

    python scripts/measure/background_planning.py [--segments 15]

The main thread runs a fixed piece of interpreted Python, which holds the interpreter lock as a
training loop's host code does, in segments that alternate between no planning and one plan for
every second of work, more than training asks for. Needs two free cores: the planner is another
process, and rows are numbered in another thread. Of each pool two workers, the median and the one
with the most rows to number. Milliseconds of a plan, medians over segments:

plan      making it, in the planner process
rows      numbering the worker's rows on the main thread, which the background saves it
waited    what the main thread waits for the interpreter lock more than without planning
slowed    what its work takes more of a core: both threads share caches and memory

Beside a thread that never lets go of the lock the background takes about nine times as long, so
with much less than a second of work a plan, the main thread would wait for it.
"""

from __future__ import annotations

import argparse
import statistics
import time

from megatron_libra import AttentionShape, LibraConfig, PoolPlan, plan_pool
from megatron_libra.data.corpora import packed_corpus
from megatron_libra.executor.coordinator import PlanCoordinator
from megatron_libra.executor.plan_index import index_plan
from megatron_libra.executor.plan_server import PlanSettings

PLANS = 3
"""Of a segment."""
EVERY_S = 1.0
"""Of work a plan."""
POOLS = {
    "longtail-256k, W 64": ("longtail-256k", 262144, 8, (128, 16, 256)),
    "longtail-1m, W 128": ("longtail-1m", 1048576, 16, (128, 4, 256)),
}


def work(seconds: float) -> int:
    """Rounds of interpreted Python that take about so long; the unit of the segments."""
    rounds, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        spin(1)
        rounds += 1
    return rounds


def spin(rounds: int) -> None:
    """A fixed piece of work."""
    for _ in range(rounds):
        sum(i * i for i in range(2000))


def segment(
    coordinator: PlanCoordinator, rounds: int, sequences: list, tag: int
) -> tuple[float, float]:
    """Milliseconds of the main thread for the work: on a core, and beside it; with sequences it
    asks for plans."""
    start, start_core = time.perf_counter(), time.thread_time()
    for number in range(PLANS):
        if sequences:
            coordinator.request((tag, number), sequences)
        spin(rounds)
        if sequences:
            coordinator.take((tag, number))
    core = time.thread_time() - start_core
    return core * 1e3, (time.perf_counter() - start - core) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=15, help="of each kind")
    args = parser.parse_args()
    print("| pool | worker | plan | rows | waited | slowed |")
    print("|---|---|---:|---:|---:|---:|")
    for name, (corpus, seq_length, cp, heads) in POOLS.items():
        rows = packed_corpus(corpus, num_sequences=8, seed=0)
        sequences = [list(rows.lengths(row)) for row in range(8)]
        query_heads, kv_heads, head_dim = heads
        settings = PlanSettings(
            context_parallel_size=cp,
            shape=AttentionShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim),
            config=LibraConfig(pool_size=8, block_size=2048, head_split=16, chunks=4),
            seq_length=seq_length,
        )
        plan = plan_pool(
            sequences,
            context_parallel_size=cp,
            shape=settings.shape,
            config=settings.config,
            seq_length=seq_length,
        )
        by_time = sorted(range(plan.num_workers), key=lambda worker: rows_ms(plan, worker))
        for which, worker in (("median", by_time[len(by_time) // 2]), ("busiest", by_time[-1])):
            plan_ms, waited, slowed = measure(settings, sequences, worker, args.segments)
            numbered = statistics.median(rows_ms(plan, worker) for _ in range(args.segments))
            numbers = " | ".join(f"{ms:.1f}" for ms in (plan_ms, numbered, waited, slowed))
            print(f"| {name} | {which} | {numbers} |", flush=True)


def rows_ms(plan: PoolPlan, worker: int) -> float:
    """Milliseconds in which one worker's rows are numbered."""
    start = time.perf_counter()
    index_plan(plan.worker_plan(worker))
    return (time.perf_counter() - start) * 1e3


def measure(
    settings: PlanSettings, sequences: list, worker: int, segments: int
) -> tuple[float, float, float]:
    """Milliseconds of a plan, and what each takes from the main thread: waits, and slower work."""
    coordinator = PlanCoordinator(None, settings, worker=worker)
    rounds = work(EVERY_S)
    segment(coordinator, rounds, sequences, -1)
    waited, slowed, plan_ms = [], [], []
    for tag in range(segments):
        core, beside = segment(coordinator, rounds, [], tag)
        planned_core, planned_beside = segment(coordinator, rounds, sequences, tag)
        slowed.append((planned_core - core) / PLANS)
        waited.append((planned_beside - beside) / PLANS)
        plan_ms.append(coordinator.last_plan_ms)
    coordinator.close()
    return statistics.median(plan_ms), statistics.median(waited), statistics.median(slowed)


if __name__ == "__main__":
    main()

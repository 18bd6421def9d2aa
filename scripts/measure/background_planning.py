"""How much of the training thread's time does background planning take? In: nothing. Out: a table.

    python scripts/measure/background_planning.py [--segments 15]

The main thread runs a fixed piece of interpreted Python, which holds the interpreter lock as a
training loop's host code does, in segments that alternate between no planning and one plan for
every 200 ms of work, far more than training asks for. Needs two free cores: the planner is another
process, and rows are numbered in another thread. Of each pool two workers, the median and the one
with the most rows to number. rows: numbering them on the main thread, which planning in the
background saves it. lost: (segment with planning - segment without) / plans of a segment.
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

PLANS = 10
"""Of a segment."""
EVERY_S = 0.2
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


def segment(coordinator: PlanCoordinator, rounds: int, sequences: list, tag: int) -> float:
    """Seconds that the main thread needs for the work; with sequences it asks for plans."""
    start = time.perf_counter()
    for number in range(PLANS):
        if sequences:
            coordinator.request((tag, number), sequences)
        spin(rounds)
        if sequences:
            coordinator.take((tag, number))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=15, help="of each kind")
    args = parser.parse_args()
    print("| pool | worker | plan, ms | rows, ms | lost by the main thread per plan, ms |")
    print("|---|---|---:|---:|---:|")
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
            plan_ms, lost_ms = measure(settings, sequences, worker, args.segments)
            numbered = statistics.median(rows_ms(plan, worker) for _ in range(args.segments))
            print(
                f"| {name} | {which} | {plan_ms:.1f} | {numbered:.1f} | {lost_ms:.1f} |", flush=True
            )


def rows_ms(plan: PoolPlan, worker: int) -> float:
    """Milliseconds in which one worker's rows are numbered."""
    start = time.perf_counter()
    index_plan(plan.worker_plan(worker))
    return (time.perf_counter() - start) * 1e3


def measure(
    settings: PlanSettings, sequences: list, worker: int, segments: int
) -> tuple[float, float]:
    """Milliseconds of a plan, and what each takes from the main thread; medians."""
    coordinator = PlanCoordinator(None, settings, worker=worker)
    rounds = work(EVERY_S)
    segment(coordinator, rounds, sequences, -1)
    lost, plan_ms = [], []
    for tag in range(segments):
        without = segment(coordinator, rounds, [], tag)
        lost.append((segment(coordinator, rounds, sequences, tag) - without) * 1e3 / PLANS)
        plan_ms.append(coordinator.last_plan_ms)
    coordinator.close()
    return statistics.median(plan_ms), statistics.median(lost)


if __name__ == "__main__":
    main()

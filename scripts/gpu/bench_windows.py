"""Windows of a preset on several workers. In: a case. Out: layouts; the plans of each microbatch.

Ulysses takes a window in sampler order, Libra in VRSP order.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench_common import Case
from bench_work import scaled_rows, shape_of

from megatron_libra import LibraConfig, PoolPlan, order_window, plan_pool

__all__ = ["ALONE", "IMPLEMENTATIONS", "check_layout", "layouts_of", "microbatches"]

IMPLEMENTATIONS = ("ulysses", "libra")
ALONE = "1x1"
"""No pools: what plain data parallelism waits for, and the base of a sweep over P."""


def layouts_of(num_workers: int, heads: Sequence[str]) -> list[str]:
    """Every P x CP of one pool of all workers, and with CP = 1 every smaller P. Ulysses needs a CP
    that divides the query heads."""
    divisors = [n for n in range(1, num_workers + 1) if num_workers % n == 0]
    whole = [
        (p, num_workers // p)
        for p in reversed(divisors)
        if all(shape_of(name).query_heads % (num_workers // p) == 0 for name in heads)
    ]
    parts = [(p, 1) for p in divisors[:-1]]
    return [f"{p}x{cp}" for p, cp in (*whole, *parts)]


def check_layout(
    layout: str, num_workers: int, heads: Sequence[str], parser: argparse.ArgumentParser
) -> None:
    """Leave with a line where a layout is not P x CP of a part of the workers, or where Ulysses
    cannot divide the heads by CP."""
    sizes, known = layout.split("x"), layouts_of(num_workers, heads)
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        parser.error(f"layout ({layout}) must be PxCP, such as {known[0]}.")
    pool_size, cp = map(int, sizes)
    way_out = f"try one of {', '.join(known)}."
    if num_workers % (pool_size * cp):
        parser.error(
            f"P x CP of layout ({layout}) must divide the {num_workers} workers; {way_out}"
        )
    for name in heads:
        if shape_of(name).query_heads % cp:
            parser.error(
                f"CP of layout ({layout}) must divide the query heads of {name}, which Ulysses "
                f"spreads; {way_out}"
            )


def microbatches(
    case: Case, config: LibraConfig, data_parallel_size: int, seed: int
) -> Iterator[dict[str, list[PoolPlan]]]:
    """For each microbatch of a window, the plans of all pools by implementation."""
    size, count = config.pool_size, case["microbatches"]
    rows = scaled_rows(case["preset"], case["seq_length"], count * data_parallel_size, seed)
    order = order_window(rows, pool_size=size, data_parallel_size=data_parallel_size, scope="auto")
    shape, cp = shape_of(case["heads"]), int(case["layout"].split("x")[1])
    for number in range(count):
        start = number * data_parallel_size
        here = range(start, start + data_parallel_size)
        orders = {"ulysses": list(here), "libra": [order.order[i] for i in here]}
        yield {
            name: [
                plan_pool(
                    [rows[i] for i in orders[name][pool : pool + size]],
                    context_parallel_size=cp,
                    shape=shape,
                    config=config if name == "libra" else replace(config, placer="ulysses"),
                    seq_length=case["seq_length"],
                )
                for pool in range(0, data_parallel_size, size)
            ]
            for name in IMPLEMENTATIONS
        }

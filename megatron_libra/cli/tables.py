"""Readable answers. In: plans, orders, reports. Out: rich tables, also when piped or narrow.

Pairs are causal query-key pairs of one query head; a bar is a load relative to the heaviest worker.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_libra.cli.request import WindowRequest
from megatron_libra.plan.pool_plan import PoolPlan
from megatron_libra.plan.vrsp import WindowOrder, attention_work
from megatron_libra.simulator.units import bytes_text

__all__ = ["bar", "show_doctor", "show_order", "show_plan", "show_verify"]

MAX_ROWS = 64
BAR_WIDTH = 8
WIDE = 78
"""Columns from which a terminal has room for the optional columns."""


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of # for a share in [0, 1]; ASCII, so that every terminal and log shows it."""
    return "#" * round(max(0.0, min(1.0, share)) * width)


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


def _table(title: str, columns: dict[str, bool]) -> Table:
    """A table from column names; True aligns to the right, as numbers are."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.min_width = len(title)  # a narrow table does not fold its title
    for name, is_number in columns.items():
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    return table


def _facts(title: str, rows: dict[str, str]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False
    )
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def show_plan(plan: PoolPlan, plan_ms: float) -> None:
    """Print a plan: what it achieves, then one row for each worker."""
    moved = int(plan.traffic_bytes.sum() - plan.traffic_bytes.trace())
    config = plan.config
    console = _console()
    console.print(
        _facts(
            "Pool plan",
            {
                "workers": f"{plan.num_workers} = {len(plan.sequences)} sequences x CP "
                f"{plan.context_parallel_size}, {plan.seq_length} tokens each",
                "tiles": f"{len(plan.tiles.pairs)} of at most {config.block_size} tokens x "
                f"{config.head_split} head shards, placer {config.placer}",
                "imbalance": f"{plan.home_imbalance:.4f} if tiles stayed home -> "
                f"{plan.imbalance:.4f} (max / mean - 1)",
                "heaviest tile": f"{plan.max_tile_over_mean:.3f} of the mean load",
                "moved": f"{bytes_text(moved)} in one layer's forward, of all workers together",
                "planned in": f"{plan_ms:.1f} ms",
                "digest": plan.digest[:16],
            },
        )
    )
    console.print(_worker_table(plan, wide=console.width >= WIDE))


def _worker_table(plan: PoolPlan, wide: bool) -> Table:
    """One row for each worker; loads are in units of the mean load, so 1.00 is balance."""
    columns = {"worker": True, "home": True, "load": True, "sends": True, "receives": True}
    table = _table("Workers (loads / mean load)", columns)
    if wide:
        table.add_column("rounds", justify="right")
        table.add_column("KV held", justify="right")
        table.add_column("", no_wrap=True)
    mean = max(1.0, float(plan.loads.mean()))
    moved = plan.traffic_bytes - np.diag(plan.traffic_bytes.diagonal())
    for worker in range(min(plan.num_workers, MAX_ROWS)):
        row = [
            str(worker),
            f"{plan.home_loads[worker] / mean:.3f}",
            f"{plan.loads[worker] / mean:.3f}",
            bytes_text(int(moved[worker].sum())),
            bytes_text(int(moved[:, worker].sum())),
        ]
        if wide:
            row.append(str(plan.num_rounds[worker]))
            row.append(bytes_text(int(plan.peak_resident_kv_bytes[worker])))
            row.append(bar(int(plan.loads[worker]) / max(1, int(plan.loads.max()))))
        table.add_row(*row)
    if plan.num_workers > MAX_ROWS:
        table.caption = f"{plan.num_workers - MAX_ROWS} more workers: see --json"
    return table


def show_order(request: WindowRequest, order: WindowOrder) -> None:
    """Print an order: its imbalance against the given order, then one row for each pool."""
    work = [attention_work(lengths) for lengths in request.sequences]
    size = request.pool_size
    given = [sum(work[i : i + size]) for i in range(0, len(work), size)]
    mean = sum(given) / len(given)
    before = max(given) / mean - 1 if mean else 0.0
    console = _console()
    console.print(
        _facts(
            "Window order",
            {
                "window": f"{len(work)} sequences = {len(order.pools)} pools of {size}, "
                f"DP {request.data_parallel_size}",
                "imbalance": f"{before:.4f} as given -> {order.imbalance:.4f} "
                "(max / mean - 1 over pools)",
                "step imbalance": f"{order.step_imbalance:.4f} (groups, summed over the step)",
                "scope": order.scope,
            },
        )
    )
    table = _table("Pools", {"pool": True, "sequences": False, "work": True, "share": False})
    loads = [sum(work[i] for i in pool) for pool in order.pools]
    for number, (pool, load) in enumerate(zip(order.pools, loads, strict=True)):
        if number == MAX_ROWS:
            table.caption = f"{len(loads) - MAX_ROWS} more pools: see --json"
            break
        table.add_row(str(number), " ".join(map(str, pool)), str(load), bar(load / max(1, *loads)))
    console.print(table)


def show_verify(result: dict[str, Any]) -> None:
    """Print the largest differences from dense attention and the verdict."""
    console = _console()
    table = _table("Difference from dense attention", {"tensor": False, "largest": True})
    for name, error in result["errors"].items():
        table.add_row(name, f"{error:.3g}")
    console.print(table)
    verdict = "equal" if result["passed"] else "DIFFERENT"
    how = f"{result['workers']} workers, kernel {result['kernel']}, transport {result['transport']}"
    console.print(f"{verdict} within {result['tolerance']:g} ({how})")


def show_doctor(report: dict[str, Any]) -> None:
    """Print versions, then what can be used and how to get the rest."""
    console = _console()
    console.print(
        _facts("Versions", {name: value or "-" for name, value in report["versions"].items()})
    )
    for part in ("kernels", "transports", "tasks"):
        table = _table(part.capitalize(), {"name": False, "usable": False, "note": False})
        for name, entry in report[part].items():
            table.add_row(name, "yes" if entry["usable"] else "no", entry["note"])
        console.print(table)

"""All tables. In: names, sets. Out: TableSpec for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_libra.bench.comparison import planner_table, target_table
from megatron_libra.bench.grouping import figure_4, figure_8, table_1
from megatron_libra.bench.pools import BenchSet
from megatron_libra.bench.steps import order_time_table, steps_table
from megatron_libra.bench.sweeps import figure_14, figure_15
from megatron_libra.bench.table import TableSpec

__all__ = ["TABLES", "table_specs"]

OF_A_SET: dict[str, Callable[[BenchSet], TableSpec]] = {
    "planners": planner_table,
    "targets": target_table,
}
OF_THE_PRESETS: dict[str, Callable[[], TableSpec]] = {
    "table-1": table_1,
    "figure-4": figure_4,
    "figure-8": figure_8,
    "figure-14": figure_14,
    "figure-15": figure_15,
    "steps": steps_table,
    "order-time": order_time_table,
}
TABLES = (*OF_A_SET, *OF_THE_PRESETS)
"""Names of tables; the first two are made for each set."""


def table_specs(names: Sequence[str], sets: Sequence[BenchSet]) -> list[TableSpec]:
    """The tables of these names; `all` means every one.

    Raises:
        ValueError: an unknown name.
    """
    if "all" in names:
        names = TABLES
    for name in names:
        if name not in TABLES:
            raise ValueError(f"table {name!r} must be one of {', '.join(TABLES)}, all.")
    specs = []
    for name in dict.fromkeys(names):
        if name in OF_A_SET:
            specs += [OF_A_SET[name](bench_set) for bench_set in sets]
        else:
            specs.append(OF_THE_PRESETS[name]())
    return specs

"""Refuse a number of processes that does not fit a run's sizes. In: parsed flags. Out: nothing.

Megatron asserts the same, with a trace, before it calls anything of libra's but the parser.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping

from megatron_libra.config import divisors
from megatron_libra.integration.errors import RunError
from megatron_libra.integration.rules import Settings

__all__ = ["check_processes", "pool_fault"]

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, EXPERT_TP = "expert_model_parallel_size", "expert_tensor_parallel_size"
BATCHES = ("global_batch_size", "eval_global_batch_size")
LETTERS = {TP: "TP", PP: "PP", CP: "CP", EP: "EP", EXPERT_TP: "expert TP"}
GRIDS = {(TP, PP, CP): (TP, PP, CP), (PP, EP, EXPERT_TP): (EP, EXPERT_TP)}
"""Sizes whose product divides the processes -> those of them that the refusal names."""


def check_processes(args: argparse.Namespace) -> None:
    """Refuse a number of processes that Megatron could not cut into its groups and batches. Every
    rank calls it, when the flags are parsed.

    Args:
        args: of Megatron's parser, not validated.

    Raises:
        RunError: with one line for each reason.
    """
    run = Settings(args)
    sizes_come_later = run.use_mp_args_from_checkpoint_args or run.yaml_cfg
    if run.context_parallel_impl == "megatron" or sizes_come_later:
        return
    sizes = {name: getattr(run, name) for name in LETTERS}
    sizes[EXPERT_TP] = sizes[TP] if sizes[EXPERT_TP] is None else sizes[EXPERT_TP]
    lines = list(_size_faults(sizes)) or list(_grid_faults(run.world_size, sizes))
    lines = lines or list(_batch_faults(run, run.world_size // (sizes[TP] * sizes[PP] * sizes[CP])))
    if lines:
        raise RunError("\n".join(lines))


def pool_fault(pool_size: int, data_parallel_size: int) -> str | None:
    """Why P does not fit DP, if it does not."""
    if data_parallel_size % pool_size == 0:
        return None
    return (
        f"--libra-pool-size ({pool_size}) must divide the data-parallel size "
        f"({data_parallel_size}); try one of {divisors(data_parallel_size)}."
    )


def _size_faults(sizes: Mapping[str, int]) -> Iterator[str]:
    for name, size in sizes.items():
        if size < 1:
            yield f"{_flag(name)} ({size}) must be at least 1; try 1."


def _grid_faults(world_size: int, sizes: Mapping[str, int]) -> Iterator[str]:
    products = [math.prod(sizes[name] for name in grid) for grid in GRIDS]
    started = "1 process is" if world_size == 1 else f"{world_size} processes are"
    told = 0
    for (grid, named), product in zip(GRIDS.items(), products, strict=True):
        # what divides a product that was told is no news
        if world_size % product and (not told or told % product):
            told = product
            factors = " x ".join(f"{LETTERS[name]} {sizes[name]}" for name in grid)
            *flags, last = map(_flag, named)
            yield (
                f"{started} not a multiple of {factors} = {product}; start "
                f"{_around(world_size, math.lcm(*products))}, or change {', '.join(flags)} or "
                f"{last}."
            )


def _batch_faults(run: Settings, data_parallel_size: int) -> Iterator[str]:
    """Batches against DP, and P where one does not fit: then DP itself may be the mistake."""
    sizes = {name: getattr(run, name) for name in BATCHES}
    wrong = {name: size for name, size in sizes.items() if size and size % data_parallel_size}
    for name, size in wrong.items():
        yield (
            f"{_flag(name)} ({size}) must be a multiple of the data-parallel size "
            f"({data_parallel_size}, of {run.world_size} processes); try "
            f"{_around(size, data_parallel_size)}."
        )
    if wrong and run.context_parallel_impl == "libra" and run.libra_pool_size > 0:
        pools = pool_fault(run.libra_pool_size, data_parallel_size)
        yield from [pools] if pools else []


def _around(value: int, factor: int) -> str:
    """The multiples of a factor below and above a value, as a way out."""
    below = value // factor * factor
    return f"{below} or {below + factor}" if below > 0 else str(below + factor)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""Refuse a number of processes that does not fit a run's sizes. In: parsed flags. Out: nothing.

Megatron asserts the same, with a trace, before it calls anything of libra's but the parser.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping

from megatron_libra.config import divisors
from megatron_libra.data.schedule import parse_step_batch_size
from megatron_libra.integration.errors import RunError
from megatron_libra.integration.rules import RULES, Settings

__all__ = ["check_processes", "pool_fault"]

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, EXPERT_TP = "expert_model_parallel_size", "expert_tensor_parallel_size"
GBS, EVAL_GBS = "global_batch_size", "eval_global_batch_size"
SCHEDULE = "step_batch_size_schedule"
INSTANCES = "num_distributed_optimizer_instances"
LETTERS = {TP: "TP", PP: "PP", CP: "CP", EP: "EP", EXPERT_TP: "expert TP"}
GRIDS = {(TP, PP, CP): (TP, PP, CP), (PP, EP, EXPERT_TP): (EP, EXPERT_TP)}
"""Sizes whose product divides the processes -> those of them that the refusal names."""
SIZING_RULES = ("weight_remat", "decrease_batch_size_if_needed")
"""Of what changes DP or the batch: with it, a line on the batch would be wrong."""


def check_processes(args: argparse.Namespace) -> None:
    """Refuse a number of processes that Megatron could not cut into its groups and batches. Every
    rank calls it, when the flags are parsed.

    Args:
        args: of Megatron's parser, not validated.

    Raises:
        RunError: with one line for each reason.
    """
    run = Settings(args)
    # without --use-checkpoint-args Megatron ignores --use-mp-args-from-checkpoint-args
    from_checkpoint = run.use_checkpoint_args and run.use_mp_args_from_checkpoint_args
    sizes_come_later = from_checkpoint or run.yaml_cfg
    if run.context_parallel_impl == "megatron" or sizes_come_later:
        return
    sizes = {name: getattr(run, name) for name in LETTERS}
    sizes[EXPERT_TP] = sizes[TP] if sizes[EXPERT_TP] is None else sizes[EXPERT_TP]
    lines = list(_size_faults(sizes)) or list(_grid_faults(run.world_size, sizes))
    lines = lines or [
        rule.line for rule in RULES if rule.name in SIZING_RULES and rule.applies(run)
    ]
    lines = lines or [*_batch_faults(run, sizes), *_instance_faults(run, sizes)]
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
    started = f"{_processes(world_size)} {'is' if world_size == 1 else 'are'}"
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


def _batch_faults(run: Settings, sizes: Mapping[str, int]) -> Iterator[str]:
    """Batches against DP, and P where one does not fit: then DP itself may be the mistake."""
    data_parallel_size = run.world_size // math.prod(sizes[name] for name in (TP, PP, CP))
    wrong = {name: size for name, size in _batches(run) if size < 1 or size % data_parallel_size}
    for name, size in wrong.items():
        yield (
            f"{name} must be a {'positive ' if size < 1 else ''}multiple of the data-parallel size "
            f"({data_parallel_size}, of {_processes(run.world_size)}); try "
            f"{_around(size, data_parallel_size)}."
        )
    if wrong and run.context_parallel_impl == "libra" and run.libra_pool_size > 0:
        pools = pool_fault(run.libra_pool_size, data_parallel_size)
        yield from [pools] if pools else []


def _batches(run: Settings) -> Iterator[tuple[str, int]]:
    """Every batch size and how a line names it. A run that goes on may be past the first sizes of
    its schedule; these are checked all the same, as they can be changed without harm then.

    Raises:
        RunError: the schedule is unreadable, or a constant size stands beside it.
    """
    for name in (GBS, EVAL_GBS):
        size = getattr(run, name)
        if size is not None:
            yield f"{_flag(name)} ({size})", size
    if run.step_batch_size_schedule is None:
        return
    flag = _flag(SCHEDULE)
    if run.global_batch_size is not None:
        raise RunError(f"{flag} replaces {_flag(GBS)} ({run.global_batch_size}); give one of them.")
    try:
        schedule = parse_step_batch_size(run.step_batch_size_schedule, seq_length=run.seq_length)
    except ValueError as error:
        raise RunError(f"{flag}: {error}") from None
    for size in schedule.sizes:
        yield f"{flag} (size {size})", size


def _instance_faults(run: Settings, sizes: Mapping[str, int]) -> Iterator[str]:
    """Instances of the distributed optimizer against the replicas that share a parameter."""
    count = run.num_distributed_optimizer_instances
    replicas = run.world_size // (sizes[TP] * sizes[PP])
    expert_replicas = run.world_size // (sizes[PP] * sizes[EP] * sizes[EXPERT_TP])
    most = math.gcd(replicas, expert_replicas)
    if count is not None and (count < 1 or most % count):
        yield (
            f"{_flag(INSTANCES)} ({count}) must divide DP x CP ({replicas}) and the data-parallel "
            f"size of experts ({expert_replicas}); try one of {divisors(most)}."
        )


def _around(value: int, factor: int) -> str:
    """The multiples of a factor, from the factor on, below and above a value, as a way out."""
    below = value // factor * factor
    return f"{below} or {below + factor}" if below > 0 else str(factor)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""Which pools `libra replay` can plan. In: series, before or behind their windows. Out: a refusal.

Limits are those of one plan, as for POOL.json; how many pools there are, replay_request.py limits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_libra.cli.pool_size import (
    MAX_CELLS,
    MAX_TILES,
    blocks_of,
    check_tiles,
    check_tokens,
    check_workers,
    pieces_of,
)
from megatron_libra.config import LibraConfig
from megatron_libra.data.rows import LengthRows
from megatron_libra.replay.replay import Series

__all__ = ["check_samples", "check_sizes"]


def check_sizes(series: Sequence[Series], base: LibraConfig) -> None:
    """Return if every pool of the series can be planned, as far as sizes tell.

    Args:
        series: what is to be planned.
        base: what the command line chose; a series may have its own B and H.

    Raises:
        ValueError: too many workers, tokens, tiles or cells of a pool.
    """
    for each in series:
        _check_pool(each, base)


def check_samples(
    series: Sequence[Series], base: LibraConfig, windows: Sequence[LengthRows]
) -> None:
    """The same for the samples of the windows, as if the rows of most samples met in one pool.

    Raises:
        ValueError: samples x workers of a pool are too many.
    """
    for each in series:
        size, workers = each.method.config.pool_size, _workers(each)
        for window in windows:
            samples = int(np.sort(np.diff(window.offsets))[-size:].sum())
            if samples * workers > MAX_CELLS:
                raise ValueError(
                    f"{samples} samples in a pool on {workers} workers ({each.name}) are too many "
                    f"for one plan (samples x workers above {MAX_CELLS}); {_smaller(each, base)}."
                )


def _workers(series: Series) -> int:
    return series.method.config.pool_size * series.job.context_parallel_size


def _check_pool(series: Series, base: LibraConfig) -> None:
    config, job, workers = series.method.config, series.job, _workers(series)
    size, pool, smaller = config.pool_size, f"a pool ({series.name})", _smaller(series, base)
    of_workers = f"{size} sequences x context_parallel_size ({job.context_parallel_size})"
    check_workers(workers, of_workers, smaller, pool)
    of_tokens = f"{size} sequences of seq_length ({job.seq_length})"
    check_tokens(size * job.seq_length, of_tokens, smaller, pool)
    blocks = blocks_of(size, job.seq_length, config.block_size, job.context_parallel_size)
    block_size = f"block_size ({config.block_size})"
    coarser = _coarser(series, base, MAX_TILES // config.head_split)
    check_tiles(blocks * config.head_split, block_size, coarser, pool)
    if blocks * workers > MAX_CELLS:
        raise ValueError(
            f"{block_size} makes about {blocks} blocks of {pool} on {workers} workers, too many "
            f"for one plan (blocks x workers above {MAX_CELLS}); "
            f"{_coarser(series, base, MAX_CELLS // workers)}."
        )


def _coarser(series: Series, base: LibraConfig, limit: int) -> str:
    """The smallest B of at most `limit` blocks, if the series has the user's B and one helps."""
    config, job = series.method.config, series.job
    pieces = pieces_of(limit, config.pool_size, job.context_parallel_size)
    if pieces < 1 or config.block_size != base.block_size:
        return _smaller(series, base)
    return f"try --block-size {job.seq_length // (pieces + 1) + 1}"


def _smaller(series: Series, base: LibraConfig) -> str:
    """A way out where the block does not help: options that change this series."""
    name, config = series.method.name, series.method.config
    if name == "distca":
        return "use a smaller --dp, or leave it out: --method libra"
    options = ["--cp"]
    if name in ("ulysses", "wlb"):
        options += ["--seq-length"]
    else:
        options += ["--pool-size"] * (config.pool_size == base.pool_size)
        has_own_tiles = (config.block_size, config.head_split) != (base.block_size, base.head_split)
        options += [] if has_own_tiles else ["--head-split"]
    return f"use a smaller {' or '.join(options)}"

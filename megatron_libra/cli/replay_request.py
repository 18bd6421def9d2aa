"""What `libra replay` was asked for. In: options. Out: the job, the windows, the base choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_libra.cli.corpus_name import check_corpus_name
from megatron_libra.config import AttentionShape, LibraConfig, divisors
from megatron_libra.data.rows import LengthRows
from megatron_libra.plan.heads import fits
from megatron_libra.replay.archive import is_prepared
from megatron_libra.replay.replay import Corpus
from megatron_libra.simulator.calibration import BUILT_IN
from megatron_libra.simulator.corpus import CorpusRequest, load_corpus
from megatron_libra.simulator.cost_model import CostModel
from megatron_libra.simulator.job import PRESET_JOBS, TrainingJob

__all__ = [
    "JobOptions",
    "INTER_NODE_GB_S",
    "base_choices",
    "inter_node",
    "linked",
    "read_seeds",
    "read_windows",
]

INTER_NODE_GB_S = 50.0
"""GB/s of a worker between nodes with a built-in model: a full 400 Gb/s adapter of its own, an
assumption."""
HEAD_SPLIT = 16
BLOCKS = 256
"""Blocks of a packed sequence by default."""
POOL_SIZE = 8
MAX_SEQUENCES = 2**15
"""Packed sequences of all steps and seeds; the default's 512 take about 20 s on two cores."""
MAX_DIGITS = 18
"""Of a seed."""
MAX_LINK, MIN_RATE = 1e9, 1e-6
"""Of GB/s and microseconds; beyond, bytes / s leave the range of floats or mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Sizes that the command line gives; None where it does not."""

    seq_length: int | None = None
    context_parallel_size: int | None = None
    data_parallel_size: int | None = None
    global_batch_size: int | None = None
    query_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    workers_per_node: int = 8

    def job(self, corpus: str) -> TrainingJob:
        """The job of a preset, changed by what is given, or of the options alone.

        Raises:
            ValueError: no such corpus, an option is missing, or a size breaks a rule.
        """
        check_corpus_name(corpus)
        preset = PRESET_JOBS.get(corpus)
        if preset is None and is_prepared(Path(corpus)):
            raise ValueError(f"{corpus} is a prepared replay, not a corpus; try --load {corpus}.")
        sizes = self._known(
            preset,
            "seq_length",
            "context_parallel_size",
            "data_parallel_size",
            "global_batch_size",
        )
        shape = self._known(preset and preset.shape, "query_heads", "kv_heads", "head_dim")
        return TrainingJob(
            **sizes, shape=AttentionShape(**shape), workers_per_node=self.workers_per_node
        )

    def _known(self, preset: Any, *names: str) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        missing = [name for name in names if name not in given]
        if missing and preset is None:
            options = " ".join("--" + name.replace("_", "-") for name in missing)
            raise ValueError(
                f"missing {options}; a file of lengths says nothing about the job (only "
                f"{', '.join(PRESET_JOBS)} have one)."
            )
        return {name: getattr(preset, name) for name in missing} | given


def read_seeds(text: str) -> tuple[int, ...]:
    """Numbers with commas.

    Raises:
        ValueError: anything else, or a seed twice.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise ValueError(f"--seeds ({text!r}) must be different numbers with commas; try 0,1,2,3.")
    longest = max(map(len, words))
    if longest > MAX_DIGITS:
        raise ValueError(
            f"--seeds has a number of {longest} digits; at most {MAX_DIGITS} are read; try 0,1,2,3."
        )
    return tuple(map(int, words))


def read_windows(
    source: str, job: TrainingJob, *, seeds: Sequence[int], steps: int, pack: str
) -> tuple[Corpus, list[LengthRows]]:
    """The first optimizer steps of the corpus of each seed.

    Raises:
        ValueError: the steps are too many, or the corpus is damaged or too short.
    """
    _check_count(job.global_batch_size, len(seeds), steps)
    windows, packing = [], ""
    for seed in seeds:
        request = CorpusRequest(
            source=source, pack=pack, seed=seed, num_sequences=steps * job.global_batch_size
        )
        corpus = load_corpus(
            request,
            seq_length=job.seq_length,
            global_batch_size=job.global_batch_size,
            context_parallel_size=job.context_parallel_size,
        )
        count = corpus.num_windows(job.global_batch_size)
        if count < steps:
            raise ValueError(f"{source} has {count} steps, --steps is {steps}; try {count}.")
        windows += [corpus.window(index, job.global_batch_size) for index in range(steps)]
        packing = corpus.packing
    packing = packing.replace(f"seed {seeds[-1]}", f"seeds {', '.join(map(str, seeds))}")
    name = source if source in PRESET_JOBS else Path(source).name
    described = Corpus(name=name, packing=packing, seeds=tuple(seeds), num_windows=len(windows))
    return described, windows


def _check_count(global_batch_size: int, num_seeds: int, steps: int) -> None:
    """Refuse what would take hours and gigabytes: the message comes at once instead."""
    of_a_step = global_batch_size * num_seeds
    if steps * of_a_step > MAX_SEQUENCES:
        fitting = MAX_SEQUENCES // of_a_step
        raise ValueError(
            f"--steps ({steps}) x global_batch_size ({global_batch_size}) x {num_seeds} seeds are "
            f"{steps * of_a_step} packed sequences; at most {MAX_SEQUENCES} are replayed; try "
            + (f"--steps {fitting}." if fitting else "fewer seeds or a smaller --gbs.")
        )


def base_choices(job: TrainingJob, given: dict[str, Any]) -> LibraConfig:
    """P, B, H, M, tau and placer; where one is not given: P 8 or what divides DP, B = L / 256, H 16
    or the most that fits, M by size, tau 0.01.
    """
    sizes = [size for size in divisors(job.data_parallel_size) if size <= POOL_SIZE]
    splits = [h for h in divisors(job.shape.query_heads) if h <= HEAD_SPLIT]
    config = LibraConfig(
        pool_size=max(sizes),
        block_size=max(1, job.seq_length // BLOCKS),
        head_split=max(h for h in splits if fits(job.shape, h, 1)),
    )
    config = replace(config, **{name: value for name, value in given.items() if value is not None})
    config.check_shape(job.shape)
    return config


def inter_node(cost_model: str, given: float | None) -> tuple[float | None, str]:
    """GB/s between nodes that replace the cost model's, or None, and where the value is from."""
    if given is not None:
        return given, "given"
    if cost_model in BUILT_IN:
        return INTER_NODE_GB_S, "default with a built-in model"
    return None, "of the cost model"


def linked(model: CostModel, given: dict[str, float | None]) -> CostModel:
    """The model with the links that were given; ValueError if one is out of range."""
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name, value in known.items():
        if math.isinf(value):
            raise ValueError(f"{name} ({value}) must be finite; try {getattr(model, name):g}.")
    if known.get("overlap_loss", 0) > 1:
        raise ValueError(
            f"overlap_loss ({known['overlap_loss']:g}) must be from 0 to 1, the share of a hidden "
            f"transfer that computation loses; try {model.overlap_loss:g}."
        )
    for name, value in known.items():
        is_slow = name.endswith("_gb_s") and 0 < value < MIN_RATE
        if is_slow or value > MAX_LINK:
            rule = f"at least {MIN_RATE:g}" if is_slow else f"at most {MAX_LINK:g}"
            raise ValueError(f"{name} ({value:g}) must be {rule}; try {getattr(model, name):g}.")
    return replace(model, **known)

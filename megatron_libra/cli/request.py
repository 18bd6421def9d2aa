"""Read request files. In: POOL.json, WINDOW.json. Out: PoolRequest, WindowRequest.

    POOL.json    {"sequences": [[1200, 3000, 92], [4292]], "seq_length": 4292,
                  "context_parallel_size": 2,
                  "attention": {"query_heads": 8, "kv_heads": 2, "head_dim": 16},
                  "libra": {"pool_size": 2, "block_size": 512, "head_split": 2, "chunks": 2}}
    WINDOW.json  {"sequences": [[1200, 92], ...], "pool_size": 2, "data_parallel_size": 4}

seq_length, libra and its fields may be left out; libra.pool_size is then the number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_libra.cli.json_reader import JsonObject, read_json
from megatron_libra.cli.pool_size import MAX_TILES, check_tiles, check_tokens, check_workers
from megatron_libra.config import CHOICES, DEFAULT_CHUNKS, AttentionShape, LibraConfig
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool

__all__ = ["PoolRequest", "WindowRequest", "faults_of", "read_pool", "read_window"]

MAX_CELLS = 2**25
"""Blocks and samples x workers; above, a plan takes minutes and gigabytes."""
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_ELEMENT_BYTES = 16
"""With at most 2^31 tokens in a pool, pairs and bytes then fit 64-bit integers."""

Sequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What is planned."""

    sequences: Sequences
    """P lists of sample lengths in tokens."""
    seq_length: int | None
    """L in tokens; None: the longest sequence, rounded up as the layout needs."""
    context_parallel_size: int
    shape: AttentionShape
    config: LibraConfig

    def plan(self) -> PoolPlan:
        """The plan that is asked for; ValueError for a rule that only the planner knows."""
        return plan_pool(
            self.sequences,
            context_parallel_size=self.context_parallel_size,
            shape=self.shape,
            config=self.config,
            seq_length=self.seq_length,
        )


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """What order_window is called with."""

    sequences: Sequences
    """Sample lengths of the packed sequences of one global batch."""
    pool_size: int
    data_parallel_size: int
    pipeline_parallel_size: int
    scope: str


def read_pool(path: Path) -> PoolRequest:
    """Read POOL.json; ValueError names the fault."""
    return _pool_request(read_json(path))


def read_window(path: Path) -> WindowRequest:
    """Read WINDOW.json; ValueError names the fault."""
    return _window_request(read_json(path))


@contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Name the file in every ValueError that its content causes."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _pool_request(value: Any) -> PoolRequest:
    keys = ("sequences", "seq_length", "context_parallel_size", "attention", "libra")
    pool = JsonObject.of(value, "", keys, ("sequences", "context_parallel_size", "attention"))
    sequences = pool.lengths("sequences")
    request = PoolRequest(
        sequences=sequences,
        seq_length=pool.integer("seq_length") if pool.has("seq_length") else None,
        context_parallel_size=pool.integer("context_parallel_size"),
        shape=_shape(pool.values["attention"]),
        config=_config(pool.values.get("libra", {}), len(sequences)),
    )
    request.config.check_shape(request.shape)
    _check_size(request)
    return request


def _shape(value: Any) -> AttentionShape:
    keys = tuple(field.name for field in fields(AttentionShape))
    attention = JsonObject.of(value, "attention.", keys, ("query_heads", "kv_heads", "head_dim"))
    return AttentionShape(
        query_heads=attention.integer("query_heads", maximum=MAX_HEADS),
        kv_heads=attention.integer("kv_heads", maximum=MAX_HEADS),
        head_dim=attention.integer("head_dim", 128, maximum=MAX_HEAD_DIM),
        bytes_per_element=attention.integer("bytes_per_element", 2, maximum=MAX_ELEMENT_BYTES),
    )


def _config(value: Any, num_sequences: int) -> LibraConfig:
    names = tuple(field.name for field in fields(LibraConfig))
    libra = JsonObject.of(value, "libra.", names, ())
    values: dict[str, Any] = {"pool_size": num_sequences}
    for field in fields(LibraConfig):
        if libra.has(field.name):
            # chunks alone has no default value: it goes by the size of the layer
            default = DEFAULT_CHUNKS if field.default is None else field.default
            values[field.name] = _read_as(libra, field.name, default)
    if values["pool_size"] != num_sequences:
        raise ValueError(
            f"libra.pool_size ({values['pool_size']}) must be the number of sequences "
            f"({num_sequences}), one for each slot; set it to {num_sequences}, or leave it out."
        )
    return LibraConfig(**values)


def _read_as(libra: JsonObject, name: str, default: Any) -> bool | int | float | str:
    """A field, read as the type of its default."""
    if isinstance(default, bool):
        return libra.flag(name, default)
    if isinstance(default, int):
        return libra.integer(name, default, minimum=min(default, 1))
    if isinstance(default, float):
        return libra.number(name, default)
    return libra.text(name, default)


def _check_size(request: PoolRequest) -> None:
    """Refuse what would take minutes or overflow: the message comes at once instead."""
    num_slots, size = len(request.sequences), request.context_parallel_size
    longest = max(sum(lengths) for lengths in request.sequences)
    num_tokens = num_slots * max(request.seq_length or 0, longest)
    check_tokens(
        num_tokens,
        f"{num_slots} sequences of {num_tokens // num_slots} tokens",
        "use a smaller pool or shorter sequences",
    )
    check_workers(
        num_slots * size,
        f"{num_slots} sequences x context_parallel_size ({size})",
        "use a smaller pool or CP size",
    )
    block = request.config.block_size
    blocks = sum(sum(lengths) // block + 2 * size for lengths in request.sequences)
    tiles = blocks * request.config.head_split
    coarser = f"try {block * (tiles // MAX_TILES + 1)}"
    check_tiles(tiles, f"libra.block_size ({block})", coarser)
    samples = sum(map(len, request.sequences))
    if (samples + blocks) * num_slots * size > MAX_CELLS:
        raise ValueError(
            f"{samples} samples and {blocks} blocks on {num_slots * size} workers are too many for "
            f"one plan (rows x workers above {MAX_CELLS}); use a smaller pool or larger blocks."
        )


def _window_request(value: Any) -> WindowRequest:
    required = ("sequences", "pool_size", "data_parallel_size")
    keys = (*required, "scope", "pipeline_parallel_size")
    window = JsonObject.of(value, "", keys, required)
    scope = window.text("scope", "microbatch")
    if scope not in CHOICES["vrsp_scope"]:
        raise ValueError(f"scope ({scope!r}) must be one of {', '.join(CHOICES['vrsp_scope'])}.")
    sequences = window.lengths("sequences")
    data_parallel_size = window.integer("data_parallel_size")
    if data_parallel_size > len(sequences):
        raise ValueError(
            f"data_parallel_size ({data_parallel_size}) must be at most the number of sequences "
            f"({len(sequences)}); each replica gets one in each microbatch; try {len(sequences)}."
        )
    return WindowRequest(
        sequences=sequences,
        pool_size=window.integer("pool_size"),
        data_parallel_size=data_parallel_size,
        pipeline_parallel_size=window.integer("pipeline_parallel_size"),
        scope=scope,
    )

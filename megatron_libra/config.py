"""What a user chooses (LibraConfig) and the attention layer it is chosen for (AttentionShape).

In: plain values. Out: two frozen dataclasses, checked once, here. Everything inside trusts them.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Literal, SupportsIndex, get_args

__all__ = [
    "DEFAULT_CHUNKS",
    "DEFAULT_LOAD_SLACK",
    "MAX_INTEGER",
    "AttentionShape",
    "LibraConfig",
    "positive_integer",
]

MAX_INTEGER = 2**31 - 1
"""Sizes and positions travel as int32."""
DEFAULT_CHUNKS = 4
"""M of the paper, and the most where the size of the layer decides."""
DEFAULT_LOAD_SLACK = 0.01
"""tau; the paper has 0.03 (docs/simulator.md compares them)."""

Layout = Literal["zigzag", "contiguous"]
KVFetch = Literal["prefix", "group"]
VRSPScope = Literal["auto", "microbatch", "step", "pipeline"]
BackwardKV = Literal["save", "refetch"]


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def positive_integer(name: str, value: object) -> int:
    """The value as an int: the integers of NumPy are welcome, booleans and floats are not.

    Raises:
        ValueError: it is no integer from 1 to MAX_INTEGER; the message has its name.
    """
    number = 0 if isinstance(value, bool) or not hasattr(value, "__index__") else _index(value)
    if not 1 <= number <= MAX_INTEGER:
        raise ValueError(
            f"{name} ({value!r}) must be an integer of at least 1 and at most {MAX_INTEGER}; "
            f"try {name}=1."
        )
    return number


def whole_number(name: str, value: object) -> int:
    """As positive_integer, but 0 is welcome too."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:  # an array
            number = -1
        if 0 <= number <= MAX_INTEGER:
            return number
    raise ValueError(
        f"{name} ({value!r}) must be an integer from 0 to {MAX_INTEGER}; try {name}=0."
    )


def _index(value: SupportsIndex) -> int:
    """operator.index, but 0 where an array or a boolean of NumPy has no index."""
    try:
        return operator.index(value)
    except TypeError:
        return 0


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        object.__setattr__(owner, name, positive_integer(name, getattr(owner, name)))


def _number(name: str, value: object, example: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} ({value!r}) must be a number; try {example}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is beyond every float; try {example}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of one attention layer as one worker sees them (with tensor parallelism: its own
    heads).
    """

    query_heads: int
    """h_q, number of query heads."""
    kv_heads: int
    """h_kv, number of key/value heads; divides query_heads."""
    head_dim: int
    """d, elements of one head, the same for queries, keys and values."""
    bytes_per_element: int = 2
    """Bytes of one element of Q, K, V and O (2 for bf16); used to count traffic."""

    def __post_init__(self) -> None:
        _require_positive(self, "query_heads", "kv_heads", "head_dim", "bytes_per_element")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"kv_heads ({self.kv_heads}) must divide query_heads ({self.query_heads}); "
                f"try one of {divisors(self.query_heads)}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraConfig:
    """Every choice of a run; the integration's `--libra-*` flags mirror the fields."""

    pool_size: int = 8
    """P, data-parallel replicas (packed sequences) of one sequence pool; divides the DP size."""
    block_size: int = 4096
    """B, the most tokens of one sequence block."""
    head_split: int = 1
    """H, head shards; divides the query heads, and divides or is divided by the kv heads."""
    chunks: int | None = None
    """M, overlapped head chunks; divides query heads / H. None: by what is exchanged, at most 4."""
    load_slack: float = DEFAULT_LOAD_SLACK
    """tau, ratio by which a worker may exceed the mean load to save traffic (0.01 = 1 %)."""
    token_pairs: int = 0
    """Pairs that a query token costs besides its own: 0 (paper), about 500 for short samples."""
    placer: str = "home_first"
    """Who computes which tile: home_first (default), paper (Algorithm 2), ulysses, home."""
    kv_fetch: KVFetch = "prefix"
    """Keys a worker receives of a sample: the causal prefix, or the whole group (the paper)."""
    layout: Layout = "zigzag"
    """Tokens of CP rank c: pieces c and 2CP-1-c of 2CP (zigzag), or piece c of CP."""
    vrsp_scope: VRSPScope = "auto"
    """What VRSP balances: pools (microbatch), step sums (step), both (pipeline); auto fits PP."""
    backward_kv: BackwardKV = "save"
    """Backward keeps the received Q, K, V of forward (save) or transfers them again (refetch)."""
    transport: str = "auto"
    """How rows travel: auto, nccl, gloo, symmetric (copy engines inside a node, NCCL between)."""
    kernel: str = "auto"
    """Attention kernel: auto (the best that runs here), fa4, flash_attn, torch_flash, reference."""
    deterministic: bool = False
    """Same bits in every run: refuse kernels whose backward sums in a free order."""
    plan_ahead: int = 2
    """Plans made in the background before they are needed, in microbatches."""
    plan_timeout_s: float = 300.0
    """Seconds after which a missing plan is an error instead of a wait."""

    def __post_init__(self) -> None:
        _require_positive(self, "pool_size", "block_size", "head_split", "plan_ahead")
        if self.chunks is not None:
            _require_positive(self, "chunks")
        object.__setattr__(self, "token_pairs", whole_number("token_pairs", self.token_pairs))
        for name, example in (("load_slack", 0.01), ("plan_timeout_s", 300)):
            object.__setattr__(self, name, _number(name, getattr(self, name), example))
        if not isinstance(self.deterministic, bool):
            raise ValueError(
                f"deterministic ({self.deterministic!r}) must be True or False; try True."
            )
        if not 0 <= self.load_slack < 1:
            raise ValueError(f"load_slack ({self.load_slack!r}) must be in [0, 1); try 0.01.")
        if not self.plan_timeout_s > 0:
            raise ValueError(f"plan_timeout_s ({self.plan_timeout_s!r}) must be above 0; try 300.")
        for name, choices in CHOICES.items():
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} ({getattr(self, name)!r}) must be one of {', '.join(choices)}."
                )

    @property
    def most_chunks(self) -> int:
        """The most chunks that a plan may have: M, or 4 where the exchange decides."""
        return DEFAULT_CHUNKS if self.chunks is None else self.chunks

    def check_shape(self, shape: AttentionShape) -> None:
        """Raise ValueError unless H and M cut this shape's heads evenly (see plan/heads.py)."""
        chunks = 1 if self.chunks is None else self.chunks
        width = shape.query_heads // self.head_split
        if shape.query_heads % self.head_split:
            raise ValueError(
                f"head_split ({self.head_split}) must divide query_heads ({shape.query_heads}); "
                f"try one of {divisors(shape.query_heads)}."
            )
        if width % chunks:
            raise ValueError(
                f"chunks ({chunks}) must divide query_heads / head_split ({width}); "
                f"try one of {divisors(width)}."
            )
        _check_nested(
            shape, self.head_split, "head_split", [d for d in divisors(shape.query_heads)]
        )
        _check_nested(
            shape,
            self.head_split * chunks,
            "head_split * chunks",
            [d for d in divisors(shape.query_heads) if d % self.head_split == 0],
        )


def _check_nested(shape: AttentionShape, parts: int, name: str, candidates: list[int]) -> None:
    """A part of the query heads must hold whole kv heads, or lie inside the queries of one."""
    if shape.kv_heads % parts and parts % shape.kv_heads:
        valid = [d for d in candidates if shape.kv_heads % d == 0 or d % shape.kv_heads == 0]
        raise ValueError(
            f"{name} ({parts}) must divide kv_heads ({shape.kv_heads}) or be a multiple of it; "
            f"try one of {valid}."
        )


CHOICES: dict[str, tuple[str, ...]] = {
    "placer": ("home_first", "paper", "ulysses", "home"),
    "kv_fetch": get_args(KVFetch),
    "layout": get_args(Layout),
    "vrsp_scope": get_args(VRSPScope),
    "backward_kv": get_args(BackwardKV),
    "transport": ("auto", "nccl", "gloo", "symmetric"),
    "kernel": ("auto", "fa4", "flash_attn", "torch_flash", "reference"),
}
"""The closed choices by field name."""

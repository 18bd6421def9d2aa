"""The training job that is simulated. In: sizes. Out: TrainingJob, checked once, here.

Ranks follow Megatron's order (tensor, context, data, pipeline), so the workers of a pool are
neighbours: worker w sits on node w // workers_per_node, counted from the pool's first node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_libra.config import AttentionShape, divisors

__all__ = ["PRESET_JOBS", "TrainingJob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """Parallel sizes and attention heads of a run."""

    seq_length: int
    """L, tokens of a packed sequence."""
    context_parallel_size: int
    """CP, workers that share a packed sequence."""
    data_parallel_size: int
    """DP, replicas; divides global_batch_size."""
    global_batch_size: int
    """GBS, packed sequences of an optimizer step."""
    shape: AttentionShape
    """Heads of one tensor-parallel rank."""
    pipeline_parallel_size: int = 1
    """PP, pipeline stages."""
    num_layers: int = 1
    """Attention layers of the model, over all stages; 1 gives times per layer."""
    other_ms: float = 0.0
    """Milliseconds of one microbatch on one stage besides core attention, forward and backward."""
    workers_per_node: int = 8
    """GPUs of a node / tensor-parallel size."""
    lockstep: bool = False
    """All replicas wait for each other in every microbatch, as with FSDP or with expert groups that
    span pools; otherwise only at the gradient sync."""

    def __post_init__(self) -> None:
        for name in (
            "seq_length",
            "context_parallel_size",
            "data_parallel_size",
            "global_batch_size",
            "pipeline_parallel_size",
            "num_layers",
            "workers_per_node",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1; try 1.")
        if self.global_batch_size % self.data_parallel_size:
            raise ValueError(
                f"data_parallel_size ({self.data_parallel_size}) must divide global_batch_size "
                f"({self.global_batch_size}); try one of {divisors(self.global_batch_size)}."
            )
        pieces = 2 * self.context_parallel_size
        if pieces > self.seq_length and self.seq_length % 2 == 0:
            raise ValueError(
                f"context_parallel_size ({self.context_parallel_size}) must be at most half of "
                f"seq_length ({self.seq_length}); try "
                f"{math.gcd(self.seq_length // 2, 8)}."
            )
        if self.seq_length % pieces:
            raise ValueError(
                f"seq_length ({self.seq_length}) must be a multiple of 2 * context_parallel_size "
                f"({pieces}); try {-(-self.seq_length // pieces) * pieces}{self._other_size()}."
            )
        if not 0 <= self.other_ms < math.inf:
            raise ValueError(f"other_ms ({self.other_ms}) must be at least 0; try 0.")

    def _other_size(self) -> str:
        """A way out that keeps an even seq_length: the next smaller CP size that cuts it."""
        if self.seq_length % 2:
            return ""
        sizes = divisors(self.seq_length // 2)
        return f" or CP {max(size for size in sizes if size <= self.context_parallel_size)}"

    @property
    def num_microbatches(self) -> int:
        """GA, forward and backward passes of a replica in one step."""
        return self.global_batch_size // self.data_parallel_size

    @property
    def stage_layers(self) -> int:
        """Attention layers of the largest pipeline stage."""
        return -(-self.num_layers // self.pipeline_parallel_size)


PRESET_JOBS = {
    "longtail-256k": TrainingJob(
        seq_length=262_144,
        context_parallel_size=8,
        data_parallel_size=32,
        global_batch_size=128,
        shape=AttentionShape(query_heads=128, kv_heads=16, head_dim=256),
    ),
    "longtail-1m": TrainingJob(
        seq_length=1_048_576,
        context_parallel_size=16,
        data_parallel_size=16,
        global_batch_size=32,
        shape=AttentionShape(query_heads=128, kv_heads=4, head_dim=256),
    ),
}
"""The job of each preset corpus: the layouts of the paper's microbenchmarks (section 6.3)."""

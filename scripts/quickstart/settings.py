"""The job of the quickstart, in one place. configs/tiny_cpu.yaml has what is not said here."""

from __future__ import annotations

from pathlib import Path

import yaml

from megatron_libra import AttentionShape, LibraConfig

__all__ = [
    "BASELINE",
    "CONTEXT_PARALLEL",
    "DATA_PARALLEL",
    "GLOBAL_BATCH",
    "ITERATIONS",
    "LIBRA",
    "RUNS",
    "SEQ_LENGTH",
    "SHAPE",
    "write_run_file",
]

TINY_CPU = Path(__file__).resolve().parents[2] / "configs" / "tiny_cpu.yaml"
DATA_PARALLEL = 2
CONTEXT_PARALLEL = 2
SEQ_LENGTH = 4096
GLOBAL_BATCH = 4
ITERATIONS = 20
SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=16, bytes_per_element=4)
LIBRA = LibraConfig(pool_size=2, block_size=256, head_split=2, chunks=2)

BASELINE = "ulysses"
RUNS = {
    BASELINE: ["--context-parallel-impl", "ulysses"],
    "paper": ["--context-parallel-impl", "libra", "--libra-placer", "paper"],
    "libra": ["--context-parallel-impl", "libra"],
}
"""What is compared, by the name in tables and plots; the runs differ in these flags alone."""


def write_run_file(path: Path, *, data_path: Path, vocab_size: int) -> Path:
    """Write the run file that all runs share: configs/tiny_cpu.yaml on the corpus; returns path."""
    settings = yaml.safe_load(TINY_CPU.read_text(encoding="utf-8"))
    settings.pop("mock-data", None)
    settings |= {
        "data-path": str(data_path),
        "split": "100,0,0",
        "eval-iters": 0,
        "vocab-size": vocab_size,
        "context-parallel-size": CONTEXT_PARALLEL,
        "seq-length": SEQ_LENGTH,
        "max-position-embeddings": SEQ_LENGTH,
        "global-batch-size": GLOBAL_BATCH,
        "train-iters": ITERATIONS,
        "num-attention-heads": SHAPE.query_heads,
        "num-query-groups": SHAPE.kv_heads,
        "kv-channels": SHAPE.head_dim,
        "libra-pool-size": LIBRA.pool_size,
        "libra-block-size": LIBRA.block_size,
        "libra-head-split": LIBRA.head_split,
        "libra-chunks": LIBRA.chunks,
    }
    header = "# configs/tiny_cpu.yaml on the corpus of the quickstart; written by it.\n"
    path.write_text(header + yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path

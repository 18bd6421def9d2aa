"""Two GPUs, NCCL, bf16: libra's losses against Ulysses on the same executor, without device syncs.

Needs neither TransformerEngine nor Apex. Skipped, never faked, where there are fewer than two GPUs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.harness import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ITERATIONS = 20
TOLERANCE = 6.5e-4
"""Largest difference of the losses of one iteration, absolute."""

FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 16 "
    "--group-query-attention --num-query-groups 4 --kv-channels 128 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights --transformer-impl local "
    "--seq-length 16384 --max-position-embeddings 16384 --mock-data --num-workers 1 "
    "--tokenizer-type NullTokenizer --vocab-size 4096 --dataloader-inter-document-masking "
    f"--micro-batch-size 1 --global-batch-size 8 --train-iters {ITERATIONS} --lr 0.0003 "
    "--min-lr 0.0003 --lr-decay-style constant --clip-grad 1.0 --eval-iters 1 --eval-interval 1000 "
    "--log-interval 1 --bf16 --use-distributed-optimizer --overlap-grad-reduce "
    "--calculate-per-token-loss --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-rope-fusion --no-bias-swiglu-fusion "
    "--libra-block-size 2048 --libra-chunks 2"
)


def losses(directory: Path, name: str, *flags: str) -> list[float]:
    """Losses by iteration of one run on two GPUs."""
    log = directory / f"{name}.jsonl"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tests.integration.sync_free", *FLAGS, "--libra-log-file", str(log), *flags),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads(line)["losses"]["lm loss"] for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dp2", ["--libra-pool-size", "2"]),
        ("cp2", ["--libra-pool-size", "1", "--context-parallel-size", "2"]),
    ],
)
def test_losses_are_those_of_ulysses(name: str, sizes: list[str], tmp_path: Path) -> None:
    expected = losses(tmp_path, "ulysses", *sizes, "--context-parallel-impl", "ulysses")
    found = losses(tmp_path, name, *sizes, "--context-parallel-impl", "libra")
    assert len(found) == len(expected) == ITERATIONS
    assert found == pytest.approx(expected, rel=0, abs=TOLERANCE)

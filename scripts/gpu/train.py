"""Train on the GPUs of one machine with ulysses and with libra, and compare the losses.

    python scripts/gpu/train.py [--gpus 2] [--out gpu_out]

A GPT of 4 layers (8 query heads and 2 kv heads of 128) in bfloat16 on the corpus of the quickstart,
packs of 32,768 tokens, two a GPU and step, 20 iterations: once with all GPUs as data parallel
replicas (one pool of all), once with all as one context parallel group. The largest difference of a
step's loss must be within 6.5e-4. One more run of each watches for device syncs of libra's own.
Functions that Megatron gives to torch.compile run eagerly, unless TORCHDYNAMO_DISABLE is set.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from bench_runs import EAGER, end

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "quickstart"))
LIMIT = 6.5e-4
MODEL = shlex.split("""
--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 8
--group-query-attention --num-query-groups 2 --kv-channels 128 --position-embedding-type rope
--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
--untie-embeddings-and-output-weights --seq-length 32768 --max-position-embeddings 32768
--tokenizer-type NullTokenizer --vocab-size 257 --dataloader-inter-document-masking --split 100,0,0
--micro-batch-size 1 --train-iters 20 --eval-iters 0 --eval-interval 1000
--log-interval 1 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0
--calculate-per-token-loss --seed 1234 --bf16 --use-distributed-optimizer --transformer-impl local
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion
--no-persist-layer-norm --no-bias-swiglu-fusion --num-workers 2
--libra-block-size 512 --libra-head-split 2 --libra-chunks 2
""")


def losses(name: str, gpus: int, flags: list[str], out: Path) -> dict[int, float]:
    """Train once; returns the loss of every iteration."""
    records = out / f"{name}.jsonl"
    records.unlink(missing_ok=True)
    run(name, gpus, [*flags, "--libra-log-file", str(records)], out, "pretrain_gpt.py")
    found = map(json.loads, records.read_text().splitlines())
    return {record["iteration"]: record["losses"]["lm loss"] for record in found}


def run(name: str, gpus: int, flags: list[str], out: Path, script: str) -> None:
    """Train once; leaves with the end of the log if that fails."""
    log = out / f"{name}.log"
    words = [*MODEL, "--global-batch-size", str(2 * gpus)]
    words += ["--data-path", str(out / "corpus"), "--data-cache-path", str(out / "cache")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus)]
    command += ["--standalone", "-m", "megatron_libra.run", str(ROOT / "scripts" / script), *words]
    # Megatron wants this variable for context parallelism on GPUs before Blackwell
    environment = EAGER | os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with log.open("w") as file:
        done = subprocess.run(
            [*command, *flags], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )
    text = log.read_text()
    if done.returncode:
        raise SystemExit(f"{name} failed, see {log}:\n{end(text)}")
    for line in text.splitlines():
        if line.startswith("device syncs"):
            print(f"{name}: {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu_out")
    args = parser.parse_args()
    if args.gpus < 1 or torch.cuda.device_count() < args.gpus:
        parser.error(
            f"--gpus ({args.gpus}) must be at least 1 and at most the GPUs that are here "
            f"({torch.cuda.device_count()}); ./scripts/quickstart.sh compares losses without any."
        )
    args.out.mkdir(parents=True, exist_ok=True)
    from corpus import build_corpus

    build_corpus(args.out / "corpus")
    worst = 0.0
    for layout, cp, pool in (("dp", 1, args.gpus), ("cp", args.gpus, 1)):
        common = ["--context-parallel-size", str(cp)]
        ulysses = ["--context-parallel-impl", "ulysses", *common]
        libra = ["--context-parallel-impl", "libra", "--libra-pool-size", str(pool), *common]
        base = losses(f"{layout}-ulysses", args.gpus, ulysses, args.out)
        ours = losses(f"{layout}-libra", args.gpus, libra, args.out)
        run(f"{layout}-sync", args.gpus, libra, args.out, "gpu/pretrain_no_sync.py")
        if len(base) < 20 or set(base) != set(ours):
            raise SystemExit(f"{layout}: {len(base)} and {len(ours)} losses; see {args.out}")
        difference = max(abs(base[i] - ours[i]) for i in base)
        worst = max(worst, difference)
        print(
            json.dumps(
                {
                    "layout": layout,
                    "gpus": args.gpus,
                    "context_parallel_size": cp,
                    "pool_size": pool,
                    "max_loss_difference": difference,
                    "limit": LIMIT,
                    "loss_ulysses": list(base.values()),
                    "loss_libra": list(ours.values()),
                }
            ),
            flush=True,
        )
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

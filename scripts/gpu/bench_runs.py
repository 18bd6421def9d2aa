"""Train a script and read its clock. In: a model, a run. Out: times, losses, pairs.

The corpus has the document lengths of a preset, scaled; its tokens follow a simple rule with noise,
so that there is something to learn.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from bench_alone import KernelCalls
from bench_common import ROOT, Case, World
from bench_forwards import PATTERN, read_forwards
from bench_models import VOCAB_SIZE, Model
from bench_timing import alternate, medians
from bench_work import runtime_of, scaled_rows

from megatron_libra import AttentionShape, LibraConfig, plan_pool
from megatron_libra.data.corpora import CORPORA, LongTail

__all__ = ["EAGER", "Run", "RunFailed", "each_ms", "end", "kernel_rate", "write_corpus"]

EOD = VOCAB_SIZE - 1
RECORD = re.compile(
    r"iteration +\d+/.*?elapsed time per iteration \(ms\): ([0-9.]+).*?lm loss: [0-9.E+-]+"
)
STAGE = re.compile(r"^\[([^\]]+)\] datetime: (\S+ \S+)", re.MULTILINE)
STOP_SECONDS = 40
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Megatron's warm-up calls torch.compile for fused functions that these models use for residual
sums at most; it takes tens of seconds in every process (21 s on a CPU, with a warm cache)."""
COMMON = shlex.split("""
--group-query-attention --position-embedding-type rope --normalization RMSNorm --swiglu
--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --split 100,0,0
--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer
--dataloader-inter-document-masking --micro-batch-size 1 --eval-iters 0 --eval-interval 100000
--log-interval 1 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 1
--clip-grad 1.0 --calculate-per-token-loss --seed 1234 --transformer-impl local
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion
--no-persist-layer-norm --no-bias-swiglu-fusion
""")
ON_GPU = ["--bf16", "--use-distributed-optimizer", "--num-workers", "2"]
ON_CPU = ["--libra-cpu", "--distributed-backend", "gloo", "--num-workers", "0"]


class RunFailed(RuntimeError):
    """A training did not end well; the message has the end of its log."""


def write_corpus(folder: Path, preset: str, seq_length: int, num_tokens: int) -> Path:
    """Write documents of at least so many tokens, unless they are there; returns the prefix."""
    prefix = folder / f"corpus-{preset}-{seq_length}-{num_tokens}"
    stamp = prefix.with_suffix(".stamp")
    if stamp.exists():
        return prefix
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    given, rng = CORPORA[preset], np.random.default_rng(0)
    median = max(1, round(given.median * seq_length / given.seq_length))
    tail = LongTail(seq_length=seq_length - 1, sigma=given.sigma, median=median)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    while num_tokens > 0:
        for document in documents(tail.document_lengths(1000, rng), rng):
            builder.add_document(document, [len(document)])
            num_tokens -= len(document)
            if num_tokens <= 0:
                break
    builder.finalize(f"{prefix}.idx")
    stamp.write_text("complete")
    return prefix


def documents(lengths: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Tokens in steps of one size, which differs between documents; a tenth is noise. Then EOD."""
    starts, steps = rng.integers(0, EOD, (2, len(lengths)))
    stops = np.cumsum(lengths + 1)
    place = np.arange(stops[-1]) - np.repeat(stops - lengths - 1, lengths + 1)
    tokens = (np.repeat(starts, lengths + 1) + np.repeat(steps, lengths + 1) * place) % EOD
    noise = np.flatnonzero(rng.random(len(tokens)) < 0.1)
    tokens[noise] = rng.integers(0, EOD, len(noise))
    tokens[stops - 1] = EOD
    return np.split(tokens.astype(np.uint16), stops[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training. Every flag is said here or in Model."""

    name: str
    model: Model
    gpus: int
    context_parallel: int
    pipeline_parallel: int
    global_batch: int
    seq_length: int
    iterations: int
    device: str
    corpus: Path
    libra: tuple[str, ...]
    """--context-parallel-impl and the flags of libra."""
    script: tuple[str, ...] = ("pretrain_gpt.py",)
    """In scripts/, and flags of its own."""
    connections: str
    """CUDA_DEVICE_MAX_CONNECTIONS, or unset; Megatron asks for 1 with context parallelism. CUDA has
    several queues with both, for ulysses and libra alike; 1 and --libra-keep-one-queue is one."""

    @property
    def data_parallel(self) -> int:
        """Replicas."""
        return self.gpus // (self.context_parallel * self.pipeline_parallel)

    def command(self, folder: Path) -> list[str]:
        """What is run."""
        sizes = {
            "seq-length": self.seq_length,
            "max-position-embeddings": self.seq_length,
            "global-batch-size": self.global_batch,
            "train-iters": self.iterations,
            "context-parallel-size": self.context_parallel,
            "pipeline-model-parallel-size": self.pipeline_parallel,
            "vocab-size": VOCAB_SIZE,
            "data-path": self.corpus,
            "data-cache-path": folder / "cache",
            "libra-log-file": folder / "telemetry.jsonl",
        }
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self.gpus), "-m", "megatron_libra.run"),
            *(str(ROOT / "scripts" / self.script[0]), *self.script[1:]),
            *(*COMMON, *self.model.flags),
            *(ON_GPU if self.device == "cuda" else ON_CPU),
            *(f"--{name}={value}" for name, value in sizes.items()),
            *self.libra,
        ]

    def train(self, out: Path, seconds: float) -> Case:
        """Train; returns elapsed_ms and losses by iteration, libra's records, the forwards if the
        script writes them, and when Megatron had done what before its first iteration, in seconds
        since the launch.

        Raises:
            RunFailed: it failed, took longer, or logged fewer iterations.
        """
        folder = out / self.name
        folder.mkdir(parents=True, exist_ok=True)
        telemetry, log = folder / "telemetry.jsonl", folder / "train.log"
        for old in (telemetry, *folder.glob(PATTERN)):
            old.unlink(missing_ok=True)
        launched = time.time()
        code = self._execute(folder, log, seconds)
        text = log.read_text(errors="replace")
        found = RECORD.findall(text)
        lines = telemetry.read_text().splitlines() if telemetry.exists() else []
        if code or not len(found) == len(lines) == self.iterations:
            what = "took too long" if code is None else f"ended with {code}"
            raise RunFailed(
                f"{self.name} {what} after {len(found)} iterations, {log}:\n{end(text)}"
            )
        records = [json.loads(line) for line in lines]
        return {
            "elapsed_ms": each_ms([float(ms) for ms in found]),
            "losses": [record["losses"]["lm loss"] for record in records],
            "wall_s": time.time() - launched,
            "startup_s": {
                stage: datetime.fromisoformat(when).timestamp() - launched
                for stage, when in STAGE.findall(text)
            },
            "telemetry": records,
            "forwards": read_forwards(folder),
        }

    def _execute(self, folder: Path, log: Path, seconds: float) -> int | None:
        """The exit status; None if it was stopped."""
        command = self.command(folder)
        environment = EAGER | os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        if self.connections != "unset":
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = self.connections
        with log.open("w") as output:
            print(f"+ {shlex.join(command)}", file=output, flush=True)
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            try:
                return process.wait(timeout=max(1.0, seconds))
            except subprocess.TimeoutExpired:
                return None
            finally:
                stop(process)


def each_ms(logged: list[float]) -> list[float]:
    """Times of the iterations. Megatron's second line is the mean of the first two iterations: the
    first line, which comes whatever --log-interval is, does not begin a new mean."""
    times = list(logged)
    if len(times) > 1:
        times[1] = 2 * logged[1] - logged[0]
    return times


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, and by it its workers."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end(text: str, count: int = 30) -> str:
    """The end of a log, before the launcher's own summary."""
    lines = text.splitlines()
    stop_at = next((i for i, line in enumerate(lines) if "elastic/multiprocessing" in line), None)
    return "\n".join(lines[:stop_at][-count:])


def kernel_rate(world: World, case: Case) -> Case:
    """Milliseconds of a causal pair in the bare kernel, of one layer: forward and backward, and one
    forward, which recomputing adds."""
    shape = AttentionShape(**case["shape"])
    config = LibraConfig(pool_size=1, kernel=case["kernel"])
    runtime = runtime_of(world, config, shape)
    total_ms, total_pairs = {"both": 0.0, "forward": 0.0}, 0
    for row in scaled_rows(case["preset"], case["seq_length"], 4, seed=0):
        plan = plan_pool([row], context_parallel_size=1, shape=shape, config=config)
        calls = KernelCalls(plan.worker_plan(0), runtime.kernel, world)
        found = medians(
            alternate({name: getattr(calls, name) for name in total_ms}, world, repeats=3)
        )
        total_ms = {name: ms + found[name] for name, ms in total_ms.items()}
        total_pairs += int(plan.loads.sum())
    return {
        "kernel": runtime.kernel.name,
        "ms_per_pair": total_ms["both"] / total_pairs,
        "forward_ms_per_pair": total_ms["forward"] / total_pairs,
    }

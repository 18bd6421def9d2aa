"""Compile FlashAttention-4's kernels before the first step, on a machine with or without a GPU.

    python scripts/kernel_cache.py --out DIR --heads 32,4,128 --heads 128,16,256

In: head shapes of attention layers. Out: a folder of object files and what to export so that
training loads them instead of compiling (about 8 s for each head shape, once in every process).

What the package specializes, for one GPU architecture, is in its compile keys: dtype, head dim,
query heads per kv head, more than 256 entries in a call or not, and (backward) determinism. Lengths
and the numbers of heads and entries are not; the hints that would add variants are fixed by
megatron_libra.executor.kernels.fa4. A head split H and M chunks give calls with any divisor of
query heads / kv heads for each kv head, so all divisors are compiled.

The folder is valid for one version of the package and of the compilers below it, and for one
Python version (their names are hashed); training must be able to write to it: it keeps locks there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_libra.config import AttentionShape, divisors
from megatron_libra.executor.kernels.fa4 import Fa4Kernel, check_version
from megatron_libra.executor.kernels.interface import BoundRound, KernelUnavailable
from megatron_libra.plan.worker_plan import Round

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ARCHITECTURES = {"sm_90": ("sm_90a", 132), "sm_100": ("sm_100a", 148)}
"""Name for the compiler, and multiprocessors, which the package asks for where no GPU is."""
ENTRIES = {False: 2, True: 257}
"""More than 256 entries get kernels that look entries up in a table."""
ORDERED = {"no": (False,), "yes": (True,), "both": (False, True)}
CACHE = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


@dataclass(frozen=True)
class Specialization:
    """One forward and one backward kernel, with the small kernels around backward."""

    head_dim: int
    ratio: int
    """Query heads for each kv head of a call."""
    many_entries: bool
    deterministic: bool
    dtype: str

    def __str__(self) -> str:
        name = f"d {self.head_dim}, {self.ratio} query heads for each kv head, {self.dtype}"
        name += ", more than 256 entries" if self.many_entries else ""
        return name + (", deterministic" if self.deterministic else "")


def specializations(
    shapes: Sequence[AttentionShape], dtypes: Sequence[str], deterministic: Sequence[bool]
) -> list[Specialization]:
    """Every specialization that calls of these layers can need, the usual ones first."""
    ratios = sorted(
        {(s.head_dim, r) for s in shapes for r in divisors(s.query_heads // s.kv_heads)},
        key=lambda item: (-item[1], item[0]),
    )
    return [
        Specialization(head_dim, ratio, many, ordered, dtype)
        for ordered in deterministic
        for dtype in dtypes
        for many in (False, True)
        for head_dim, ratio in ratios
    ]


def fake_round(kernel: Fa4Kernel, many_entries: bool) -> BoundRound:
    """A round whose tensors have no memory; called under FakeTensorMode."""
    cu = np.arange(ENTRIES[many_entries] + 1, dtype=np.int32) * 128
    rows, device = int(cu[-1]), torch.device("cuda", 0)
    plan_round = Round(
        query_start=0, query_stop=rows, key_start=0, key_stop=rows, cu_queries=cu, cu_keys=cu,
        max_queries=128, max_keys=128,
    )  # fmt: skip
    cu_queries, cu_keys = (torch.empty(len(cu), dtype=torch.int32, device=device) for _ in "qk")
    return BoundRound(
        query_start=0, query_stop=rows, key_start=0, key_stop=rows, cu_queries=cu_queries,
        cu_keys=cu_keys, max_queries=128, max_keys=128,
        prepared=kernel.prepare(plan_round, device),
    )  # fmt: skip


def compile_one(spec: Specialization) -> float:
    """Call forward and backward on tensors without memory; return the seconds it took."""
    start, kernel = time.perf_counter(), Fa4Kernel(deterministic=spec.deterministic)
    # DLPack asks for the current device, also of a tensor without memory
    with FakeTensorMode(), mock.patch.object(torch.cuda, "current_device", return_value=0):
        bound_round = fake_round(kernel, spec.many_entries)

        def rows(heads: int) -> torch.Tensor:
            size = bound_round.query_stop, heads, spec.head_dim
            return torch.empty(size, dtype=DTYPES[spec.dtype], device="cuda:0")

        # two kv heads: an axis of one element would be compiled as a special case
        q, k, v, dout = rows(2 * spec.ratio), rows(2), rows(2), rows(2 * spec.ratio)
        out, lse = kernel.forward(q, k, v, bound_round, 1.0)
        kernel.backward(dout, q, k, v, out, lse, bound_round, 1.0)
    return time.perf_counter() - start


def compile_all(specs: Sequence[Specialization], jobs: int) -> Iterator[float]:
    """Seconds of each, in order; jobs > 1 compiles in as many processes."""
    if jobs == 1:
        yield from map(compile_one, specs)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(compile_one, specs)


def set_environment(out: Path, architecture: str) -> None:
    """What the package reads when it is imported: the folder, and the GPU that is not here."""
    compiler_name, multiprocessors = ARCHITECTURES[architecture]
    os.environ.update(
        dict(zip(CACHE, ("1", str(out)), strict=True)),
        FLASH_ATTENTION_ARCH=architecture,
        FLASH_ATTENTION_NUM_SMS=str(multiprocessors),
        CUTE_DSL_ARCH=compiler_name,
    )


def attention_shape(text: str) -> AttentionShape:
    """32,4,128 -> 32 query heads, 4 kv heads, head dim 128."""
    try:
        query_heads, kv_heads, head_dim = (int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 32,4,128") from None
    try:
        return AttentionShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n    ")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the cache; what is there is kept"
    )
    parser.add_argument(
        "--heads", type=attention_shape, action="append", required=True, metavar="Q,KV,D",
        help="query heads, kv heads and head dim of a layer on one rank; may be repeated",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bf16"], help="of Q, K, V")
    parser.add_argument(
        "--deterministic", choices=ORDERED, default="no", help="which backward kernels"
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_90", help="sm_90 is Hopper")
    parser.add_argument("--jobs", type=int, default=1, help="compile in this many processes")
    return parser.parse_args(argv)


def main() -> None:
    """Compile, say what was written and what to export."""
    args = arguments()
    try:
        check_version()
    except KernelUnavailable as reason:
        raise SystemExit(f"fa4: {reason}") from None
    out = args.out.resolve()
    set_environment(out, args.arch)
    specs = specializations(args.heads, args.dtype, ORDERED[args.deterministic])
    for number, (spec, seconds) in enumerate(
        zip(specs, compile_all(specs, args.jobs), strict=True), start=1
    ):
        print(f"{number}/{len(specs)}  {seconds:5.1f} s  {spec}", flush=True)
    sizes = [file.stat().st_size for file in out.rglob("*.o")]
    print(f"{len(sizes)} kernel files, {sum(sizes) / 1e6:.1f} MB. Then:\n")
    print(f"export {CACHE[0]}=1\nexport {CACHE[1]}={out}")


if __name__ == "__main__":
    main()

"""Training with libra against Megatron alone, on CPU: the same losses and gradient norms.

The reference is Megatron's own packed path at CP = 1 with dense core attention, on the same stages,
tensor-parallel ranks and experts. Everything is fp32 but where a test says bf16. Losses to 1e-5.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.integration.corpus import build_corpus
from tests.integration.harness import Record, call, train
from tests.integration.layouts import ITERATIONS, SEQ_LENGTH, Layout
from tests.integration.reference import dense_reference

MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-token-dispatcher-type alltoall --disable-bias-linear"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"
PAPER = (
    "--libra-placer paper --libra-kv-fetch group --libra-block-size 64 --libra-head-split 2 "
    "--libra-chunks 2"
)
STEP = "--libra-vrsp-scope step --libra-block-size 48 --libra-chunks 1"
MICROBATCH = "--libra-vrsp-scope microbatch --libra-block-size 100 --libra-chunks 4"
CONTIGUOUS = "--libra-layout contiguous --libra-block-size 64 --libra-chunks 2"
REFETCH = "--libra-backward-kv refetch --libra-block-size 32 --libra-chunks 2"
HOME = "--libra-placer home --libra-chunks 2"

LAYOUTS = {
    "dp2": Layout(dp=2, pool=2),
    "dp2-pools-of-one": Layout(dp=2, pool=1),
    "cp2": Layout(cp=2),
    "cp4": Layout(cp=4, libra=PAPER),
    "dp2-cp2": Layout(dp=2, cp=2, pool=2, libra=MICROBATCH),
    "dp2-cp2-paper": Layout(dp=2, cp=2, pool=2, libra=PAPER),
    "dp2-cp2-home": Layout(dp=2, cp=2, pool=2, libra=HOME),
    "dp2-cp2-ulysses": Layout(dp=2, cp=2, implementation="ulysses"),
    "dp4-pools-of-two": Layout(dp=4, pool=2, libra=STEP),
    "dp4-pool-of-four": Layout(dp=4, pool=4, libra=CONTIGUOUS),
    "pp2": Layout(pp=2, dp=2, pool=2),
    "pp2-cp2": Layout(pp=2, cp=2, libra=CONTIGUOUS),
    "pp2-vpp2": Layout(pp=2, vpp=2, cp=2),
    "pp4": Layout(pp=4, cp=2, libra=REFETCH),
    "tp2": Layout(tp=2, cp=2),
    "tp2-pp2": Layout(tp=2, pp=2, dp=2, pool=2),
    "tp2-pp4": Layout(tp=2, pp=4),
    "tp2-one-kv-head": Layout(
        tp=2, cp=2, flags="--num-query-groups 1", libra="--libra-head-split 2 --libra-chunks 2"
    ),
    "cp2-a-kv-head-each": Layout(
        cp=2, flags="--num-query-groups 8", libra="--libra-head-split 4 --libra-chunks 2"
    ),
    "cp2-learned-positions": Layout(cp=2, flags="--position-embedding-type learned_absolute"),
    "ep2": Layout(ep=2, dp=2, pool=2, flags=MOE),
    "ep2-cp2": Layout(ep=2, dp=2, cp=2, pool=2, flags=MOE),
    "recompute-selective": Layout(cp=2, dp=2, pool=2, flags=SELECTIVE),
    "recompute-full": Layout(pp=2, vpp=2, dp=2, pool=2, flags=FULL, libra=REFETCH),
    "distributed-optimizer": Layout(
        cp=2, dp=2, pool=2, flags="--use-distributed-optimizer --overlap-grad-reduce"
    ),
}


@functools.cache
def reference_of(layout: Layout, corpus: str) -> Record:
    """What Megatron alone does; one run for all layouts that share it."""
    return train(layout.world_size, layout.command_line(corpus), arrange=dense_reference)[-1]


def close(values: list[float], expected: list[float], tolerance: float) -> None:
    assert values == pytest.approx(expected, rel=tolerance), (values, expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_losses(name: str, corpus: str) -> None:
    layout = LAYOUTS[name]
    expected = reference_of(layout.reference, corpus)
    records = train(layout.world_size, layout.command_line(corpus))

    assert len(expected.losses) == ITERATIONS and expected.losses[0] > expected.losses[-1]
    close(records[-1].losses, expected.losses, 1e-5)
    for record in records:
        close(record.grad_norms, expected.grad_norms, 1e-4)


def _with_empty_documents(directory: Path) -> str:
    return build_corpus(directory, empty_every=20)


def test_documents_without_tokens(tmp_path: Path) -> None:
    """Their boundary is twice in the loader's cu_seqlens, and they are no samples of a plan."""
    corpus, layout = call(_with_empty_documents, tmp_path), Layout(dp=2, cp=2, pool=2)
    expected = train(1, layout.reference.command_line(corpus), arrange=dense_reference)[-1]
    record = train(layout.world_size, layout.command_line(corpus))[-1]
    close(record.losses, expected.losses, 1e-5)


def test_a_batch_size_that_grows(corpus: str) -> None:
    """Windows follow the schedule, which counts tokens: 4 sequences a step, then 8."""

    def scheduled(layout: Layout) -> list[str]:
        words = layout.command_line(corpus)
        at = words.index("--global-batch-size")
        return [
            *words[:at],
            "--step-batch-size-schedule",
            f"0:4 {8 * SEQ_LENGTH}:8",
            *words[at + 2 :],
        ]

    layout = Layout(dp=2, pool=2, libra="--libra-vrsp-scope step --libra-chunks 2")
    expected = train(1, scheduled(layout.reference), arrange=dense_reference)[-1]
    record = train(2, scheduled(layout))[-1]
    assert sum(record.squares[:2]) == reference_of(Layout().reference, corpus).squares[0]
    close(record.losses, expected.losses, 1e-5)


def test_flops_are_counted_from_the_samples_on_every_layout(corpus: str) -> None:
    """The sum of squared lengths is one number, also with model chunks, which each run a
    forward."""
    expected = reference_of(Layout().reference, corpus).squares
    layout = Layout(pp=2, vpp=2, cp=2, dp=1)
    for record in train(layout.world_size, layout.command_line(corpus, "--train-iters", "3")):
        assert record.squares == expected[:3]


def test_bf16_with_distributed_optimizer(corpus: str) -> None:
    # a small step: larger ones magnify bf16 rounding beyond any tolerance
    step = "--bf16 --lr 0.001 --min-lr 0.0001"
    overlap = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    layout = Layout(dp=2, cp=2, pool=2, flags=f"{step} {overlap}")
    reference = Layout(flags=step).reference
    expected = reference_of(reference, corpus)
    record = train(layout.world_size, layout.command_line(corpus))[-1]
    close(record.losses, expected.losses, 5e-3)
    close(record.grad_norms, expected.grad_norms, 5e-2)

"""The choice among given results, its reasons, and the run file that a run reads back."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_libra.integration.arguments import add_arguments, config_from_args
from megatron_libra.integration.yaml import expand, load
from megatron_libra.simulator.candidates import Candidate
from megatron_libra.simulator.metrics import CandidateResult
from megatron_libra.simulator.run_file import run_file
from megatron_libra.simulator.simulation import Recommendation, Simulation
from megatron_libra.simulator.skew import PoolSkew
from megatron_libra.simulator.tune import recommend


@pytest.fixture
def result(simulation: Simulation) -> CandidateResult:
    """A good configuration: P 8, B 4096, H 2, 100 ms."""
    return replace(
        simulation.finalists[0],
        candidate=Candidate(8, 4096, 2, 4, "microbatch", "home_first"),
        step_ms=100.0,
        worker_bytes=4e9,
        tile_over_target=0.5,
        speedup_step=2.0,
        compute_share=0.9,
        resident_kv_bytes=2.0 * 2**30,
    )


def choose(results: list[CandidateResult], *, max_kv_gib: float | None = None) -> Recommendation:
    keys = {(r.candidate.pool_size, r.candidate.scope) for r in results}
    one, four = np.ones(1), np.ones((1, 4))
    skew = [PoolSkew(size, scope, one, one, one, one, four) for size, scope in sorted(keys)]
    return recommend(results, results, skew, results[0], windows=[0], max_kv_gib=max_kv_gib)


def test_the_fastest_wins(result: CandidateResult) -> None:
    pool = replace(result.candidate, pool_size=4)
    slower = replace(result, step_ms=101.5, candidate=pool)
    chosen = choose([slower, result])
    assert chosen.result is result
    assert any("the best P = 4 takes 1.01x the step" in reason for reason in chosen.reasons)
    assert "No other finalist comes within 1%" in " ".join(chosen.reasons)


@pytest.mark.parametrize(
    ("change", "preferred"),
    [
        ({"candidate": Candidate(4, 4096, 2, 4, "microbatch", "home_first")}, True),
        ({"candidate": Candidate(16, 4096, 2, 4, "microbatch", "home_first")}, False),
        ({"candidate": Candidate(8, 4096, 1, 4, "microbatch", "home_first")}, True),
        ({"candidate": Candidate(8, 8192, 2, 4, "microbatch", "home_first")}, True),
        ({"candidate": Candidate(8, 2048, 2, 4, "microbatch", "home_first")}, False),
    ],
)
def test_among_equals_small_pools_then_few_bytes_then_coarse_tiles(
    result: CandidateResult, change: dict[str, Candidate], preferred: bool
) -> None:
    other = replace(result, step_ms=100.9, **change)
    assert (choose([result, other]).result is other) == preferred
    fewer = replace(other, worker_bytes=3e9, candidate=replace(other.candidate, pool_size=8))
    assert choose([result, fewer]).result is fewer


def test_a_limit_of_memory_excludes(result: CandidateResult) -> None:
    lean = replace(result, step_ms=300.0, resident_kv_bytes=0.5 * 2**30,
                   candidate=replace(result.candidate, pool_size=2))  # fmt: skip
    assert choose([result, lean]).result is result
    assert choose([result, lean], max_kv_gib=1).result is lean
    heavy_step = replace(result, candidate=replace(lean.candidate, scope="step"))
    reasons = choose([heavy_step, lean], max_kv_gib=1).reasons  # compared with, not chosen
    assert any("scope step takes 0.33x" in reason for reason in reasons)
    with pytest.raises(ValueError, match=r"max_kv_gib \(0.25\) must be at least 0.5,"):
        choose([result, lean], max_kv_gib=0.25)


def test_the_samplers_order_is_never_recommended(result: CandidateResult) -> None:
    unordered = replace(result, step_ms=1.0, candidate=replace(result.candidate, scope="off"))
    assert choose([result, unordered]).result is result


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"speedup_step": 1.01}, "nearly balanced"),
        ({"tile_over_target": 1.5}, "heaviest tile exceeds"),
        ({"compute_share": 0.4}, "most of the time is communication"),
    ],
)
def test_warnings(result: CandidateResult, change: dict[str, float], warning: str) -> None:
    assert not any("Warning" in reason for reason in choose([result]).reasons)
    (found,) = [r for r in choose([replace(result, **change)]).reasons if "Warning" in r]
    assert warning in found


def test_scopes_are_compared(result: CandidateResult) -> None:
    step = replace(result, step_ms=80.0, candidate=replace(result.candidate, scope="step"))
    reasons = " ".join(choose([result, step]).reasons)
    assert "Scope step: the best step of P = 8 with scope microbatch takes 1.25x" in reasons


def test_a_run_reads_the_file_back(simulation: Simulation, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "libra.yaml"
    best = replace(simulation.recommendation.result, speedup_step=2.0)
    recommendation = replace(simulation.recommendation, result=best)
    path.write_text(run_file(replace(simulation, recommendation=recommendation)))
    parser = add_arguments(argparse.ArgumentParser())
    for name in ("seq-length", "context-parallel-size", "pipeline-model-parallel-size",
                 "global-batch-size", "micro-batch-size"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--attention-dropout", type=float)
    for name in ("dataloader-inter-document-masking", "calculate-per-token-loss"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args(expand(load(path), parser))
    assert args.context_parallel_impl == "libra"
    chosen = simulation.recommendation.result.candidate
    assert config_from_args(args) == chosen.config(simulation.base)
    assert (args.seq_length, args.context_parallel_size, args.global_batch_size) == (64, 2, 8)
    assert simulation.sampling.sentence.split(". ")[0] in path.read_text()
    assert max(map(len, path.read_text().splitlines())) <= 100

"""Jobs and models small enough to do by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.data.rows import LengthRows
from megatron_libra.simulator.call_cost import FEATURES, KernelCost, PassCost
from megatron_libra.simulator.candidates import Grid
from megatron_libra.simulator.corpus import Corpus
from megatron_libra.simulator.cost_model import CostModel
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.processes import TaskPool
from megatron_libra.simulator.search import Effort, simulate
from megatron_libra.simulator.simulation import Simulation
from megatron_libra.simulator.tiling import Tiling


@pytest.fixture(scope="session")
def job() -> TrainingJob:
    """Two pools of two sequences of 64 tokens, or one of four; two microbatches."""
    return TrainingJob(
        seq_length=64,
        context_parallel_size=2,
        data_parallel_size=4,
        global_batch_size=8,
        shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=8),
        workers_per_node=4,
    )


def pass_cost(**changes: Any) -> PassCost:
    """A tile for each query, a step for each key: a step is a causal pair. 1 ms each, 0.1 ms for
    each query row and head, 50 ms for the host's call.
    """
    values = dict.fromkeys(FEATURES, 0.0) | {"step_ns": 1e6, "query_row_ns": 1e5}
    tiling = Tiling(tile_rows=1, step_rows=1, owns_keys=False)
    cost = PassCost(
        tiling=tiling,
        tile_steps=0.0,
        alone=1.0,
        clock_loss=0.0,
        clock_ms=1.0,
        host_us=5e4,
        **values,
    )
    return replace(cost, **changes)


@pytest.fixture(scope="session")
def model() -> CostModel:
    """One SM, 10 kB/s inside a node, 5 kB/s between; nothing rounds away."""
    return CostModel(
        name="by hand",
        kernel="by hand",
        num_sms=1,
        kernels={8: KernelCost(forward=pass_cost(), backward=pass_cost(step_ns=2e6))},
        gather_gb_s=1e9,
        intra_node_gb_s=1e-5,
        inter_node_gb_s=0.5e-5,
        message_us=1e4,
        overlap_loss=0.0,
    )


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Three steps of eight sequences; in each, two are one whole sample and six are short ones."""
    step = [[64], [8] * 8, [8] * 8, [64], *[[4] * 16] * 4]
    return Corpus("small.json", LengthRows.from_rows(step * 3), "by hand")


@pytest.fixture(scope="session")
def simulation(corpus: Corpus, job: TrainingJob, model: CostModel) -> Simulation:
    """A whole simulation: 2 P, 2 B, 2 scopes; plans of one step, then of two."""
    grid = Grid(pool_sizes=(2, 4), block_sizes=(8, 32), head_splits=(2,))
    with TaskPool(1) as tasks:
        return simulate(
            corpus,
            job,
            grid=grid,
            base=LibraConfig(chunks=2),
            model=model,
            effort=Effort(planned_windows=2, finalists=1),
            tasks=tasks,
        )

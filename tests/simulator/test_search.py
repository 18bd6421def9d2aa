"""A whole simulation on a corpus of three steps; its results against plans made one by one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_libra.config import LibraConfig
from megatron_libra.plan.pool_plan import plan_pool
from megatron_libra.plan.vrsp import order_window
from megatron_libra.simulator.answer import simulation_answer
from megatron_libra.simulator.candidates import Candidate, Grid
from megatron_libra.simulator.corpus import Corpus
from megatron_libra.simulator.cost_model import CostModel, predict
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.pool_work import PoolWork
from megatron_libra.simulator.processes import TaskPool
from megatron_libra.simulator.replay import ReplayTask, pools_of, replay_window
from megatron_libra.simulator.search import Effort, simulate
from megatron_libra.simulator.simulation import Simulation


def test_a_replay_is_what_training_would_plan(
    corpus: Corpus, job: TrainingJob, model: CostModel
) -> None:
    """VRSP, then plan_pool for each pool, GA-major."""
    candidate = Candidate(2, 16, 2, 2, "microbatch", "home_first")
    window = corpus.window(1, 8)
    replay = replay_window(ReplayTask(window, job, candidate, LibraConfig(), model))
    order = order_window(list(window), pool_size=2, data_parallel_size=4)
    config = LibraConfig(pool_size=2, block_size=16, head_split=2, chunks=2)
    for at, pool in enumerate(order.pools):
        plan = plan_pool(
            [window.lengths(row) for row in pool],
            context_parallel_size=2,
            shape=job.shape,
            config=config,
            seq_length=64,
        )
        where = divmod(at, 2)  # two worker groups
        assert replay.total_bytes[where] == plan.traffic_bytes.sum()
        assert replay.imbalance[where] == pytest.approx(plan.imbalance)
        assert replay.resident_kv_bytes[where] == plan.peak_resident_kv_bytes.max()
        assert replay.tile_over_target[where] == pytest.approx(plan.max_tile_over_mean / 1.01)
        time = predict(PoolWork.of(plan, 4), model)
        assert replay.layer_s[where] == pytest.approx(time.forward_s + time.backward_s)


def test_pools_without_vrsp_are_neighbours(corpus: Corpus, job: TrainingJob) -> None:
    off = Candidate(2, 16, 2, 2, "off", "home")
    assert pools_of(corpus.window(0, 8), off, job) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_a_simulation_covers(simulation: Simulation, job: TrainingJob) -> None:
    assert {(s.pool_size, s.scope) for s in simulation.skew} == {
        (size, scope) for size in (2, 4) for scope in ("microbatch", "step")
    }
    assert all(len(s.after) == 3 for s in simulation.skew)  # every step
    assert len(simulation.screened) == 8
    assert all(r.num_windows == 1 and r.num_pools == 8 // r.candidate.pool_size
               for r in simulation.screened)  # fmt: skip
    assert all(r.num_windows == 2 for r in simulation.finalists)
    assert {(r.candidate.pool_size, r.candidate.scope) for r in simulation.finalists} == {
        (s.pool_size, s.scope) for s in simulation.skew
    }
    steps = [r.step_ms for r in simulation.finalists]
    assert steps == sorted(steps)
    assert list(simulation.references) == ["ulysses", "home"]
    assert simulation.references["ulysses"].speedup_step == 1
    assert simulation.recommendation.result in simulation.finalists
    assert [p.data_parallel_size for p in simulation.scaling] == [1, 2, 4]


def test_skew_of_the_corpus_by_hand(simulation: Simulation) -> None:
    """Works 4096 512 512 4096 256 256 256 256. P = 4, in order: 9216 and 1024, mean 5120. After
    VRSP: 4096 and what is lightest on each side, 5120 and 5120.
    """
    skew = simulation.skew_of(4, "microbatch")
    assert skew.before.tolist() == pytest.approx([9216 / 5120 - 1] * 3)
    assert skew.after.tolist() == pytest.approx([0] * 3)
    # Ulysses waits for 4096 and 256; ideal pools of four take 1280 each.
    assert skew.limits() == pytest.approx(((4096 + 256) / 2 / 1280, 4096 / 1280))


def test_a_sample_is_stated_and_none_when_all_is_planned(
    simulation: Simulation, corpus: Corpus, job: TrainingJob, model: CostModel
) -> None:
    assert simulation.sampling.sentence == (
        "VRSP on all 3 steps. Plans on a sample, drawn with seed 0: all 8 candidates on 1 step, "
        f"the {len(simulation.finalists)} fastest and most different on 2 steps."
    )
    everything = Effort(screened_windows=99, planned_windows=1)
    whole = _run(corpus, job, model, everything)
    assert sorted(whole.sampling.planned_windows) == [0, 1, 2]
    assert "nothing is sampled" in whole.sampling.sentence
    assert {r.num_windows for r in whole.screened} == {3}


def _run(corpus: Corpus, job: TrainingJob, model: CostModel, effort: Effort, processes: int = 1,
         **grid: tuple[int, ...]) -> Simulation:  # fmt: skip
    choices = Grid(**({"pool_sizes": (2,), "block_sizes": (32,), "head_splits": (2,)} | grid))
    with TaskPool(processes) as tasks:
        return simulate(corpus, job, grid=choices, base=LibraConfig(chunks=2), model=model,
                        effort=effort, tasks=tasks)  # fmt: skip


def test_processes_change_nothing(corpus: Corpus, job: TrainingJob, model: CostModel) -> None:
    answers = [
        json.dumps(simulation_answer(_run(corpus, job, model, Effort(), processes)))
        for processes in (1, 2)
    ]
    assert answers[0] == answers[1]


def test_progress_counts_every_task(corpus: Corpus, job: TrainingJob, model: CostModel) -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    with TaskPool(1) as tasks:
        simulate(
            corpus,
            job,
            grid=Grid(pool_sizes=(2,), block_sizes=(32,), head_splits=(2,)),
            base=LibraConfig(chunks=2),
            model=model,
            effort=Effort(planned_windows=3),
            tasks=tasks,
            progress=lambda stage, done, total: told.setdefault(stage, []).append((done, total)),
        )
    assert told["VRSP"] == [(1, 3), (2, 3), (3, 3)]
    assert told["references"][-1] == (6, 6)
    assert told["screening"] == [(1, 2), (2, 2)]
    assert told["finalists"][-1] == (4, 4)
    assert told["DP scaling"][-1] == (9, 9)


def test_the_example_pool_holds_the_heaviest_sequence(simulation: Simulation) -> None:
    example = simulation.example
    assert (64,) in example.sequences
    assert example.slot_pairs.sum(axis=1).tolist() == example.work.pairs.tolist()
    heads = simulation.recommendation.result.candidate.head_split
    slot = example.sequences.index((64,))
    assert example.slot_pairs[:, slot].sum() == heads * 64 * 65 // 2
    assert len(example.reference) == 2 * len(example.sequences)


def test_an_answer_is_plain_json(simulation: Simulation) -> None:
    answer = json.loads(json.dumps(simulation_answer(simulation), allow_nan=False))
    assert answer["recommendation"]["reasons"] == list(simulation.recommendation.reasons)
    assert len(answer["screened"]) == 8
    assert answer["vrsp"][0]["inter_pool_imbalance"] == pytest.approx(
        float(np.mean(simulation.skew[0].after))
    )
    assert answer["sampling"]["sentence"] == simulation.sampling.sentence


def test_an_empty_sequence_costs_nothing(job: TrainingJob, model: CostModel) -> None:
    """A pool of padding alone: no pairs, no bytes, no division by zero."""
    empty = replace(job, data_parallel_size=2, global_batch_size=2)
    from megatron_libra.data.rows import LengthRows

    window = LengthRows.from_rows([[], []])
    candidate = Candidate(2, 16, 1, 1, "microbatch", "home_first")
    replay = replay_window(ReplayTask(window, empty, candidate, LibraConfig(), model))
    assert (replay.total_bytes == 0).all() and (replay.imbalance == 0).all()
    assert (replay.compute_s == 0).all()

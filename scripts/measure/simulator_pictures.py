"""Draw the pictures of docs/simulator.md. In: nothing. Out: two PNG files in a folder.

    python scripts/measure/simulator_pictures.py [docs/pictures]

The simulation is that of the worked example: libra simulate longtail-256k --pool-sizes 2,4,8
--block-sizes 2048,8192 --head-splits 1,8.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_libra import LibraConfig
from megatron_libra.simulator.calibration import load_cost_model
from megatron_libra.simulator.candidates import Grid
from megatron_libra.simulator.corpus import CorpusRequest, load_corpus
from megatron_libra.simulator.job import PRESET_JOBS
from megatron_libra.simulator.plots import draw
from megatron_libra.simulator.processes import TaskPool
from megatron_libra.simulator.search import Effort, simulate
from megatron_libra.simulator.simulation import Simulation

PRESET = "longtail-256k"
PICTURES = ("timeline", "pool_sizes")


def example() -> Simulation:
    """The worked example, with the defaults of the command line."""
    job = PRESET_JOBS[PRESET]
    grid = Grid(
        pool_sizes=(2, 4, 8), block_sizes=(2048, 8192), head_splits=(1, 8), placers=("home_first",)
    )
    corpus = load_corpus(
        CorpusRequest(source=PRESET),
        seq_length=job.seq_length,
        global_batch_size=job.global_batch_size,
        context_parallel_size=job.context_parallel_size,
    )
    with TaskPool(1) as tasks:
        return simulate(
            corpus, job, grid=grid, base=LibraConfig(chunks=4),
            model=load_cost_model("h200-fa4"), effort=Effort(), tasks=tasks,
        )  # fmt: skip


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/pictures")
    found = example()
    best = found.recommendation.result.candidate
    print(f"P = {best.pool_size}, B = {best.block_size}, H = {best.head_split}, M = {best.chunks}")
    for name in PICTURES:
        path = folder / f"simulate_{name}.png"
        path.write_bytes(draw(found, name, "png"))
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

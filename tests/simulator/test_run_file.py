"""What the run file of a simulation says, and that Megatron and libra take it as it is."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_libra.integration.yaml import load
from megatron_libra.simulator.run_file import run_file
from megatron_libra.simulator.simulation import Recommendation, Simulation

MODEL = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 8 --max-position-embeddings 64 --position-embedding-type rope
--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --train-iters 1 --lr 1e-4
--transformer-impl local --no-gradient-accumulation-fusion
"""
"""What a user adds: the model of the simulated job, data, a learning rate."""
SWITCHED = ("libra-", "dataloader-", "calculate-", "attention-dropout")


def with_speedup(simulation: Simulation, speedup: float) -> Simulation:
    """The same, with another speedup of the recommended step."""
    result = replace(simulation.recommendation.result, speedup_step=speedup)
    return replace(simulation, recommendation=Recommendation(result, ("Because.",)))


def test_a_run_with_the_file_is_not_refused(simulation: Simulation, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from tests.integration.parsing import parse_all

    path = tmp_path / "libra.yaml"
    path.write_text(run_file(with_speedup(simulation, 1.5)))
    (args,) = parse_all([(8, load(path), MODEL.split())])
    assert isinstance(args, argparse.Namespace), args
    assert (args.context_parallel_impl, args.data_parallel_size) == ("libra", 4)
    assert args.dataloader_inter_document_masking and args.calculate_per_token_loss
    assert args.attention_dropout == 0


def test_where_libra_is_slower_the_file_does_not_switch_it_on(
    simulation: Simulation, tmp_path: Path
) -> None:
    path = tmp_path / "libra.yaml"
    path.write_text(run_file(with_speedup(simulation, 0.99)))
    text, settings = path.read_text(), load(path)
    assert text.startswith("# Nothing is recommended: train without libra.")
    assert settings["context-parallel-impl"] == "megatron"
    assert not [name for name in settings if name.startswith(SWITCHED)]
    assert settings["seq-length"] == 64  # the job is still there
    size = simulation.recommendation.result.candidate.pool_size
    assert f"\n# libra-pool-size: {size}\n" in text
    assert load_uncommented(text, tmp_path)["libra-pool-size"] == size


def load_uncommented(text: str, folder: Path) -> dict[str, Any]:
    """The settings in comments, as a user who takes them anyway would have them."""
    lines = [line[2:] for line in text.splitlines() if line.startswith("# libra-")]
    path = folder / "anyway.yaml"
    path.write_text("\n".join(lines))
    return load(path)

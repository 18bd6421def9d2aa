"""Checkpoints: resume exactly, exchange them with runs without libra, keep their keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import call, train
from tests.integration.layouts import ITERATIONS, Layout
from tests.integration.reference import dense_reference

SAVE = "--save-interval 2 --ckpt-format torch_dist"
LIBRA = Layout(dp=2, cp=2, pool=2, libra="--libra-block-size 32 --libra-chunks 2")
MEGATRON = LIBRA.reference


def keys_of(directory: Path) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return set(FileSystemReader(directory).read_metadata().state_dict_metadata)


@pytest.fixture(scope="module")
def saved(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Runs of both kinds, each with checkpoints at iterations 2 and 4."""
    libra, megatron = (tmp_path_factory.mktemp(name) for name in ("libra", "megatron"))
    return {
        "libra": libra,
        "megatron": megatron,
        "libra run": train(4, LIBRA.command_line(corpus, "--save", str(libra), *SAVE.split())),
        "megatron run": train(
            1,
            MEGATRON.command_line(corpus, "--save", str(megatron), *SAVE.split()),
            arrange=dense_reference,
        ),
    }


def resume(directory: object) -> list[str]:
    """Flags that continue from iteration 2."""
    return ["--load", str(directory), "--ckpt-step", "2", "--ckpt-format", "torch_dist"]


def test_resume_continues_as_if_never_stopped(corpus: str, saved: dict) -> None:
    whole = saved["libra run"]
    resumed = train(4, LIBRA.command_line(corpus, *resume(saved["libra"])))
    per_rank = 2 * (8 // LIBRA.dp)  # microbatches of the two iterations before
    for rank, record in enumerate(resumed):
        trained = [entry for entry in whole[rank].order if entry[0] == "train"]
        assert [entry for entry in record.order if entry[0] == "train"] == trained[per_rank:]
        assert record.losses == whole[rank].losses[2:]
        assert len(record.losses) == ITERATIONS - 2


def test_a_checkpoint_without_libra_continues_with_it(corpus: str, saved: dict) -> None:
    record = train(4, LIBRA.command_line(corpus, *resume(saved["megatron"])))[-1]
    assert record.losses == pytest.approx(saved["megatron run"][-1].losses[2:], rel=1e-5)


def test_a_checkpoint_with_libra_continues_without_it(corpus: str, saved: dict) -> None:
    command = MEGATRON.command_line(corpus, *resume(saved["libra"]))
    record = train(1, command, arrange=dense_reference)[-1]
    assert record.losses == pytest.approx(saved["libra run"][-1].losses[2:], rel=1e-5)


def test_keys_are_those_of_a_run_without_libra(saved: dict) -> None:
    with_libra, without = (
        call(keys_of, saved[name] / "iter_0000002") for name in ("libra", "megatron")
    )
    # rerun_state_machine has an entry for each rank, whatever computes attention
    shared = {key for key in with_libra if not key.startswith("rerun_state_machine_state")}
    assert shared == {key for key in without if not key.startswith("rerun_state_machine_state")}
    assert not any("core_attention" in key or "libra" in key for key in with_libra)

"""libra replay: pools that no plan can hold are refused before a corpus is made or planned."""

from __future__ import annotations

import pytest

from tests.helpers.replay_cases import HEADS, PREDICTED, SIZES, SMALL

MANY = 32 * 256
"""GBS of one seed that MAX_SEQUENCES still lets through."""


@pytest.fixture
def nothing_begins(monkeypatch):
    """Reading a corpus or planning a pool fails the test."""

    def begun(*_, **__):
        raise AssertionError("it began")

    monkeypatch.setattr("megatron_libra.cli.replay.read_windows", begun)
    monkeypatch.setattr("megatron_libra.cli.replay.prepare", begun)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--block-size", 1), "block_size (1) makes about 33556480 tiles of a pool (tap)"),
        (("--block-size", 64, "--pool-size", 32), "at most 500000 are planned; try --block-size "),
        (("--figure", 11, "--block-size", 1), "tiles of a pool (libra DP 1)"),
        (("--figure", 14, "--block-size", 1), "tiles of a pool (tap P 2)"),
        (("--figure", 15, "--cp", 512), "tiles of a pool (tap_vrsp B 32 H 16); at most 500000"),
        (("--method", "libra", "--head-split", 128, "--block-size", 128), "(libra)"),
        (("--cp", 131_072), "1 sequences x context_parallel_size (131072) are 131072 workers"),
        (
            ("--cp", 2048, "--method", "libra"),
            "8 sequences x context_parallel_size (2048) are 16384 workers",
        ),
        (("--dp", 1024, "--gbs", 1024), "are 8192 workers of a pool (distca); at most 4096"),
        (("--dp", MANY, "--gbs", MANY, "--seeds", 0), "leave it out: --method libra."),
        (("--dp", 256, "--gbs", 256), "266240 blocks of a pool (distca) on 2048 workers"),
    ],
)
def test_a_pool_that_is_too_large_is_refused_at_once(libra, nothing_begins, arguments, words):
    run = libra("replay", "longtail-256k", *PREDICTED, *arguments)
    assert (run.code, run.out) == (2, "")
    assert words in run.err and run.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--block-size", 1), ("--pool-size", 32, "--block-size", 9)])
def test_the_block_size_that_is_named_is_the_smallest(libra, nothing_begins, arguments):
    job = ("replay", "longtail-256k", "--method", "libra", *PREDICTED, *arguments)
    size = int(libra(*job).err.split("try --block-size ")[1].rstrip(".\n"))
    assert libra(*job, "--block-size", size - 1).err.endswith(f"try --block-size {size}.\n")
    with pytest.raises(AssertionError, match="it began"):
        libra(*job, "--block-size", size)


def test_the_largest_layout_of_figure_13_is_planned(libra, nothing_begins):
    with pytest.raises(AssertionError, match="it began"):
        libra("replay", "longtail-256k", "--dp", 128, *PREDICTED)


def test_too_many_tokens_of_a_pool_are_refused(libra, corpus):
    run = libra("replay", corpus, *SMALL, *PREDICTED, "--seq-length", 2**31 - 4)
    assert run.code == 2 and run.err.count("\n") == 1
    assert "are 8589934576 tokens of a pool (distca); it holds at most 2147483647" in run.err


def test_too_many_samples_of_a_pool_are_refused(libra, write, monkeypatch):
    monkeypatch.setattr("megatron_libra.cli.replay_size.MAX_CELLS", 1024)
    corpus = write([[1] * 64, *[[64]] * 7], "packs.json")
    sizes = (*SIZES, *HEADS, "--block-size", 64, "--head-split", 2, "--seeds", 0)
    job = ("replay", corpus, *sizes, "--processes", 1, "--method", "libra", *PREDICTED)
    assert libra(*job).code == 0
    monkeypatch.setattr("megatron_libra.cli.replay_size.MAX_CELLS", 512)
    run = libra(*job)
    assert run.code == 2 and run.err.count("\n") == 1
    assert "67 samples in a pool on 8 workers (libra) are too many for one plan" in run.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--processes", 100_000), "Invalid value for '--processes'"),
        (("--seeds", "9" * 5000), "--seeds has a number of 5000 digits; at most 18 are read"),
        (("--measure", "9" * 5000), "--measure has 5000 digits"),
        (("--inter-node-gb-s", 1e300), "inter_node_gb_s (1e+300) must be at most 1e+09; try 40."),
        (("--intra-node-gb-s", 1e-300), "intra_node_gb_s (1e-300) must be at least 1e-06"),
        (("--overlap-loss", 1e300), "overlap_loss (1e+300) must be from 0 to 1"),
        (("--message-us", 1e300), "message_us (1e+300) must be at most 1e+09"),
    ],
)
def test_numbers_without_a_meaning_are_refused(libra, nothing_begins, arguments, words):
    run = libra("replay", "longtail-256k", *arguments)
    assert (run.code, run.out) == (2, "")
    assert words in run.err and run.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "way"),
    [
        (("--figure", 15, "--cp", 512), "use a smaller --cp."),
        (("--figure", 14, "--cp", 256), "use a smaller --cp or --head-split."),
        (("--method", "libra", "--cp", 2048), "use a smaller --cp or --pool-size or --head-split."),
    ],
)
def test_the_way_out_names_options_of_the_figure(libra, nothing_begins, arguments, way):
    assert libra("replay", "longtail-256k", *PREDICTED, *arguments).err.endswith(f" {way}\n")

"""libra simulate: sizes that take hours or gigabytes are refused before the work begins."""

from __future__ import annotations

import pytest


@pytest.fixture
def nothing_begins(monkeypatch):
    """Making a corpus fails the test."""

    def begun(*_, **__):
        raise AssertionError("it began")

    monkeypatch.setattr("megatron_libra.cli.simulate.load_corpus", begun)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gbs", 100_000_000_000), "'--gbs': Input should be less than or equal to 2147483647"),
        (("--gbs", 32_768), "--gbs (32768) x 16 steps are 524288 packed sequences; at most 262144"),
        (("--sequences", 300_000), "--sequences (300000) must be at most 262144; try 262144"),
        (("--steps", 1_000_000_000), "'--steps': Input should be less than or equal to 100000"),
        (("--screen-steps", 10**9), "'--screen-steps': Input should be less than"),
        (("--finalists", 10**9), "'--finalists': Input should be less than"),
        (("--cp", 100_000_000), "context_parallel_size (100000000) must be at most half of "),
        (
            ("--cp", 1024),
            "P = 32 sequences x --cp (1024) are 32768 workers of a pool; at most",
        ),
        (("--block-sizes", 1), "--block-sizes (1) makes about 8389120 blocks of a pool of P = 32"),
        (("--processes", 10**6), "'--processes': Input should be less than or equal to 1024"),
        (("--query-heads", 10**9), "'--query-heads': Input should be less than or equal to 4096"),
    ],
)
def test_an_absurd_size_is_refused_at_once(libra, nothing_begins, arguments, words):
    run = libra("simulate", "longtail-256k", *arguments)
    assert (run.code, run.out) == (2, "")
    assert words in run.err and run.err.count("\n") == 1
    assert str(arguments[1]) in run.err


def test_the_block_size_that_is_named_is_the_smallest(libra, nothing_begins):
    size = int(libra("simulate", "longtail-256k", "--block-sizes", 1).err.split("try ")[1][:-2])
    below = libra("simulate", "longtail-256k", "--block-sizes", f"{size - 1},4096")
    assert below.err.endswith(f"try {size}.\n")
    with pytest.raises(AssertionError, match="it began"):
        libra("simulate", "longtail-256k", "--block-sizes", size)


def test_fewer_workers_are_a_way_out(libra, nothing_begins):
    """As the refusal of CP 1024 says."""
    assert "try --pool-sizes 4 or less" in libra("simulate", "longtail-256k", "--cp", 1024).err
    with pytest.raises(AssertionError, match="it began"):
        libra("simulate", "longtail-256k", "--cp", 1024, "--pool-sizes", 4, "--block-sizes", 4096)


def test_more_tokens_than_a_plan_can_number_are_refused(libra, write):
    sizes = ("--cp", 2, "--dp", 8, "--gbs", 8, "--seq-length", 2**30, "--head-dim", 8)
    run = libra("simulate", write([8]), *sizes, "--query-heads", 4, "--kv-heads", 2)
    assert run.code == 2 and run.err.count("\n") == 1
    assert "P = 8 sequences of --seq-length (1073741824) are 8589934592 tokens" in run.err
    assert "try --pool-sizes 1 or less" in run.err


def test_kv_heads_below_tensor_parallelism_are_shared(libra, nothing_begins):
    """TP 32 on 16 kv heads: each is on two ranks. TP 24 would cut them unevenly."""
    with pytest.raises(AssertionError, match="it began"):
        libra("simulate", "longtail-256k", "--tp", 32)
    uneven = ("--query-heads", 96, "--kv-heads", 16, "--tp", 24)
    run = libra("simulate", "longtail-256k", *uneven)
    assert run.code == 2 and "tensor_parallel_size (24) must divide kv_heads (16)" in run.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--tp", 16, "--head-splits", "8,16"),
            "--head-splits (16) must divide 128 query heads of longtail-256k / --tp (16) = 8; try "
            "one of [1, 2, 4, 8].",
        ),
        (
            ("--tp", 2, "--query-heads", 24, "--kv-heads", 12, "--head-splits", 4),
            "--head-splits (4) must divide --kv-heads (12) / --tp (2) = 6 or be a multiple of it; "
            "try one of [1, 2, 3, 6, 12].",
        ),
        (
            ("--query-heads", 96, "--head-splits", 12),
            "--head-splits (12) must divide 16 kv heads of longtail-256k or be a multiple of it; "
            "try one of [1, 2, 4, 8, 16, 32, 48, 96].",
        ),
    ],
)
def test_head_splits_are_refused_by_what_was_typed(libra, nothing_begins, arguments, message):
    """Heads of a rank are a quotient that nobody typed; each way out works."""
    run = libra("simulate", "longtail-256k", *arguments)
    assert (run.code, run.out, run.err) == (2, "", f"error: {message}\n")
    way_out = message.split("[")[1].split("]")[0].replace(" ", "")
    with pytest.raises(AssertionError, match="it began"):
        libra("simulate", "longtail-256k", *arguments[:-1], way_out)

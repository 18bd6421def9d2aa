"""libra lengths is there, answers from a file of lengths, and refuses what is none."""

from __future__ import annotations

import pytest


def test_lengths_of_a_file(libra, write):
    run = libra("lengths", write([5, 1, 2, 4, 3]), "--seq-length", 8, "--json")
    assert run.code == 0, run.err
    assert run.answer["lengths"]["samples"] == 5 and run.answer["lengths"]["tokens"] == 15
    # Cut every 8 tokens: 5 1 2 and 4 3, of work 30 and 25.
    assert run.answer["skew"]["imbalance"] == pytest.approx(30 / 27.5 - 1)
    assert "median 3" in libra("lengths", write([5, 1, 2, 4, 3])).out


@pytest.mark.parametrize("content", ["{", "[1, -2]", '["a"]', b"\xff\xfe"])
def test_bad_files_of_lengths_are_one_line(libra, write, content):
    run = libra("lengths", write(content))
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)


def test_a_missing_file_is_one_line(libra, tmp_path):
    run = libra("lengths", tmp_path / "none.json")
    assert (run.code, run.err.count("\n")) == (2, 1)

"""LengthRows: two arrays that read like a list of lists. Plain cases, files and damaged files."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron_libra.data.rows import LengthRows, as_lengths, offsets_of, read_npz, require_file

ROWS = [[3, 5], [], [8], [1, 1, 1]]


def test_rows_come_back_as_they_were_given() -> None:
    rows = LengthRows.from_rows(ROWS)
    assert len(rows) == 4
    assert [list(row) for row in rows] == ROWS
    assert rows.lengths(3) == (1, 1, 1)
    assert all(type(length) is int for length in rows.lengths(3))


def test_flat_lists_are_one_row_each() -> None:
    assert list(LengthRows.from_flat([7, 0, 9])) == [(7,), (0,), (9,)]
    assert len(LengthRows.from_flat([])) == 0


@pytest.mark.parametrize("index", [-1, 4])
def test_a_row_outside_is_an_error_and_does_not_wrap(index: int) -> None:
    with pytest.raises(IndexError, match=rf"row {index} is outside \[0, 4\)"):
        LengthRows.from_rows(ROWS).lengths(index)


def test_row_sums_of_lengths_and_of_values() -> None:
    rows = LengthRows.from_rows(ROWS)
    assert rows.row_sums().tolist() == [8, 0, 8, 3]
    assert rows.row_sums(rows.flat**2).tolist() == [34, 0, 64, 3]


def test_take_reorders_and_may_repeat_rows() -> None:
    taken = LengthRows.from_rows(ROWS).take([3, 0, 1, 3])
    assert list(taken) == [(1, 1, 1), (3, 5), (), (1, 1, 1)]


def test_concatenate_keeps_order() -> None:
    parts = [
        LengthRows.from_rows(ROWS[:2]),
        LengthRows.from_rows([]),
        LengthRows.from_rows(ROWS[2:]),
    ]
    assert [list(row) for row in LengthRows.concatenate(parts)] == ROWS
    assert len(LengthRows.concatenate([])) == 0


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    LengthRows.from_rows(ROWS).save(path, note="hello")
    assert [list(row) for row in LengthRows.load(path)] == ROWS
    assert str(read_npz(path)["note"]) == "hello"
    assert [file.name for file in tmp_path.iterdir()] == ["rows.npz"], "no scratch file stays"


def test_rows_travel_to_other_processes() -> None:
    copy = pickle.loads(pickle.dumps(LengthRows.from_rows(ROWS)))
    assert [list(row) for row in copy] == ROWS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, -2], r"lengths\[1\] \(-2\) must be an integer of 0 to 2147483647"),
        ([1.5], r"lengths\[0\] \(1.5\)"),
        ([3, "7"], r"lengths\[1\] \('7'\)"),
        ([True], r"lengths\[0\] \(True\)"),
        ([2**31], rf"lengths\[0\] \({2**31}\)"),
        ([2**70], rf"lengths\[0\] \({2**70}\)"),
        ([None], r"lengths\[0\] \(None\)"),
        (np.array([1.0]), r"float64, 1 dimensions\) must be a flat list of integers"),
        (np.array([[1]]), r"2 dimensions\) must be a flat list of integers"),
        (np.array([-1, 2]), r"lengths\[0\] \(-1\)"),
    ],
)
def test_what_is_no_length_is_named(values: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_lengths(values)  # type: ignore[arg-type]


def test_a_bad_length_in_a_row_is_named_with_its_row() -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\]\[2\] \(-4\) must be an integer"):
        LengthRows.from_rows([[1], [2, 3, -4]])


def test_integers_of_every_kind_are_lengths() -> None:
    assert as_lengths(np.array([1, 2], np.uint16)).dtype == np.int64
    assert as_lengths([np.int32(4), 5]).tolist() == [4, 5]


@pytest.mark.parametrize("offsets", [[1, 2], [0, 2, 1, 3], [0, 2], []])
def test_offsets_must_cover_the_lengths(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        LengthRows(np.array([1, 2, 3]), np.array(offsets, np.int64))


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    path.write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ValueError, match=r"rows.npz is not a .npz file"):
        LengthRows.load(path)
    np.savez(path, other=np.zeros(1))
    with pytest.raises(ValueError, match=r"holds \['other'\]; it must hold lengths and offsets"):
        LengthRows.load(path)
    np.savez(path, lengths=np.array([object()]), offsets=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="is not a .npz file of arrays"):
        LengthRows.load(path)


def test_require_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; give the path of a file"):
        require_file(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        require_file(tmp_path / "none")
    with pytest.raises(ValueError, match="/dev/null is no regular file; give the path of a file"):
        require_file(Path("/dev/null"))


def test_offsets_of() -> None:
    assert offsets_of(np.array([2, 0, 3])).tolist() == [0, 2, 2, 5]

"""Files of lengths: each format by hand, and every kind of damaged file as one clear line."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_libra.data.files import read_lengths
from megatron_libra.data.rows import LengthRows
from megatron_libra.data.sidecar import build_sidecar


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[12, 3]", [(12,), (3,)]),
        ("[[12, 3], [], [5]]", [(12, 3), (), (5,)]),
        ('{"sequences": [[12, 3]], "seq_length": 20}', [(12, 3)]),
        ("[]", []),
    ],
)
def test_json(tmp_path: Path, content: str, expected: list[tuple[int, ...]]) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert list(read_lengths(path)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[12, -3]", r"a.json: lengths\[1\] \(-3\) must be an integer of 0"),
        ("[12, 3.5]", r"a.json: lengths\[1\] \(3.5\)"),
        ("[[1], [2, null]]", r"a.json: lengths\[1\]\[1\] \(None\)"),
        ("[[1], 2]", r"a.json: entry 1 \(2\) must be like entry 0 \(\[1\]\)"),
        ("[1, [2]]", r"a.json: entry 1 \(\[2\]\) must be like entry 0 \(1\)"),
        ("[1,", r"a.json: is not JSON: line 1, column 4: .*; write \[1200, 3000\]"),
        ("", r"a.json: is empty; write \[1200, 3000\]"),
        (
            '{"lengths": [1]}',
            r"""a.json: holds {"lengths": \[1\]}; it must be a list, or an object""",
        ),
        ('{"sequences": 3}', "a.json: holds 3; it must be a list, or an object with the list as"),
        ('{"sequences": null}', "a.json: holds null; it must be a list"),
        ('"' + "a" * 99 + '"', r"""a.json: holds "a{36}\.\.\.; it must be"""),
        ("[3, \xe4]", "a.json: is not UTF-8: byte 4 is 0xe4; write"),
        (
            '{"sequences": [1], "sequences": [2]}',
            """a.json: key "sequences" is given twice; write""",
        ),
        ('{"sequences": [1], "a": {"b": 1, "b": 1}}', """a.json: key "b" is given twice; write"""),
        ("[3, Infinity]", "a.json: Infinity is not a number; write"),
        ("[" + "9" * 4000 + "]", r"a.json: lengths\[0\] \(9{30,40}\.\.\.\) must be an integer"),
        ("[" + "9" * 5000 + "]", "a.json: has an integer of some thousand digits; write"),
        ("[3, 1e999]", "a.json: 1e999 is too large for a number; write"),
    ],
)
def test_bad_json(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        read_lengths(path)


def test_numpy(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 6], np.uint32))
    assert list(read_lengths(tmp_path / "a.npy")) == [(5,), (6,)]
    LengthRows.from_rows([[1, 2], [3]]).save(tmp_path / "a.npz")
    assert list(read_lengths(tmp_path / "a.npz")) == [(1, 2), (3,)]


def test_bad_numpy(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for array, message in [
        (np.zeros((2, 2), int), "2 dimensions"),
        (np.array([0.5]), "float64"),
        (np.array(["a"]), "flat list of integers"),
        (np.array([None]), "not a .npy file of numbers"),
    ]:
        np.save(path, array)
        with pytest.raises(ValueError, match=f"a.npy(:| is) .*{message}"):
            read_lengths(path)
    path.write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match="a.npy is not a .npy file"):
        read_lengths(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="a.npy is not a .npy file"):
        read_lengths(path)


def idx_bytes(lengths: list[int], version: int = 1) -> bytes:
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", version, 4, len(lengths), len(lengths) + 1)
    return header + np.array(lengths, "<i4").tobytes()


def test_idx(tmp_path: Path) -> None:
    path = tmp_path / "corpus.idx"
    path.write_bytes(idx_bytes([7, 9]) + b"pointers follow")
    assert list(read_lengths(path)) == [(7,), (9,)]
    for content, message in [
        (idx_bytes([7, 9])[:-3], "1 of 2 lengths; the file is cut short"),
        (idx_bytes([7], version=2), r"version \(2\) of the index must be 1"),
        (b"MMIDIDX", "not the index of a Megatron corpus"),
        (b"x" * 100, "not the index of a Megatron corpus"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"corpus.idx: {message}"):
            read_lengths(path)


def test_jsonl_reads_its_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"text": "abc"}\n')
    with pytest.raises(ValueError, match="libra lengths .*chat.jsonl --tokenizer"):
        read_lengths(path)
    build_sidecar(path, tokenizer="byte")
    assert list(read_lengths(path)) == [(3,)]


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = pa.table(
        {
            "name": ["x", "y", "z"],
            "tokens": [3, 4, 5],
            "packs": [[1, 2], [], [3]],
            "bad": [1, None, 2],
        }
    )
    parquet.write_table(table, path, row_group_size=2)
    assert list(read_lengths(path, column="tokens")) == [(3,), (4,), (5,)]
    assert list(read_lengths(path, column="packs")) == [(1, 2), (), (3,)]
    with pytest.raises(ValueError, match=r"has 3 .* \(tokens, packs, bad\); .*: --column tokens"):
        read_lengths(path)
    for column in ("name", "none", ""):
        with pytest.raises(ValueError, match=rf"column \({column!r}\) must .*: tokens, packs, bad"):
            read_lengths(path, column=column)
    with pytest.raises(ValueError, match="column 'bad' has null values"):
        read_lengths(path, column="bad")
    parquet.write_table(table.select(["name", "packs"]), path)
    assert list(read_lengths(path)) == [(1, 2), (), (3,)], "the only column of lengths"
    parquet.write_table(table.select(["name"]), path)
    with pytest.raises(ValueError, match="has no column of integers"):
        read_lengths(path)


def test_bad_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 no PAR1")
    with pytest.raises(ValueError, match="a.parquet: not a Parquet file"):
        read_lengths(path)
    parquet.write_table(pa.table({"tokens": [[1, None]]}), path)
    with pytest.raises(ValueError, match="column 'tokens' has null values"):
        read_lengths(path)
    parquet.write_table(pa.table({"tokens": [1, -2]}), path)
    with pytest.raises(ValueError, match=r"lengths\[1\] \(-2\)"):
        read_lengths(path)


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow.*pip install -e '\.\[parquet\]'"):
        read_lengths(path)


def npy_of_shape(count: int) -> bytes:
    """The head of a .npy that promises so many numbers."""
    head = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + head.ljust(117) + b"\n"


HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("deep.json", b"[" * 100_000, "nests too deeply; write"),
        ("promises.npy", npy_of_shape(2**43), "not a .npy file of numbers"),
        ("broken.npy", npy_of_shape(3).replace(b"'<i8'", b"'<i8 "), "not a .npy file of numbers"),
        ("promises.idx", HEADER.pack(MAGIC, 1, 4, 2**40, 1), "0 of 1099511627776 lengths"),
        ("overflow.idx", HEADER.pack(MAGIC, 1, 4, 2**64 - 1, 1), "lengths; the file is cut short"),
    ],
)
def test_files_that_promise_too_much(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}(:| is) .*{message}") as error:
        read_lengths(path)
    assert "\n" not in str(error.value)


def test_offsets_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, lengths=np.array([3, 4]), offsets=np.array([0.0, 2.0]))
    with pytest.raises(ValueError, match=r"offsets \(float64, 1 dimensions\) must be"):
        read_lengths(path)


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes changed, or the end missing."""
    if rng.random() < 0.3:
        return content[: rng.integers(len(content))]
    changed = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        changed[rng.integers(min(len(changed), 1 << rng.integers(5, 12)))] = rng.integers(256)
    return bytes(changed)


@pytest.mark.parametrize("suffix", [".json", ".npy", ".npz", ".idx", ".parquet"])
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    rows = LengthRows.from_rows([[12, 3], [], [5, 1, 2]])
    if suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    elif suffix == ".npy":
        np.save(path, rows.flat)
    elif suffix == ".npz":
        rows.save(path)
    elif suffix == ".idx":
        path.write_bytes(HEADER.pack(MAGIC, 1, 4, 5, 5) + rows.flat.astype("<i4").tobytes())
    else:
        pa = pytest.importorskip("pyarrow")
        pa.parquet = pytest.importorskip("pyarrow.parquet")
        pa.parquet.write_table(pa.table({"tokens": list(map(list, rows))}), path)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        path.write_bytes(damaged(content, rng))
        try:
            read_lengths(path)
        except ValueError as error:
            assert "\n" not in str(error)


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.json does not exist"):
        read_lengths(tmp_path / "none.json")
    with pytest.raises(ValueError, match="is a folder"):
        read_lengths(tmp_path)
    path = tmp_path / "a.txt"
    path.write_text("3")
    with pytest.raises(ValueError, match=r"suffix '.txt' must be one of .json, .npy"):
        read_lengths(path)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"column \('x'\) is for .parquet files"):
        read_lengths(path, column="x")

"""Files of NumPy: every one that cannot be read says why in words of its own, on one line."""

from __future__ import annotations

import pickle
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_libra.data.files import read_lengths
from megatron_libra.data.numpy_files import read_npy, read_npz


def bytes_of(write: Callable[..., None], path: Path, *args: object, **kwargs: object) -> bytes:
    write(path, *args, **kwargs)
    return path.read_bytes()


def contents(directory: Path) -> dict[str, bytes]:
    """Bad contents by name."""
    npy = bytes_of(np.save, directory / "a.npy", np.arange(40))
    npz = bytes_of(np.savez, directory / "a.npz", lengths=np.arange(40))
    odd = npy.replace(b"'<i8'", b"'\\e8'")
    return {
        "empty": b"",
        "text": b"1200, 3000\n",
        "pickle": pickle.dumps([1200, 3000]),
        "npy": npy,
        "npz": npz,
        "npy of objects": bytes_of(np.save, directory / "o.npy", np.array([[1], [2, 3]], object)),
        "npz of objects": bytes_of(np.savez, directory / "o.npz", lengths=np.array([None])),
        "cut npy": npy[:-3],
        "cut header": npy[:20],
        "cut npz": npz[:-30],
        "odd header": odd,
        "long header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + npy[10:],
    }


@pytest.mark.parametrize(
    ("name", "of_npy", "of_npz"),
    [
        ("empty", "it is empty", "it is empty"),
        ("text", "its content is of another kind", "its content is of another kind"),
        ("pickle", "its content is of another kind", "its content is of another kind"),
        ("npy", None, "it is a .npy"),
        ("npz", "it is a .npz", None),
        ("npy of objects", "it holds Python objects", "it is a .npy"),
        ("npz of objects", "it is a .npz", "it holds Python objects"),
        ("cut npy", "it is damaged or cut short", "it is a .npy"),
        ("cut header", "it is damaged or cut short", "it is a .npy"),
        ("cut npz", "it is a .npz", "it is damaged or cut short"),
        ("odd header", "it is damaged or cut short", "it is a .npy"),
        ("long header", "it is damaged or cut short", "it is a .npy"),
    ],
)
def test_why_it_cannot_be_read(
    tmp_path: Path, name: str, of_npy: str | None, of_npz: str | None
) -> None:
    path = tmp_path / "file"
    path.write_bytes(contents(tmp_path)[name])
    for read, what, reason in (
        (read_npy, "a .npy file of numbers", of_npy),
        (read_npz, "a .npz file of arrays", of_npz),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # one on stderr would be a second line
            if reason is None:
                read(path)
                continue
            with pytest.raises(ValueError) as caught:
                read(path)
        assert str(caught.value).startswith(f"{path} is not {what} ({reason}); write it ")
        assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_lengths_name_the_file_once(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text("no numbers")
    with pytest.raises(ValueError) as caught:
        read_lengths(path)
    assert str(caught.value).count(str(path)) == 1 and "pickle" not in str(caught.value)

"""What cannot work is refused before minutes of measuring or gigabytes of corpus, and said."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_libra.cli.output_files import require_writable

pytest.importorskip("torch")


@pytest.mark.parametrize("option", ["--out", "--keep-calls"])
def test_a_folder_is_no_file_for_a_calibration(libra, tmp_path, monkeypatch, option):
    """Said at once: the measurements would be lost."""

    def measured(*_):
        raise AssertionError("measured first")

    monkeypatch.setattr("megatron_libra.cli.calibrate._measured", measured)
    paths = {"--out": tmp_path / "model.json"} | {option: tmp_path}
    run = libra("calibrate", "--device", "cpu", *(word for pair in paths.items() for word in pair))
    assert (run.code, run.out) == (2, "")
    assert run.err.startswith(f"error: {tmp_path}") and run.err.count("\n") == 1


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    """By folder, by file, by name; and looking leaves no file behind."""
    (tmp_path / "file").touch()
    for path in (
        tmp_path,
        tmp_path / "file" / "x",
        tmp_path / "none" / "x",
        tmp_path / ("n" * 256),
    ):
        with pytest.raises((ValueError, OSError), match=str(path)):
            require_writable(path)
    require_writable(
        tmp_path / "new", tmp_path / "file", None, Path("/dev/null"), Path("/dev/null")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match="given for two outputs"):
        require_writable(tmp_path / "new", tmp_path / ".." / tmp_path.name / "new")


def test_a_file_without_permission_is_refused(tmp_path, monkeypatch):
    """Root may write everything, so the system's answer stands in."""
    (tmp_path / "kept").touch()
    monkeypatch.setattr("megatron_libra.cli.output_files.os.access", lambda *_: False)
    with pytest.raises(ValueError, match="kept cannot be written: no permission"):
        require_writable(tmp_path / "kept")

    def refused(self, mode):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ValueError, match="new cannot be written: Permission denied"):
        require_writable(tmp_path / "new")


@pytest.mark.parametrize("arguments", [("--kernel", "xyz"), ("--figure", 5, "--kernel", "xyz")])
def test_an_unknown_kernel_is_refused_where_nothing_is_measured(libra, write, arguments):
    sizes = ("--seq-length", 4096, "--cp", 2, "--dp", 4, "--gbs", 8, "--query-heads", 4)
    heads = ("--kv-heads", 2, "--head-dim", 8, "--seeds", 0, "--processes", 1, "--measure", 0)
    corpus = write([[64], [8] * 8] * 4, "packs.json")
    run = libra("replay", corpus, *sizes, *heads, *arguments)
    assert run.code == 2 and "kernel ('xyz') must be one of" in run.err

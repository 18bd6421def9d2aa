"""libra doctor, --version and the help: what is there, what is missing, and how to get it."""

from __future__ import annotations

import pytest

from megatron_libra import __version__
from megatron_libra.cli import doctor
from megatron_libra.config import CHOICES


def test_the_report_covers_every_kernel(libra):
    answer = libra("doctor", "--json").answer
    assert set(answer) == {"versions", "kernels", "transports", "tasks"}
    assert set(answer["kernels"]) == set(CHOICES["kernel"]) - {"auto"}
    assert answer["versions"]["megatron_libra"] == __version__
    assert answer["kernels"]["reference"]["usable"] is True


def test_without_a_gpu_the_reason_is_given(libra, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    answer = libra("doctor", "--json").answer
    for entry in (answer["kernels"]["torch_flash"], answer["transports"]["nccl"]):
        assert entry["usable"] is False and "CUDA device" in entry["note"]
    assert "--libra-cpu" in answer["tasks"]["train with Megatron"]["note"]


def test_with_a_gpu_flash_depends_on_its_age(libra, monkeypatch):
    monkeypatch.setattr(doctor, "_cuda_devices", lambda: ["H200"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for capability, usable in (((9, 0), True), ((7, 5), False)):
        monkeypatch.setattr(
            "torch.cuda.get_device_capability", lambda device, capability=capability: capability
        )
        assert libra("doctor", "--json").answer["kernels"]["torch_flash"]["usable"] is usable


def test_what_is_missing_comes_with_the_way_to_get_it(libra, monkeypatch):
    has = doctor._has
    monkeypatch.setattr(doctor, "_has", lambda module: module != "pyarrow" and has(module))
    entry = libra("doctor", "--json").answer["tasks"]["lengths from Parquet"]
    assert entry == {
        "usable": False,
        "note": "missing pyarrow: pip install -e '.[parquet]' in the checkout",
    }


@pytest.mark.parametrize("columns", ["50", "120"])
def test_the_table_fits(libra, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    run = libra("doctor")
    assert run.code == 0
    assert max(map(len, run.out.splitlines())) <= int(columns)


def test_version_and_help(libra):
    assert libra("--version").out == f"megatron_libra {__version__}\n"
    assert "Commands:" in libra().out
    assert "POOL.json" in libra("plan", "--help").out

"""libra verify: the real executor on local gloo processes, its exit codes, and FILE.npz."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_libra.cli import app as application
from megatron_libra.executor import verify as engine
from megatron_libra.executor.local import WorkerFailed

SMALL = {
    "sequences": [[9, 3], [5, 1, 4]],
    "seq_length": 16,
    "context_parallel_size": 1,
    "attention": {"query_heads": 4, "kv_heads": 2, "head_dim": 8},
    "libra": {"block_size": 4, "head_split": 2, "chunks": 1},
}


def softmax_rows(scores):
    """Causal softmax of (queries, keys) scores."""
    hidden = np.triu(np.ones_like(scores, bool), 1)
    weights = np.exp(np.where(hidden, -np.inf, scores) - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def test_the_executor_equals_dense_attention_and_dumps_it(libra, write, tmp_path):
    dump = tmp_path / "tensors.npz"
    run = libra("verify", write(SMALL), "--dump", dump, "--seed", 7, "--json")
    answer = run.answer
    assert run.code == 0, run.err
    assert answer["passed"] is True and answer["seed"] == 7 and answer["workers"] == 2
    assert set(answer["errors"]) == {"out", "dq", "dk", "dv"}
    assert max(answer["errors"].values()) == answer["max_error"] <= answer["tolerance"] <= 1e-10
    with np.load(dump) as arrays:
        assert {name: arrays[name].shape[:3] for name in arrays} == {
            name: (2, 16, 2 if name in ("k", "v", "dk", "dv") else 4)
            for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
        }
        # Slot 1, second to last sample: one token attends to itself alone.
        np.testing.assert_allclose(arrays["out"][1, 5, 3], arrays["v"][1, 5, 1], atol=1e-12)
        # Slot 0, sample 0, head 2: computed here, without torch.
        q, k, v = arrays["q"][0, :9, 2], arrays["k"][0, :9, 1], arrays["v"][0, :9, 1]
        expected = softmax_rows(q @ k.T / np.sqrt(8)) @ v
        np.testing.assert_allclose(arrays["out"][0, :9, 2], expected, atol=1e-12)
        # The padding tail gets exact zeros.
        assert not arrays["out"][0, 12:].any() and not arrays["dk"][1, 10:].any()


@pytest.mark.parametrize("error", [1e-3, float("inf")])
def test_a_difference_is_exit_code_1(libra, write, monkeypatch, error):
    def broken(plan, **options):
        report = {
            "workers": 2,
            "kernel": "reference",
            "transport": "gloo",
            "tolerance": 1e-10,
            "errors": {"out": error},
            "max_error": error,
            "passed": False,
        }
        return engine.Verification(plan, report, {})

    monkeypatch.setattr(application, "run_verification", broken)
    run = libra("verify", write(SMALL), "--json")
    assert run.code == 1
    assert run.answer["errors"]["out"] == (error if np.isfinite(error) else None)
    run = libra("verify", write(SMALL))
    assert run.code == 1 and "DIFFERENT" in run.out
    assert "kernel reference, transport gloo" in " ".join(run.out.split())


def test_a_failing_worker_is_exit_code_1_with_its_trace(libra, write, monkeypatch):
    def fail(*_, **__):
        raise WorkerFailed("worker 1 failed:\nZeroDivisionError: division by zero")

    monkeypatch.setattr(engine, "verify_plans", fail)
    run = libra("verify", write(SMALL))
    assert run.code == 1
    assert "worker 1 failed" in run.err and "ZeroDivisionError" in run.err


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        ({}, ["--device", "gpu"], ["--device", "gpu"]),
        ({}, ["--seed", "-1"], ["--seed"]),
        ({}, ["--seed", "x"], ["--seed"]),
        ({}, ["--dump", "missing/folder/x.npz"], ["missing/folder is no folder; make it first"]),
        ({}, ["--dump", "."], [". cannot be written: it is a folder"]),
        ({}, ["--dump", "/proc/x.npz"], ["/proc/x.npz cannot be written"]),
        ({"libra": {"kernel": "torch_flash", "chunks": 1}}, [], ["torch_flash", "CUDA device"]),
        ({"seq_length": 10**9}, [], ["GiB", "fewer workers"]),
    ],
)
def test_bad_input_is_exit_code_2(libra, write, monkeypatch, tmp_path, change, arguments, words):
    monkeypatch.chdir(tmp_path)
    run = libra("verify", write(SMALL | change), *arguments)
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in run.err


def test_cuda_without_enough_devices_is_refused(libra, write, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    run = libra("verify", write(SMALL), "--device", "cuda")
    assert run.code == 2
    assert "2 GPUs" in run.err and "--device cpu" in run.err


def test_torch_missing_is_said(libra, write, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = libra("verify", write(SMALL))
    assert run.code == 2 and "pip install -e '.[megatron]' in the checkout." in run.err


def test_the_pool_is_never_overwritten(libra, write):
    path = write(SMALL)
    run = libra("verify", path, "--dump", path)
    assert run.code == 2 and "cannot be written: it is what this command reads" in run.err
    assert path.read_text().startswith("{")

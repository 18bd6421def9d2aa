"""The quickstart's parts: documents, run file, how a training ends, the table; nothing trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

QUICKSTART = Path(__file__).resolve().parents[2] / "scripts" / "quickstart"


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(QUICKSTART))
    yield
    for path in QUICKSTART.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_documents_are_the_top_level_definitions():
    from corpus import definitions

    source = (
        b"import os\n\ndef f(a):\n    return a\n\nX = 1\n\n@d\nclass C:\n    def g(self): ...\n"
    )
    assert list(definitions(source)) == [
        b"def f(a):\n    return a\n",
        b"class C:\n    def g(self): ...\n",
    ]
    assert list(definitions(b"def f(:\n")) == []


def test_the_corpus_is_what_megatron_reads(tmp_path, monkeypatch):
    import corpus
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    source = tmp_path / "module.py"
    source.write_bytes(b"def f():\n    pass\n\nclass C:\n    x = '\xc3\xa4'\n")
    monkeypatch.setattr(corpus, "source_files", lambda: [source])
    prefix = tmp_path / "out" / "corpus"
    shares = []
    corpus.build_corpus(prefix, shares.append)
    dataset = IndexedDataset(str(prefix))
    texts = [b"def f():\n    pass\n", b"class C:\n    x = '\xc3\xa4'\n"]
    assert [list(dataset[i]) for i in range(2)] == [[*text, corpus.EOD] for text in texts]
    assert corpus.document_lengths(prefix).tolist() == [len(text) + 1 for text in texts]
    assert shares == [1.0]
    # A second call reads nothing again; a changed source is noticed.
    corpus.build_corpus(prefix, shares.append)
    assert shares == [1.0]
    source.write_bytes(b"def g(): return 1\n")
    corpus.build_corpus(prefix, shares.append)
    assert corpus.document_lengths(prefix).tolist() == [19]


def test_every_machine_has_thousands_of_documents():
    from corpus import definitions, source_files

    files = source_files()
    assert files == sorted(files, key=str)
    lengths = np.array([len(text) for path in files for text in definitions(path.read_bytes())])
    assert len(lengths) > 3000
    assert lengths.max() > 50 * np.median(lengths)


def test_skew_is_there_and_planning_removes_it():
    from skew import measure_skew

    lengths = np.random.default_rng(1).lognormal(6, 1.5, 4000).astype(int) + 1
    skew = measure_skew(lengths)
    assert skew.sequence_work.mean() == pytest.approx(1, abs=0.01)
    # The same work before and after, differently shared.
    np.testing.assert_allclose(skew.before.sum(axis=(1, 2)), skew.after.sum(axis=(1, 2)))
    assert skew.after.max(axis=2).mean() < skew.before.max(axis=2).mean() - 0.1


def test_the_run_file_is_tiny_cpu_on_the_corpus(tmp_path):
    from settings import SEQ_LENGTH, TINY_CPU, write_run_file

    path = write_run_file(tmp_path / "run.yaml", data_path=Path("/a b/c"), vocab_size=257)
    written, base = yaml.safe_load(path.read_text()), yaml.safe_load(TINY_CPU.read_text())
    assert written["data-path"] == "/a b/c" and "mock-data" not in written
    assert written["seq-length"] == SEQ_LENGTH >= 4096
    assert {key for key in base if written.get(key) != base[key]} <= {
        "mock-data", "split", "eval-iters", "vocab-size", "seq-length", "max-position-embeddings",
        "global-batch-size", "train-iters", "libra-block-size", "libra-head-split",
    }  # fmt: skip


def run_command(monkeypatch, tmp_path, code):
    """train() with Python code in place of torchrun."""
    import train

    monkeypatch.setattr(
        train,
        "_command",
        lambda *_: [sys.executable, "-c", code, str(tmp_path / "telemetry.jsonl")],
    )
    monkeypatch.setattr(train, "ITERATIONS", 2)
    run_file = tmp_path / "run.yaml"
    run_file.write_text("seq-length: 8\n")
    seen = []
    return train.train("trial", run_file, [], tmp_path, seen.append), seen


GOOD = (
    "import json, sys\n"
    "with open(sys.argv[1], 'a') as f:\n"
    "    for i in (1, 2):\n"
    "        f.write(json.dumps({'iteration': i, 'losses': {'lm loss': 5.0 - i}}) + '\\n')\n"
    "print('started')\n"
)


def test_a_finished_run_is_read_again(monkeypatch, tmp_path):
    result, seen = run_command(monkeypatch, tmp_path, GOOD)
    assert result.losses == [4.0, 3.0] and seen[-1] == 2
    (tmp_path / "train.log").unlink()
    again, _ = run_command(monkeypatch, tmp_path, GOOD)
    assert again.records == result.records
    assert not (tmp_path / "train.log").exists()
    # Another command runs again, and what the first left does not mix in.
    changed, _ = run_command(monkeypatch, tmp_path, GOOD.replace("5.0", "6.0"))
    assert changed.losses == [5.0, 4.0]


def test_a_failed_run_shows_the_cause_and_its_log(monkeypatch, tmp_path):
    code = (
        "print('x' * 10)\n"
        "print('ValueError: the cause')\n"
        "print('E1 torch/distributed/elastic/' + 'multiprocessing/api.py failed (exitcode: 1)')\n"
        "print('summary')\n"
        "raise SystemExit(3)\n"
    )
    from train import RunFailed

    with pytest.raises(RunFailed) as failure:
        run_command(monkeypatch, tmp_path, code)
    message = str(failure.value)
    assert "trial ended with 3" in message and str(tmp_path / "train.log") in message
    assert message.endswith("ValueError: the cause")
    assert not (tmp_path / "done").exists()


def test_a_run_without_all_iterations_is_a_failure(monkeypatch, tmp_path):
    from train import RunFailed

    with pytest.raises(RunFailed, match="has 1 iterations, 2 were asked for"):
        run_command(monkeypatch, tmp_path, GOOD.replace("(1, 2)", "(1,)"))


def test_a_hung_run_is_ended(monkeypatch, tmp_path):
    import train

    monkeypatch.setattr(train, "STALL_SECONDS", 0.5)
    with pytest.raises(train.RunFailed, match="printed nothing for 0.5 s"):
        run_command(monkeypatch, tmp_path, "import time\ntime.sleep(60)")


def record(iteration, loss, straggler):
    return {
        "iteration": iteration,
        "losses": {"lm loss": loss},
        "straggler_pairs": straggler,
        "mean_pairs": 100,
        "exchanged_bytes": 2_000_000,
    }


def test_the_table_compares_with_the_baseline(tmp_path):
    from plots import plot_losses
    from show import comparison, largest_difference
    from train import RunResult

    runs = [
        RunResult("ulysses", [record(1, 5.0, 150), record(2, 4.0, 130)]),
        RunResult("libra", [record(1, 5.0, 102), record(2, 4.0004, 100)]),
    ]
    assert largest_difference(runs[1], runs[0]) == pytest.approx(1e-4)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison(runs))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "iter 2 4.000000 +1.0e-04 1.300 1.000" in lines  # one unit: 4e-4 is 1e-4 of 4
    assert "largest 1.0e-04 1.500 1.020" in lines
    assert "loss diff relative: divided by ulysses' loss; largest without" in " ".join(lines)
    assert "imbalance 0.400 0.010" in lines
    assert "moved 2.00 MB 2.00 MB" in lines
    plot_losses(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_telemetry_has_what_the_table_needs():
    from dataclasses import fields

    from megatron_libra.integration.telemetry import IterationReport

    assert set(record(1, 1.0, 1)) <= {field.name for field in fields(IterationReport)}
    assert json.dumps(record(1, 1.0, 1))

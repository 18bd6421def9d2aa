"""Rows gathered, summed and cast. Layers: hand-made answers by torch, then the Triton kernels in
Triton's interpreter against torch, bit for bit (a process of its own: it is chosen at import).

`tests/helpers/row_cases.py` has the cases; test_gpu_row_moves.py runs them on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_libra.executor import row_moves
from megatron_libra.executor.bound_route import HomeSum
from megatron_libra.executor.computed import KVGradient
from megatron_libra.executor.kernels import BoundRound
from megatron_libra.executor.row_moves import (
    MOST_PARTS,
    RowPart,
    add_at_home,
    gather_columns,
    gather_sums,
    home_rows,
)

ROOT = Path(__file__).resolve().parents[2]


def int32(*values: int) -> torch.Tensor:
    """A row of numbers."""
    return torch.tensor(values, dtype=torch.int32)


def test_columns_side_by_side() -> None:
    q, out = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([[7.0], [8], [9]])
    rows = torch.empty(2, 3)
    gather_columns([q, out], int32(2, 0), rows)
    assert rows.tolist() == [[5, 6, 9], [1, 2, 7]]
    gather_columns([q], int32(1), rows[:1, :2])
    assert rows[0].tolist() == [3, 4, 9]
    gather_columns([q, out], int32(), rows[:0])


def test_the_drawn_sum() -> None:
    """The example of row_moves, the second part twice. 257 is no bfloat16, but 256 + 1 + 1 is."""
    dk, dv = torch.tensor([[1.0], [2], [256]]), torch.tensor([[10.0], [11], [12]])
    added = RowPart(1, (torch.tensor([[3.0], [1]]), torch.tensor([[4.0], [5]])))
    parts = [RowPart(0, (dk.bfloat16(), dv.bfloat16())), added, added]
    out = torch.empty(2, 2, dtype=torch.bfloat16)
    gather_sums(parts, int32(2, 0), out)
    assert out.tolist() == [[258, 22], [1, 10]]
    assert parts[0].columns[0].flatten().tolist() == [1, 2, 256]  # parts are only read


def test_home_rows_are_views() -> None:
    x = torch.arange(48.0).view(2, 3, 8)
    assert home_rows(x, 3).data_ptr() == x.data_ptr()
    assert home_rows(x, 1).tolist() == x.flatten(1).tolist()
    strided = x[:, :, :4]  # heads are not neighbours: one head a row needs no copy
    assert home_rows(strided, 3).data_ptr() == x.data_ptr()
    assert home_rows(strided, 3).tolist() == strided.flatten(0, 1).tolist()
    crossed = x.transpose(1, 2)
    assert home_rows(crossed, 8).tolist() == crossed.flatten(0, 1).tolist()
    assert home_rows(crossed, 8).stride(1) == 1


def test_contributions_of_different_number() -> None:
    """Home row 2 gets two rows back, row 0 one, row 1 none."""
    dk, dv = torch.arange(3.0).view(3, 1, 1), torch.zeros(3, 1, 1)
    returned = torch.tensor([[10.0, 1], [20, 2], [40, 4]])
    home_sum = HomeSum(torch.tensor([2, 0]), int32(0, 1, 2), int32(0, 2, 3, 3), (2, 1))
    add_at_home(dk, dv, returned, home_sum)
    assert dk.flatten().tolist() == [20, 1, 52] and dv.flatten().tolist() == [2, 0, 5]


@pytest.mark.parametrize("num_calls", [1, 2, MOST_PARTS, MOST_PARTS + 1, 3 * MOST_PARTS])
def test_gradients_of_many_calls(num_calls: int) -> None:
    """Added in float32 in the order of the calls, whichever of them are added before."""
    torch.manual_seed(num_calls)
    k = torch.zeros(7, 2, 3, dtype=torch.bfloat16)
    gradient, expected = KVGradient(k), torch.zeros(2, 7, 2, 3)
    for call in range(num_calls):
        start, stop = (0, 7) if call == 0 else (call % 3, 4 + call % 3)
        dk, dv = torch.randn(2, stop - start, 2, 3).to(torch.bfloat16)
        expected[0, start:stop] += dk
        expected[1, start:stop] += dv
        entries = int32(0)
        r = BoundRound(0, 0, start, stop, entries, entries, 0, 0, None)
        gradient.add(r, dk, dv)
    out = torch.empty(7, 12, dtype=torch.bfloat16)
    gather_sums(gradient.take(), torch.arange(7, dtype=torch.int32), out)
    whole = torch.cat([x.flatten(1) for x in expected], dim=1)
    assert torch.equal(out, whole.to(torch.bfloat16))


def test_no_call_is_zero() -> None:
    out = torch.ones(2, 6)
    gather_sums(KVGradient(torch.ones(3, 1, 3)).take(), int32(1, 2), out)
    assert not out.any()


def test_torch_moves_rows_where_triton_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, however often rows move."""

    def refuse(name: str) -> None:
        raise ImportError(f"no {name}")

    row_moves._row_kernels.cache_clear()
    monkeypatch.setattr(row_moves.importlib, "import_module", refuse)
    assert row_moves._row_kernels() is None and row_moves._row_kernels() is None
    row_moves._row_kernels.cache_clear()
    (record,) = caplog.records
    assert "Triton cannot be used (no megatron_libra.executor.row_kernels)" in record.getMessage()


def test_kernels_in_the_interpreter() -> None:
    """Every case of row_cases: same bits as by torch."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.helpers.row_cases"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]

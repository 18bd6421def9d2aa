"""Rows moved by the Triton kernels on CUDA: the bits of torch, any stream and device, any size.

Skipped, never faked, where there is no GPU. The kernels alone, without processes.
"""

from __future__ import annotations

import pytest
import torch

from megatron_libra.executor import row_moves
from megatron_libra.executor.row_moves import RowPart, gather_columns, gather_sums
from tests.helpers.row_cases import compare

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA device; this machine has none"),
]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices, not {NUM_GPUS}")
CYCLES = 100_000_000
"""Of a GPU's clock: about 50 ms."""


def test_same_bits_as_torch() -> None:
    """Widths of a whole number of 16-byte loads, of several pieces, and odd ones."""
    kernels = row_moves._row_kernels()
    assert kernels is not None, "Triton cannot be used here; the log says why"
    compare("cuda", 300, (96, 1100), kernels)


def test_what_the_public_functions_launch() -> None:
    """By the kernels, on the current stream, behind what was enqueued there."""
    rows = [torch.zeros(64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    index = torch.arange(64, device="cuda", dtype=torch.int32)
    out = torch.ones(64, 256, device="cuda", dtype=torch.bfloat16)
    gather_columns(rows, index, out)  # compiled before the stream is busy
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        rows[1].fill_(2)
        gather_columns(rows, index, out)
    stream.synchronize()
    assert not out[:, :128].any() and bool((out[:, 128:] == 2).all())


@two_gpus
def test_another_device_than_the_current() -> None:
    rows = torch.randn(50, 64, device="cuda:1")
    out = torch.empty(50, 64, device="cuda:1", dtype=torch.bfloat16)
    gather_columns([rows], torch.arange(50, device="cuda:1", dtype=torch.int32), out)
    assert torch.equal(out, rows.to(torch.bfloat16)) and torch.cuda.current_device() == 0


def test_offsets_beyond_int32() -> None:
    """2^31 elements and more in the rows that are read, and in those that are written."""
    num_rows, width = 2**21 + 5, 1024
    if torch.cuda.mem_get_info()[0] < 4 * num_rows * width * 2:
        pytest.skip("needs 16 GiB of free GPU memory")
    rows = torch.empty(num_rows, width, device="cuda", dtype=torch.bfloat16)
    rows[-3:] = torch.randn(3, width, device="cuda")
    out = torch.empty(num_rows, width, device="cuda", dtype=torch.bfloat16)
    added = torch.ones(3, width, device="cuda", dtype=torch.bfloat16)
    gather_sums([RowPart(0, (rows,)), RowPart(num_rows - 3, (added,))], None, out)
    assert torch.equal(out[-3:], (rows[-3:].float() + 1).to(torch.bfloat16))

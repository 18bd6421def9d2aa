"""The Triton kernels of `row_moves`: one launch reads every row once and writes it once.

In: tensors of one CUDA device, the current one, in bfloat16, float16 or float32. Out: written in
place, on the current stream; nothing waits. A program moves BLOCK elements of each column, some
rows side by side if they are short. Only import it where Triton is there: `row_moves` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_libra.executor.bound_route import HomeSum
from megatron_libra.executor.row_moves import MOST_PARTS, RowPart

__all__ = ["add_contributions", "check", "gather_sums"]

BLOCK = 2048
"""Elements of a column that a program moves: two loads of 16 bytes for each of its 128 threads."""
LONGEST_PIECE = 1024
"""Elements of one row that a program moves at most."""


def check() -> None:
    """Raise where Triton cannot reach the GPU or has no C compiler for its launchers."""
    triton.runtime.driver.active.get_current_target()


def gather_sums(parts: Sequence[RowPart], index: torch.Tensor | None, out: torch.Tensor) -> None:
    """See row_moves.gather_sums."""
    widths = tuple(column.shape[1] for column in parts[0].columns)
    grid, rows, columns = _blocks(len(out), max(widths))
    _gather_sums[grid](
        out, out.stride(0), index, len(out),
        tuple(part.columns for part in parts),
        tuple(tuple(column.stride(0) for column in part.columns) for part in parts),
        *_bounds(parts), widths, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


def add_contributions(
    dk: torch.Tensor, dv: torch.Tensor, mailbox_rows: torch.Tensor, home_sum: HomeSum
) -> None:
    """See row_moves.add_at_home; dk and dv are (home rows, width)."""
    width, num_rows = dk.shape[1], len(home_sum.rows)
    grid, rows, columns = _blocks(num_rows, width)
    _add_contributions[grid](
        dk, dv, width, home_sum.rows, num_rows, mailbox_rows, mailbox_rows.stride(0),
        home_sum.contributions, home_sum.pass_starts, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


def _bounds(parts: Sequence[RowPart]) -> tuple[int, ...]:
    """First row and the row behind the last of the parts after the first. Plain arguments: a kernel
    would be compiled anew for some values in a tuple."""
    bounds = [x for p in parts[1:] for x in (p.first_row, p.first_row + len(p.columns[0]))]
    return (*bounds, *[0] * (2 * MOST_PARTS - 2 - len(bounds)))


def _blocks(num_rows: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Grid, and the rows and columns of a program."""
    columns = min(1 << max(width - 1, 0).bit_length(), LONGEST_PIECE)
    rows = BLOCK // columns
    return (-(-num_rows // rows), -(-width // columns)), rows, columns


BOUNDS = ("start_1", "stop_1", "start_2", "stop_2", "start_3", "stop_3")


@triton.jit(do_not_specialize=["num_rows", *BOUNDS])
def _gather_sums(
    out, out_stride, index, num_rows, parts, strides, start_1, stop_1, start_2, stop_2, start_3,
    stop_3, widths, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    starts = (0, start_1, start_2, start_3)
    stops = (0, stop_1, stop_2, stop_3)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = place < num_rows
    row = place.to(tl.int64) if index is None else tl.load(index + place, inside, 0).to(tl.int64)
    element = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    target = out + place.to(tl.int64)[:, None] * out_stride + element[None, :]
    for column in tl.static_range(len(widths)):
        in_row = element < widths[column]
        whole = inside[:, None] & in_row[None, :]
        source = parts[0][column] + row[:, None] * strides[0][column] + element[None, :]
        total = tl.load(source, mask=whole, other=0.0)
        for part in tl.static_range(1, len(parts)):
            holds = (row >= starts[part]) & (row < stops[part])
            mask = whole & holds[:, None]
            near = row - starts[part]
            source = parts[part][column] + near[:, None] * strides[part][column] + element[None, :]
            added = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            # not the sum where nothing is added: -0.0 + 0.0 would be 0.0
            total = tl.where(mask, total.to(tl.float32) + added, total.to(tl.float32))
        tl.store(target, total.to(out.dtype.element_ty), mask=whole)
        target += widths[column]


@triton.jit(do_not_specialize=["num_rows"])
def _add_contributions(
    dk, dv, width, rows, num_rows, mailbox, mailbox_stride, contributions, pass_starts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    place = first + tl.arange(0, ROWS)
    inside = place < num_rows
    element = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = (element < width)[None, :]
    whole = inside[:, None] & in_row
    row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
    at_home = row[:, None] * width + element[None, :]
    dk_sum = tl.load(dk + at_home, mask=whole, other=0.0).to(tl.float32)
    dv_sum = tl.load(dv + at_home, mask=whole, other=0.0).to(tl.float32)
    number = 1
    start = tl.load(pass_starts)
    stop = tl.load(pass_starts + 1)
    while first < stop - start:  # passes get shorter, the last has no rows
        gets = place < stop - start
        source = tl.load(contributions + start + place, mask=gets, other=0).to(tl.int64)
        mask = gets[:, None] & in_row
        returned = mailbox + source[:, None] * mailbox_stride + element[None, :]
        dk_part = tl.load(returned, mask=mask, other=0.0).to(tl.float32)
        dv_part = tl.load(returned + width, mask=mask, other=0.0).to(tl.float32)
        # not the sum where nothing is added: -0.0 + 0.0 would be 0.0
        dk_sum = tl.where(mask, dk_sum + dk_part, dk_sum)
        dv_sum = tl.where(mask, dv_sum + dv_part, dv_sum)
        number += 1
        start = stop
        stop = tl.load(pass_starts + number)
    tl.store(dk + at_home, dk_sum.to(dk.dtype.element_ty), mask=whole)
    tl.store(dv + at_home, dv_sum.to(dv.dtype.element_ty), mask=whole)

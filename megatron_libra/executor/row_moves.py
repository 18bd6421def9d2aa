"""Gather rows, put them side by side, sum and cast them: each row is read once and written once.

In: tensors of rows (n, width), whose rows may be strided, and row numbers. Out: rows where they
leave, or sums at the home. On CUDA each function is one Triton kernel (`row_kernels`). Torch does
the same in several passes, with the same bits: on the CPU, for float64, and where there is no
Triton. Example, two parts of dK and dV, the second of rows 1 and 2:

    parts     dK  a b c   dV  p q r        out of index 2 0    c + e   r + t
                    d e         s t                            a       p
"""

from __future__ import annotations

import importlib
import logging
import subprocess
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

from megatron_libra.executor.bound_route import HomeSum

__all__ = [
    "MOST_PARTS",
    "RowPart",
    "add_at_home",
    "gather_columns",
    "gather_sums",
    "home_rows",
    "wide_dtype",
]

logger = logging.getLogger(__name__)

MOST_PARTS = 4
"""Parts that gather_sums takes."""


class RowPart(NamedTuple):
    """A term of a sum of rows, side by side in columns."""

    first_row: int
    """Row of the sum to which the first rows here belong."""
    columns: tuple[torch.Tensor, ...]
    """(rows, width) each; elements of a row are neighbours in memory."""

    @property
    def rows(self) -> slice:
        """The rows of the sum to which this adds."""
        return slice(self.first_row, self.first_row + len(self.columns[0]))


def home_rows(x: torch.Tensor, parts: int) -> torch.Tensor:
    """(T, heads, D) as (T * parts, width): row token * parts + part. A view if memory allows."""
    rows = x.reshape(len(x) * parts, x.shape[1] // parts * x.shape[2])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def gather_columns(columns: Sequence[torch.Tensor], index: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = columns[0][index[i]], columns[1][index[i]] ..., side by side, in out's dtype.

    Args:
        columns: (rows, width) each; elements of a row are neighbours in memory.
        index: (n,) int32.
        out: (n, sum of widths), contiguous.
    """
    if not len(out):
        return
    first = columns[0]
    if len(columns) == 1 and first.dtype == out.dtype and first.is_contiguous():
        torch.index_select(first, 0, index, out=out)
    else:
        gather_sums([RowPart(0, tuple(columns))], index, out)


def gather_sums(parts: Sequence[RowPart], index: torch.Tensor | None, out: torch.Tensor) -> None:
    """out[i] = the sum of what the parts have for row index[i], columns side by side. Summed in
    float32 (float64 for float64), in the order of the parts; then cast to out's dtype.

    Args:
        parts: at most MOST_PARTS, of equal widths; the first has all rows.
        index: (n,) int32; None: all rows in order.
        out: (n, sum of widths), contiguous.
    """
    if not len(out):
        return
    kernels = _kernels_for(out, *(column for part in parts for column in part.columns))
    if kernels is not None:
        with torch.cuda.device(out.device):
            kernels.gather_sums(parts, index, out)
        return
    targets = out.split([column.shape[1] for column in parts[0].columns], dim=1)
    for number, target in enumerate(targets):
        _gather(_summed(parts, number), index, target)


def add_at_home(
    dk: torch.Tensor, dv: torch.Tensor, mailbox_rows: torch.Tensor, home_sum: HomeSum
) -> None:
    """Add what came back to dK and dV at the home, in float32 (float64 for float64) and in a fixed
    order.

    Args:
        dk, dv: (T, G, D), contiguous; changed.
        mailbox_rows: (rows, 2 * width), dK and dV side by side; width: elements of a kv piece.
    """
    if not len(home_sum.rows):
        return
    width = mailbox_rows.shape[1] // 2
    homes = [x.view(x.numel() // width, width) for x in (dk, dv)]
    kernels = _kernels_for(dk, dv, mailbox_rows)
    if kernels is not None:
        with torch.cuda.device(dk.device):
            kernels.add_contributions(*homes, mailbox_rows, home_sum)
        return
    _add_by_torch(homes, mailbox_rows, home_sum)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums are made."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _add_by_torch(
    homes: Sequence[torch.Tensor], mailbox_rows: torch.Tensor, home_sum: HomeSum
) -> None:
    width = homes[0].shape[1]
    for home, returned in zip(homes, mailbox_rows.split(width, dim=1), strict=True):
        total = home.index_select(0, home_sum.rows).to(wide_dtype(home.dtype))
        for contributions in home_sum.passes:
            total[: len(contributions)] += returned.index_select(0, contributions)
        home.index_copy_(0, home_sum.rows, total.to(home.dtype))


def _summed(parts: Sequence[RowPart], column: int) -> torch.Tensor:
    """(rows, width) of one column; of a single part the column itself."""
    total = parts[0].columns[column]
    if len(parts) > 1:
        total = total.to(wide_dtype(total.dtype), copy=True)
    for part in parts[1:]:
        total[part.rows] += part.columns[column]
    return total


def _gather(rows: torch.Tensor, index: torch.Tensor | None, target: torch.Tensor) -> None:
    if index is None:
        target.copy_(rows)
    elif rows.dtype == target.dtype:
        torch.index_select(rows, 0, index, out=target)
    else:
        target.copy_(rows.index_select(0, index))


def _kernels_for(*tensors: torch.Tensor) -> ModuleType | None:
    """The Triton kernels if they can move these tensors."""
    if all(x.is_cuda and x.dtype != torch.float64 for x in tensors):
        return _row_kernels()
    return None


@cache
def _row_kernels() -> ModuleType | None:
    """Imported here: it takes a second and a GPU stack. A process tries once."""
    try:
        kernels = importlib.import_module("megatron_libra.executor.row_kernels")
        kernels.check()
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = str(error) or type(error).__name__
        logger.warning("torch moves rows, in more passes: Triton cannot be used (%s)", reason)
        return None
    return kernels

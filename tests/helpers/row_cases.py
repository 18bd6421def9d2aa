"""Inputs on which the Triton kernels must give the bits of torch, on any device.

`python -m tests.helpers.row_cases` with TRITON_INTERPRET=1 compares them on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from megatron_libra.executor import row_moves
from megatron_libra.executor.bound_route import HomeSum
from megatron_libra.executor.row_moves import RowPart

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Sums = tuple[list[RowPart], torch.Tensor | None, torch.Tensor]


class Cases:
    """Random tensors on one device, of some widths."""

    def __init__(self, device: str, num_rows: int, widths: Sequence[int]) -> None:
        self.device, self.num_rows, self.widths = device, num_rows, widths
        self.generator = torch.Generator().manual_seed(num_rows)

    def rows(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Random rows with zeros of both signs among them."""
        values = torch.randn(count, width, generator=self.generator)
        values[::3] *= 0.0
        return values.to(dtype).to(self.device)

    def index(self, count: int, stop: int) -> torch.Tensor:
        """Rows below stop, some of them several times."""
        index = torch.randint(stop, (count,), generator=self.generator, dtype=torch.int32)
        return index.to(self.device)

    def gathers(self) -> Iterator[Sums]:
        """One part: columns of equal and different widths, strided rows, casts, nothing at all."""
        n = self.num_rows
        for width, dtypes in itertools.product(
            self.widths, ((BF16, BF16), (F32, BF16), (F16, F32))
        ):
            for widths in ((width,), (width, width), (width, 16, width)):
                columns = tuple(self.rows(n, w, dtypes[0]) for w in widths)
                out = self.rows(n + 3, sum(widths), dtypes[1])
                yield [RowPart(0, columns)], self.index(n + 3, n), out
        strided = self.rows(n, 48, BF16).split(24, dim=1)
        yield [RowPart(0, strided)], self.index(5, n), self.rows(5, 48, BF16)

    def sums(self) -> Iterator[Sums]:
        """Two and more parts, the first perhaps wide, over other rows each."""
        n = self.num_rows
        for width, count in itertools.product(self.widths, (2, 4)):
            for first in (BF16, F32):
                parts = [RowPart(0, (self.rows(n, width, first), self.rows(n, width, first)))]
                for part in range(1, count):
                    pair = [self.rows(n - part - 1, width, BF16) for _ in range(2)]
                    parts.append(RowPart(part % 2, tuple(pair)))
                out = self.rows(n, 2 * width, BF16)
                yield parts, self.index(n, n), out
                yield parts, None, out.float()

    def home_sums(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, HomeSum]]:
        """dK, dV, what came back, and how to add it: none, one, several contributions to a row."""
        n = self.num_rows
        for width, dtype, sizes in itertools.product(
            self.widths, (BF16, F32), ((1,), (n,), (n - 1, n // 2 + 1, 1, 1))
        ):
            dk, dv = (self.rows(n, width, dtype)[:, None] for _ in range(2))
            returned = self.rows(2 * n, 2 * width, dtype)
            rows = torch.randperm(n, generator=self.generator)[: sizes[0]].to(self.device)
            starts = torch.tensor([0, *itertools.accumulate((*sizes, 0))], dtype=torch.int32)
            contributions = self.index(sum(sizes), 2 * n)
            home_sum = HomeSum(rows, contributions, starts.to(self.device), tuple(sizes))
            yield dk, dv, returned, home_sum


def bits(x: torch.Tensor) -> torch.Tensor:
    """What tells -0.0 from 0.0."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def check_gather(sums: Sums, expected: torch.Tensor) -> None:
    """The out that a path wrote, against that of the other."""
    parts, index, out = sums
    shapes = [(part.first_row, [tuple(x.shape) for x in part.columns]) for part in parts]
    assert torch.equal(bits(out), bits(expected)), (shapes, out.dtype, index is None)


def compare(device: str, num_rows: int, widths: Sequence[int], kernels: ModuleType) -> None:
    """Both paths on all cases."""
    cases = Cases(device, num_rows, widths)
    for sums in itertools.chain(cases.gathers(), cases.sums()):
        parts, index, out = sums
        expected = torch.empty_like(out)
        for number, target in enumerate(expected.split([x.shape[1] for x in parts[0].columns], 1)):
            row_moves._gather(row_moves._summed(parts, number), index, target)
        kernels.gather_sums(parts, index, out)
        check_gather(sums, expected)
    for dk, dv, returned, home_sum in cases.home_sums():
        expected = [x.clone() for x in (dk, dv)]
        row_moves._add_by_torch([x[:, 0] for x in expected], returned, home_sum)
        kernels.add_contributions(dk[:, 0], dv[:, 0], returned, home_sum)
        for found, right in zip((dk, dv), expected, strict=True):
            assert torch.equal(bits(found), bits(right)), (dk.shape, home_sum.pass_sizes)


def round_to_nearest() -> None:
    """Triton's interpreter cuts float32 off to bfloat16, where GPUs and torch round."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        whole = data.view("uint32")
        return ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16).astype("uint16")

    interpreter._convert_float = rounded


if __name__ == "__main__":
    from megatron_libra.executor import row_kernels

    round_to_nearest()
    compare("cpu", 40, (1, 16, 64, 96, 1024, 1100), row_kernels)

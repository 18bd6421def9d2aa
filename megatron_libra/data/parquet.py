"""Read lengths from Parquet, with pyarrow. In: a file, a column. Out: LengthRows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_libra.data.rows import LengthRows, offsets_of
from megatron_libra.extras import install_hint

__all__ = ["read_parquet"]


def read_parquet(path: Path, column: str | None = None) -> LengthRows:
    """A column of integers (one row each) or of lists of integers (one row a list).

    Args:
        path: the file.
        column: its name; None takes the only such column.

    Raises:
        ValueError: pyarrow is missing, the file is damaged, the column is missing or of another
            type, or a value is null.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"reading .parquet needs pyarrow, which is not installed; {install_hint('parquet')}."
        ) from None
    try:
        name = _column_of_lengths(parquet.read_schema(path), column)
        chunks = parquet.read_table(path, columns=[name]).column(name).chunks
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"not a Parquet file ({reason}); write it again.") from None
    return LengthRows.concatenate([_rows_of(chunk, name) for chunk in chunks])


def _column_of_lengths(schema: Any, column: str | None) -> str:
    usable = [field.name for field in schema if _is_lengths(field.type)]
    if column in usable:
        return str(column)
    if column is None and len(usable) == 1:
        return str(usable[0])
    if not usable:
        raise ValueError(
            "has no column of integers or of lists of integers; write the lengths into one."
        )
    if column is None:
        raise ValueError(
            f"has {len(usable)} columns of integers or lists of integers ({', '.join(usable)}); "
            f"name the one of lengths: --column {usable[0]}."
        )
    raise ValueError(
        f"column ({column!r}) must name one of the columns of integers or lists of integers: "
        f"{', '.join(usable)}."
    )


def _is_lengths(kind: Any) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind))


def _rows_of(chunk: Any, name: str) -> LengthRows:
    from pyarrow import compute, types

    is_flat = types.is_integer(chunk.type)
    values = chunk if is_flat else chunk.flatten()
    if chunk.null_count or values.null_count:
        raise ValueError(
            f"column {name!r} has null values; each must be a length; drop those rows or fill in 0."
        )
    flat = LengthRows.from_flat(values.to_numpy(zero_copy_only=False))
    if is_flat:
        return flat
    counts = compute.list_value_length(chunk).to_numpy(zero_copy_only=False)
    return LengthRows(flat.flat, offsets_of(np.asarray(counts, np.int64)))

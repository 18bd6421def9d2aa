"""The tilings of known kernels on Hopper. In: kernel, head dimension, pass. Out: Tiling.

Read from the kernels' sources: FlashAttention-4 4.0.0b36 (flash_attn/cute/interface.py and
tile_scheduler.py) and FlashAttention-2, which is also torch's (flash_fwd_launch_template.h and
flash_bwd_launch_template.h).
"""

from __future__ import annotations

from megatron_libra.simulator.tiling import ENTRY_HEAD, ENTRY_TILE, HEAD_ENTRY, Tiling

__all__ = ["KERNELS", "tiling_of"]

FA4_FORWARD = {64: (192, 128), 96: (192, 128), 128: (128, 128), 192: (128, 112), 256: (128, 80)}
"""Largest head dimension -> query rows of a tile, key rows of a step."""
FA4_BACKWARD = {64: (128, 128), 96: (128, 64), 128: (128, 64), 192: (96, 64), 256: (48, 64)}
"""Largest head dimension -> key rows of a tile, query rows of a step."""
FA2_FORWARD = {64: (128, 128), 128: (128, 64), 192: (128, 64), 256: (64, 64)}
FA2_BACKWARD = {64: (128, 128), 128: (128, 64), 256: (64, 64)}
REFERENCE_BLOCK = 256


def _fa4(head_dim: int, owns_keys: bool) -> Tiling:
    rows, step = _at_least(FA4_BACKWARD if owns_keys else FA4_FORWARD, head_dim)
    return Tiling(
        tile_rows=rows,
        step_rows=step,
        owns_keys=owns_keys,
        packs_heads=not owns_keys,
        grid=ENTRY_HEAD if owns_keys else ENTRY_TILE,
        searches_entry=True,
    )


def _fa2(head_dim: int, owns_keys: bool) -> Tiling:
    rows, step = _at_least(FA2_BACKWARD if owns_keys else FA2_FORWARD, head_dim)
    return Tiling(
        tile_rows=rows,
        step_rows=step,
        owns_keys=owns_keys,
        ctas_per_sm=1 if owns_keys else 2,
        grid=HEAD_ENTRY,
        longest_last=not owns_keys,
        sparse_grid=True,
    )


def _reference(head_dim: int, owns_keys: bool) -> Tiling:
    """Blocks of queries against all their keys, in both passes."""
    return Tiling(tile_rows=REFERENCE_BLOCK, step_rows=1, owns_keys=False)


KERNELS = {
    "fa4": _fa4,
    "flash_attn": _fa2,
    "flash_attn_3": _fa4,
    "torch_flash": _fa2,
    "reference": _reference,
}
"""By name of the kernel."""


def tiling_of(kernel: str, head_dim: int, *, backward: bool) -> Tiling:
    """How a kernel cuts its calls.

    Raises:
        ValueError: an unknown kernel, or a head dimension above 256.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel ({kernel!r}) must be one of {', '.join(KERNELS)}.")
    return KERNELS[kernel](head_dim, backward)


def _at_least(table: dict[int, tuple[int, int]], head_dim: int) -> tuple[int, int]:
    for limit, cut in table.items():
        if head_dim <= limit:
            return cut
    raise ValueError(f"head_dim ({head_dim}) must be at most {max(table)}.")

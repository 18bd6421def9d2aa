"""One microbatch on one rank. In: a PlannedBatch. Out: local tokens, parameters with the plan.

    batch of the data loader (1, L)          plan of the pool
        | this rank's pieces, to the device      | this worker's part, bound to the device
        v                                        v
    tokens, labels, loss mask (1, L / CP)    LibraPackedSeqParams with RoPE positions

Nothing waits for the device: lengths come from the plan on the host, and copies are pinned and
asynchronous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megatron_libra.executor.bind import bind_index
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.integration.packed_params import LibraPackedSeqParams
from megatron_libra.integration.plan_stream import PlannedBatch
from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.layout import TokenLayout

__all__ = ["BatchSplitter", "LocalBatch", "local_positions", "local_ranges"]

SHOWN = 6
"""Boundaries in an error."""
_DTYPES = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32}


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """What one model chunk is called with; tensors are (1, T_local) on the device."""

    position_ids: Tensor
    params: LibraPackedSeqParams
    tokens: Tensor | None = None
    """On the chunk that embeds."""
    labels: Tensor | None = None
    """On the chunk that computes the loss."""
    loss_mask: Tensor | None = None


def local_ranges(layout: TokenLayout, cp_rank: int) -> list[tuple[int, int]]:
    """Ranges [start, stop) of a packed sequence that a CP rank holds, in local order."""
    pieces = np.flatnonzero(layout.piece_rank == cp_rank) * layout.piece_tokens
    return [(start, start + layout.piece_tokens) for start in pieces.tolist()]


def local_positions(boundaries: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """(T_local,) position of each token inside its sample; counted on from its end in the padding
    tail.

    Args:
        boundaries: (n + 1,) cumulative sample lengths, from 0.
        tokens: (T_local,) positions in the packed sequence.
    """
    return tokens - boundaries[np.searchsorted(boundaries, tokens, side="right") - 1]


class BatchSplitter:
    """Cuts microbatches for this rank. Made once; all model chunks of the rank share it."""

    def __init__(
        self, layout: TokenLayout, runtime: PoolRuntime, worker: int, num_chunks: int
    ) -> None:
        """Remember this rank's place.

        Args:
            layout: homes of the tokens.
            runtime: executor of this rank's pool.
            worker: slot * CP + cp_rank of this rank.
            num_chunks: model chunks of this rank; each takes every microbatch once.
        """
        self._runtime = runtime
        self._slot, cp_rank = divmod(worker, layout.context_parallel_size)
        self._ranges = local_ranges(layout, cp_rank)
        self._tokens = layout.positions(cp_rank)
        self._num_chunks = num_chunks
        self._params: dict[tuple[str, int], LibraPackedSeqParams] = {}
        self._uses_left: dict[tuple[str, int], int] = {}

    def split(self, planned: PlannedBatch, *, embeds: bool, has_loss: bool) -> LocalBatch:
        """The local part of a microbatch. Collective inside the tensor-parallel group.

        Args:
            planned: what the data iterator yielded.
            embeds: whether the model chunk takes token ids.
            has_loss: whether it computes the loss.

        Raises:
            PlanError: the batch has other sample lengths than its plan.
        """
        if planned.batch is not None:
            _check_lengths(planned, self._slot)
        params = self._shared_params(planned)
        assert params.positions is not None
        return LocalBatch(
            position_ids=params.positions[None],
            params=params,
            tokens=self._load("tokens", planned) if embeds else None,
            labels=self._load("labels", planned) if has_loss else None,
            loss_mask=self._load("loss_mask", planned) if has_loss else None,
        )

    def _load(self, name: str, planned: PlannedBatch) -> Tensor:
        """The local tokens of one tensor: copied where the data is, broadcast to other ranks."""
        local = torch.empty(
            (1, len(self._tokens)), dtype=_DTYPES[name], device=self._runtime.device
        )
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            if planned.batch is None:
                raise PlanError(
                    f"no data loader on the rank that needs {name}; is its dataset built?"
                )
            # Slices of the loader's pinned memory: asynchronous copies without a staging buffer.
            at = 0
            for start, stop in self._ranges:
                piece = planned.batch[name][:, start:stop]
                local[:, at : at + stop - start].copy_(piece, non_blocking=True)
                at += stop - start
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            dist.broadcast(
                local,
                parallel_state.get_tensor_model_parallel_src_rank(),
                group=parallel_state.get_tensor_model_parallel_group(),
            )
        return local

    def _shared_params(self, planned: PlannedBatch) -> LibraPackedSeqParams:
        """The microbatch's parameters: bound by the first model chunk, dropped with the last."""
        if self._num_chunks == 1:
            return self._make_params(planned)
        key = (planned.stream, planned.index)
        if key not in self._params:
            self._params[key] = self._make_params(planned)
            self._uses_left[key] = self._num_chunks
        self._uses_left[key] -= 1
        if self._uses_left[key]:
            return self._params[key]
        del self._uses_left[key]
        return self._params.pop(key)

    def _make_params(self, planned: PlannedBatch) -> LibraPackedSeqParams:
        lengths = planned.plan.sequences[self._slot]
        boundaries = _boundaries(lengths)
        longest = max(lengths, default=1)
        on_device = self._upload(boundaries.astype(np.int32))
        return LibraPackedSeqParams(
            qkv_format="sbhd",
            cu_seqlens_q=on_device,
            cu_seqlens_kv=on_device,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            bound_plan=bind_index(planned.ready.take_index(), self._runtime),
            positions=self._upload(local_positions(boundaries, self._tokens)),
        )

    def _upload(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._runtime.device.type == "cuda":
            return tensor.pin_memory().to(self._runtime.device, non_blocking=True)
        return tensor


def _boundaries(lengths: tuple[int, ...]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])


def _check_lengths(planned: PlannedBatch, slot: int) -> None:
    """The loader's cu_seqlens, on the host, against the plan's. A boundary may be repeated: a
    document without tokens is no sample. Behind the last sample L may follow: padding."""
    assert planned.batch is not None
    expected = _boundaries(planned.plan.sequences[slot])
    given = planned.batch["cu_seqlens"][0].numpy()
    rises = given[1:] > np.maximum.accumulate(given)[:-1]
    cuts = given[np.concatenate([[True], rises])]
    padded = np.append(expected, planned.plan.seq_length)
    if not np.array_equal(cuts, expected) and not np.array_equal(cuts, padded):
        raise PlanError(
            f"microbatch {planned.index} of {planned.stream}: the data loader cut samples at "
            f"{_shown(given)}, the plan at {_shown(expected)}; the lengths do not belong to this "
            "data (stale sidecar or another sample order)."
        )


def _shown(boundaries: NDArray[Any]) -> str:
    """The first of them."""
    listed = ", ".join(map(str, boundaries[:SHOWN].tolist()))
    return f"[{listed}, ...]" if len(boundaries) > SHOWN else f"[{listed}]"

"""Dense causal attention of every sample, in float64: what the executor must equal.

In: Q, K, V, dO of whole packed sequences. Out: O, dQ, dK, dV. Shares no code with the kernels. On
the CPU gradients come from autograd and queries go in blocks, so no O(L^2) buffer is made. On other
devices the same is written out for pieces of a sample (some kv heads, some queries), large enough
to fill a GPU; the gradients are those of softmax(q k^T) v, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["dense_attention"]

INPUTS = ("q", "k", "v", "dout")
QUERY_BLOCK = 256
MOST_SCORES = 2**26
"""Scores of a piece, 512 MiB; three such tensors are alive at once."""


def dense_attention(
    tensors: dict[str, torch.Tensor],
    sequences: Sequence[Sequence[int]],
    *,
    scale: float | None = None,
    most_scores: int | None = None,
) -> dict[str, torch.Tensor]:
    """Attention inside every sample and its gradients.

    Args:
        tensors: "q", "dout" (P, L, N, D) and "k", "v" (P, L, G, D), any dtype.
        sequences: P lists of sample lengths; tokens behind the last sample get zeros.
        most_scores: of a piece; by default blocks with autograd on the CPU, else MOST_SCORES.

    Returns:
        "out", "dq" (P, L, N, D), "dk", "dv" (P, L, G, D) in float64, on the device of the inputs.
    """
    q = tensors["q"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if most_scores is None and q.device.type != "cpu":
        most_scores = MOST_SCORES
    results = {
        name: torch.zeros_like(tensors[like], dtype=torch.float64)
        for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v"))
    }
    for slot, lengths in enumerate(sequences):
        start = 0
        for length in lengths:
            rows = (slot, slice(start, start + length))
            sample = {name: tensors[name][rows].double() for name in INPUTS}
            if most_scores is None:
                made = _one_sample(sample, scale)
            else:
                made = _in_pieces(sample, scale, most_scores)
            for name, value in made.items():
                results[name][rows] = value
            start += length
    return results


def _one_sample(sample: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    q, k, v, dout = (sample[name].transpose(0, 1).contiguous() for name in INPUTS)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    length, group = q.shape[1], q.shape[0] // k.shape[0]
    out = torch.zeros_like(q.detach())
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        keys, values = (x[:, :stop].repeat_interleave(group, dim=0) for x in (k, v))
        scores = (q[:, start:stop] * scale) @ keys.transpose(1, 2)
        hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).triu(start + 1)
        block = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values
        block.backward(dout[:, start:stop])
        out[:, start:stop] = block.detach()
    named = {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x.transpose(0, 1) for name, x in named.items() if x is not None}


def _in_pieces(
    sample: dict[str, torch.Tensor], scale: float, most_scores: int
) -> dict[str, torch.Tensor]:
    """The query heads of a kv head are rows of one matrix: (G, L, group, D) -> (G, L group, D)."""
    length, kv_heads, head_dim = sample["k"].shape
    group = sample["q"].shape[1] // kv_heads
    q, dout = (
        sample[name].view(length, kv_heads, group, head_dim).transpose(0, 1).contiguous()
        for name in ("q", "dout")
    )
    k, v = (sample[name].transpose(0, 1).contiguous() for name in ("k", "v"))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    block = max(1, min(length, max(QUERY_BLOCK, most_scores // (group * kv_heads * length))))
    block = max(1, min(block, most_scores // (group * length)))
    step = max(1, min(kv_heads, most_scores // (group * length * block)))
    for first in range(0, kv_heads, step):
        for start in range(0, length, block):
            heads, stop = slice(first, first + step), min(start + block, length)
            rows, seen = (heads, slice(start, stop)), (heads, slice(0, stop))
            made = _piece(q[rows], k[seen], v[seen], dout[rows], scale)
            out[rows], dq[rows] = made[0], made[1]
            dk[seen] += made[2]
            dv[seen] += made[3]
    queries = {"out": out, "dq": dq}
    return {name: x.transpose(0, 1).flatten(1, 2) for name, x in queries.items()} | {
        "dk": dk.transpose(0, 1),
        "dv": dv.transpose(0, 1),
    }


def _piece(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, scale: float
) -> tuple[torch.Tensor, ...]:
    """out, dq (g, n, group, D), dk, dv (g, stop, D) of the last n of stop queries on stop keys."""
    size, num_queries, stop = q.shape, q.shape[1], k.shape[1]
    q, dout = q.flatten(1, 2) * scale, dout.flatten(1, 2)
    scores = q @ k.transpose(1, 2)
    hidden = torch.ones(num_queries, num_queries, dtype=torch.bool, device=q.device).triu(1)
    hidden = hidden.repeat_interleave(size[2], dim=0)
    scores[..., stop - num_queries :].masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(dim=-1)
    out = weights @ v
    # d softmax: each row's weights (dweights - their mean by the weights, which is out dout)
    dscores = torch.matmul(dout, v.transpose(1, 2), out=scores)
    dscores.sub_((out * dout).sum(dim=-1, keepdim=True)).mul_(weights)
    return (
        out.view(size),
        (dscores @ k).mul_(scale).view(size),
        dscores.transpose(1, 2) @ q,
        weights.transpose(1, 2) @ dout,
    )

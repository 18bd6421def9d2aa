"""Dense causal attention of every sample, in float64: what the executor must equal.

In: Q, K, V, dO of whole packed sequences. Out: O, dQ, dK, dV. Shares no code with the kernels:
    gradients come from autograd. Queries go in blocks, so no O(L^2) buffer is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["dense_attention"]

QUERY_BLOCK = 512


def dense_attention(
    tensors: dict[str, torch.Tensor],
    sequences: Sequence[Sequence[int]],
    *,
    scale: float | None = None,
) -> dict[str, torch.Tensor]:
    """Attention inside every sample and its gradients.

    Args:
        tensors: "q", "dout" (P, L, N, D) and "k", "v" (P, L, G, D), any dtype.
        sequences: P lists of sample lengths; tokens behind the last sample get zeros.

    Returns:
        "out", "dq" (P, L, N, D), "dk", "dv" (P, L, G, D) in float64, on the device of the inputs.
    """
    wide = {name: tensors[name].double() for name in ("q", "k", "v", "dout")}
    scale = wide["q"].shape[-1] ** -0.5 if scale is None else scale
    results = {
        name: torch.zeros_like(wide[like])
        for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v"))
    }
    for slot, lengths in enumerate(sequences):
        start = 0
        for length in lengths:
            rows = (slot, slice(start, start + length))
            sample = _one_sample({name: tensor[rows] for name, tensor in wide.items()}, scale)
            for name, value in sample.items():
                results[name][rows] = value
            start += length
    return results


def _one_sample(sample: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    q, k, v = (sample[name].detach().requires_grad_() for name in ("q", "k", "v"))
    group = q.shape[1] // k.shape[1]
    outs = []
    for start in range(0, len(q), QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, len(q))
        keys, values = (x[:stop].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], keys) * scale
        visible = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).tril(start)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out = torch.einsum("hqk,khd->qhd", weights, values)
        out.backward(sample["dout"][start:stop])
        outs.append(out.detach())
    return {
        "out": torch.cat(outs) if outs else torch.zeros_like(q),
        "dq": torch.zeros_like(q) if q.grad is None else q.grad,
        "dk": torch.zeros_like(k) if k.grad is None else k.grad,
        "dv": torch.zeros_like(v) if v.grad is None else v.grad,
    }

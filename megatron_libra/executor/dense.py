"""Dense causal attention of every sample, in float64: what the executor must equal.

In: Q, K, V, dO of whole packed sequences. Out: O, dQ, dK, dV. Shares no code with the kernels:
gradients come from autograd. Queries go in blocks, so no O(L^2) buffer is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["dense_attention"]

QUERY_BLOCK = 256


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
    q, k, v, dout = (sample[name].transpose(0, 1).contiguous() for name in ("q", "k", "v", "dout"))
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

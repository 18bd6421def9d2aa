"""RoPE rows by position: bit for bit the rows of Megatron's table, for every kind of rotary
module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.harness import call

POSITIONS = [0, 1, 2, 0, 1, 699, 700, 5, 6, 0]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rotary_percent": 1.0},
    "partial": {"rotary_percent": 0.5},
    "interleaved": {"rotary_percent": 1.0, "rotary_interleaved": True},
    "interpolated": {"rotary_percent": 1.0, "seq_len_interpolation_factor": 3.0},
    "scaled": {"rotary_percent": 1.0, "rope_scaling": True},
    "yarn": {"scaling_factor": 4.0, "original_max_position_embeddings": 64},
}


def rows(kind: str) -> tuple[bool, tuple[int, ...], list[str]]:
    """Whether our rows are Megatron's, their shape, and the state dict of the model."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
    )

    from megatron_libra.integration import rope
    from megatron_libra.integration.packed_params import LibraPackedSeqParams

    made = YarnRotaryEmbedding if kind == "yarn" else RotaryEmbedding
    model = torch.nn.Module()
    model.rotary_pos_emb = inner = made(16, **KINDS[kind])
    rope.attach(model)
    rope.attach(model)  # a second time is once
    wrapper = model.rotary_pos_emb
    params = LibraPackedSeqParams(
        qkv_format="sbhd", max_seqlen_q=701, max_seqlen_kv=701, positions=torch.tensor(POSITIONS)
    )
    length = wrapper.get_rotary_seq_len(None, None, None, None, params)
    ours = wrapper(length, packed_seq=False, cp_group=None)
    table = inner.get_emb(701)
    if kind == "yarn":
        assert ours[1] == table[1]
        ours, table = ours[0], table[0]
    same = torch.equal(ours, table[POSITIONS])
    return same, tuple(ours.shape), list(model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_table_s(kind: str) -> None:
    same, shape, state = call(rows, kind)
    assert same
    assert shape[:3] == (len(POSITIONS), 1, 1)
    assert state == []

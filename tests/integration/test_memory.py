"""Nothing of a microbatch outlives its iteration, with and without activation recompute."""

from __future__ import annotations

import pytest

from tests.integration.harness import train
from tests.integration.layouts import Layout
from tests.integration.test_equal_losses import FULL, SELECTIVE


@pytest.mark.parametrize("flags", ["", SELECTIVE, FULL], ids=["none", "selective", "full"])
def test_tensors_do_not_pile_up(flags: str, corpus: str) -> None:
    layout = Layout(pp=2, vpp=2, cp=1, flags=flags)
    for record in train(layout.world_size, layout.command_line(corpus)):
        settled = record.tensor_bytes[1:]
        # a few index tensors differ in size from batch to batch
        assert max(settled) <= 1.02 * min(settled), record.tensor_bytes

"""Evaluation between iterations: separate streams, the reference's losses, plans on every rank."""

from __future__ import annotations

import pytest

from tests.integration.harness import train
from tests.integration.layouts import Layout
from tests.integration.reference import dense_reference

EVALUATE = "--eval-iters 2 --eval-interval 2"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, cp=2, pool=2, flags=EVALUATE),
        Layout(pp=2, vpp=2, cp=2, flags=EVALUATE),
        Layout(dp=2, pool=2, flags=f"{EVALUATE} --eval-global-batch-size 4"),
    ],
    ids=["dp2-cp2", "pp2-vpp2-cp2", "smaller-batch"],
)
def test_same_validation_losses(layout: Layout, corpus: str) -> None:
    reference = layout.reference
    expected = train(reference.world_size, reference.command_line(corpus), arrange=dense_reference)[
        -1
    ]
    records = train(layout.world_size, layout.command_line(corpus))

    # after iterations 2 and 4, then on the validation and the test set at the end
    assert len(expected.evaluations) == 4
    assert records[-1].evaluations == pytest.approx(expected.evaluations, rel=1e-5)
    assert records[-1].losses == pytest.approx(expected.losses, rel=1e-5)
    assert {stream for stream, _, _ in records[0].order} == {"train", "valid", "test"}


def test_no_evaluation_data(corpus: str) -> None:
    layout = Layout(dp=2, pool=2, flags="--split 100,0,0 --eval-iters 0")
    assert len(train(layout.world_size, layout.command_line(corpus))[-1].losses) >= 5

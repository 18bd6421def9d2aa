"""Links without a GPU: the fit by hand, noise that is measured again, processes of this machine."""

from __future__ import annotations

import pytest

from megatron_libra.replay import links
from megatron_libra.replay.links import fit_link, measure_copies, measure_nccl


def test_a_link_by_hand() -> None:
    """10 us and 100 GB/s."""
    assert fit_link([1e6, 1e8, 1e9], [20e-6, 1010e-6, 10010e-6]) == pytest.approx((100, 10))
    with pytest.raises(ValueError, match="of 1, 100 MB took 0.01, 0.01 ms: more bytes took no"):
        fit_link([1e6, 1e8], [1e-5, 1e-5])


NOISY = (9e-2, 9e-2, 2e-2)
"""Seconds of three sizes, each ten times the last: the largest was the fastest."""


def _links_of(monkeypatch: pytest.MonkeyPatch, runs: list[tuple[float, ...]]) -> list[int]:
    """Two workers whose measurements are these, one after the other; the list grows with them."""
    begun: list[int] = []

    def measured(worker: object, num_workers: int, *_: object, **__: object) -> list[object]:
        begun.append(num_workers)
        slow = runs[len(begun) - 1]
        return [([each / 2 for each in slow], 0.0), (list(slow), 0.01 * len(begun))]

    monkeypatch.setattr(links, "run_workers", measured)
    return begun


def test_noise_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 us and 1 GB/s, of which two measurements saw a part each; the last one's loss."""
    seconds = [1e-4 + size * 1e-3 for size in links._sizes("gloo")]
    runs = [NOISY, (*NOISY[:2], seconds[2]), (*seconds[:2], NOISY[2])]
    begun = _links_of(monkeypatch, runs)
    link = measure_nccl(2, backend="gloo")
    assert (link.gb_s, link.message_us) == pytest.approx((1, 100), rel=0.01)
    assert (begun, link.overlap_loss) == ([2, 2, 2], 0.03)


def test_a_steady_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = _links_of(monkeypatch, [(1e-4, 2e-4, 1e-3)])
    measure_nccl(2, backend="gloo")
    assert begun == [2]


def test_noise_without_an_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = _links_of(monkeypatch, [NOISY] * links.ATTEMPTS)
    sizes = ", ".join(f"{size:g}" for size in links._sizes("gloo"))
    with pytest.raises(ValueError, match=f"exchanges of {sizes} MB took 90, 90, 20 ms") as caught:
        measure_nccl(2, backend="gloo")
    assert len(begun) == links.ATTEMPTS
    assert str(caught.value).endswith("try again when nothing else runs on this machine.")


def test_copies_are_measured_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 us and 1000 GB/s, behind a measurement in which something else took 1 ms."""
    seconds = [1e-5 + size * 1e-6 for size in links.MEGABYTES]
    runs = [[1e-3] * len(seconds), seconds]
    monkeypatch.setattr(links, "_all_copies", lambda num_gpus: runs.pop(0))
    link = measure_copies(4)
    assert (link.gb_s, link.message_us, link.overlap_loss) == pytest.approx((1000, 10, 0))
    assert not runs


def test_links_between_processes_are_measured() -> None:
    """Whatever else this machine does meanwhile."""
    link = measure_nccl(2, backend="gloo")
    assert link.gb_s > 0 and link.message_us >= 0 and link.overlap_loss == 0

"""Layers of random traffic through two transports, as the executor sends them, every row checked.

In: transports of a pool. Out: how many elements arrived wrong, counted on the device, so that the
host waits for nothing. Contents are a formula of (layer, mailbox, chunk, source, place).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_libra.executor.transport import Mailbox, MailboxRequest, RowTraffic, Transport

__all__ = ["Case", "no_delay", "run_layers"]

PRIME = 251
"""Contents are below it, so they are exact in bfloat16."""
Delay = Callable[[], None]


def no_delay() -> None:
    """Workers that run as fast as they can."""


@dataclass(frozen=True, slots=True)
class Case:
    """What run_layers sends."""

    num_layers: int = 12
    chunks: int = 3
    max_rows: int = 20
    """From one worker to one other in the first layer; it grows and shrinks from layer to layer."""
    width: int = 5
    seed: int = 0


def run_layers(
    dispatch: Transport,
    return_: Transport,
    case: Case,
    *,
    device: torch.device,
    delay: Delay = no_delay,
) -> torch.Tensor:
    """Wrong elements, 0-dimensional. Collective over the pool.

    Args:
        delay: called before rows are packed, read, and the mailboxes closed.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for layer in range(case.num_layers):
        _run_layer(dispatch, return_, case, layer, wrong, delay)
    return wrong


def _traffics(case: Case, layer: int, num_workers: int, worker: int) -> tuple[RowTraffic, ...]:
    """Of the chunks of a layer, the last of which is the first again."""
    first, *others = (
        _traffic(case, layer, chunk, num_workers, worker) for chunk in range(case.chunks - 1)
    )
    return first, *others, first


def _traffic(case: Case, layer: int, chunk: int, num_workers: int, worker: int) -> RowTraffic:
    """Of any layer, known to all; some layers move nothing, some workers neither send nor get."""
    rng = np.random.default_rng([case.seed, layer, chunk])
    most = 1 + case.max_rows * (1 + layer % 5) * (1 + layer // 5)
    matrix = rng.integers(0, most, (num_workers, num_workers))
    matrix *= rng.random((num_workers, num_workers)) < 0.7
    if layer % 4 == 2:
        matrix *= np.eye(num_workers, dtype=np.int64)
    if layer % 4 == 3:
        left_out = layer % num_workers
        matrix[left_out, :] = 0
        matrix[:, left_out] = 0
    return RowTraffic(matrix.astype(np.int64), worker)


def _run_layer(
    dispatch: Transport,
    return_: Transport,
    case: Case,
    layer: int,
    wrong: torch.Tensor,
    delay: Delay,
) -> None:
    queries = _traffics(case, 2 * layer, dispatch.num_workers, dispatch.worker)
    keys = _traffic(case, 2 * layer + 1, 0, dispatch.num_workers, dispatch.worker)
    there = [
        MailboxRequest(queries, case.width, torch.float32),
        MailboxRequest((keys,), 2 * case.width, torch.bfloat16),
    ]
    back = [MailboxRequest(tuple(x.inverse for x in queries), case.width, torch.float16)]
    device = wrong.device
    sent, returned = dispatch.open(there, device), return_.open(back, device)
    arriving = []
    for chunk in range(case.chunks):
        delay()
        parts = [(sent[0], chunk)] + [(sent[1], 0)] * (chunk == 0)
        for place, (mailbox, number) in enumerate(parts):
            _pack(mailbox, layer, place, number)
        arriving.append(dispatch.start(parts))
    leaving = []
    for chunk, pending in enumerate(arriving):
        pending.wait()
        delay()
        wrong += _wrong(sent[0], layer, 0, chunk)
        _pack(returned[0], layer, 2, chunk)
        leaving.append(return_.start([(returned[0], chunk)]))
    for pending in leaving:
        pending.wait()
    delay()
    wrong += _wrong(sent[1], layer, 1, 0)
    for chunk in range(case.chunks):
        wrong += _wrong(sent[0], layer, 0, chunk) + _wrong(returned[0], layer, 2, chunk)
    dispatch.close(sent)
    return_.close(returned)


def _pack(mailbox: Mailbox, layer: int, place: int, chunk: int) -> None:
    own = mailbox.own(chunk, chunk + 1)
    contents = _contents(
        0, own.numel(), layer, place, chunk, mailbox.traffics[chunk].worker, own.device
    )
    own.copy_(contents.view(own.shape))
    mailbox.rows[-1].zero_()


def _wrong(mailbox: Mailbox, layer: int, place: int, chunk: int) -> torch.Tensor:
    """Elements of a received chunk, and of the caller's row, that are not what was sent."""
    traffic, width, device = mailbox.traffics[chunk], mailbox.rows.shape[1], mailbox.rows.device
    parts = [torch.empty(0, dtype=torch.int64, device=device)]
    for source, count in enumerate(traffic.receive):
        first = int(traffic.moved[source, : traffic.worker].sum())
        parts.append(_contents(first * width, count * width, layer, place, chunk, source, device))
    expected = torch.cat(parts).view(-1, width)
    return (mailbox.received(chunk) != expected).sum() + (mailbox.rows[-1] != 0).sum()


def _contents(
    start: int, count: int, layer: int, place: int, chunk: int, worker: int, device: torch.device
) -> torch.Tensor:
    origin = 1009 * layer + 211 * place + 67 * chunk + 17 * worker
    return (torch.arange(start, start + count, device=device) * 31 + origin) % PRIME

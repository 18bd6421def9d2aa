"""Plans made ahead, in the background, and known to be the same on every rank (paper section 5).

In: keys and, on the coordinator, sequences. Out: ReadyPlans. The calls, in order:

    request(key, sequences)   every rank of the plan group, same keys in the same order; returns
                              at once. Sequences are read on the coordinator only.
    take(key)                 every rank, when the plan is needed; waits if it is not there yet.
    close()                   every rank.

A background thread on every rank works through the requests: the coordinator's asks the planner
process, then the plan is broadcast over gloo and the ranks compare what they hold: the key that
each asked for, its settings and the digest that it recomputes. Last, each rank numbers the rows of
its own part, which takes the busiest workers longer than the plan took. The training thread never
talks to a peer here, so a peer that is late or dead shows as a timeout or an error in take(), not
as a hang.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_libra.executor.plan_index import PlanIndex, index_plan
from megatron_libra.executor.plan_server import PlanServer, PlanSettings
from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.pool_plan import PoolPlan

__all__ = ["PlanCoordinator", "ReadyPlan"]

logger = logging.getLogger(__name__)

Sequences = Sequence[Sequence[int]]
ROW_BYTES = 256
SHOWN_DIGITS = 16
CLOSE_S = 2.0


@dataclass(slots=True, eq=False)
class ReadyPlan:
    """A pool's plan, with all that this rank needs of it on the host."""

    pool: PoolPlan
    worker: int
    """Whose part this rank computes."""
    index: PlanIndex | None = None
    """Row numbers of that part, until they are taken."""

    def number_rows(self) -> None:
        """Make the row numbers."""
        self.index = index_plan(self.pool.worker_plan(self.worker))

    def take_index(self) -> PlanIndex:
        """The row numbers, which are forgotten here: they may have 100 MB, and Megatron keeps a
        batch to the end of its iteration. Who asks again, for a rerun, waits for new ones."""
        if self.index is None:
            self.number_rows()
        index, self.index = self.index, None
        assert index is not None
        return index


class PlanCoordinator:
    """See module docstring. One for each plan group and set of settings."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        settings: PlanSettings,
        *,
        worker: int,
        coordinator_rank: int = 0,
    ) -> None:
        """Start the background thread, and on the coordinator the planner process. Local.

        Args:
            group: gloo group of all ranks that need the plans, used by nobody else; None for one.
            settings: equal on every rank.
            worker: of the pool, whose part this rank computes; several ranks may have the same.
            coordinator_rank: rank inside the group that plans.
        """
        self._group = group
        self._settings = settings
        self._worker = worker
        self._coordinator_rank = coordinator_rank
        self._timeout_s = settings.config.plan_timeout_s
        self.last_plan_ms = 0.0
        """Milliseconds that the newest plan took to make; 0 on ranks that do not plan."""
        rank = 0 if group is None else group.rank()
        self._server = PlanServer(settings) if rank == coordinator_rank else None
        self._requests: queue.Queue[tuple[Hashable, Sequences | None] | None] = queue.Queue()
        self._pending: set[Hashable] = set()
        self._ready: dict[Hashable, ReadyPlan | Exception] = {}
        self._broken: Exception | None = None
        self._has_waited = False
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="libra-plans", daemon=True)
        self._thread.start()

    @property
    def is_coordinator(self) -> bool:
        """True on the rank that plans."""
        return self._server is not None

    def request(self, key: Hashable, sequences: Sequences | None = None) -> None:
        """Ask for a plan. Every rank of the group calls it, with the same keys in the same order.

        Args:
            key: what take() will ask for; compared between ranks by its repr.
            sequences: P lists of sample lengths; needed on the coordinator, ignored elsewhere.

        Raises:
            ValueError: the key is already asked for, or the coordinator has no sequences.
        """
        if self.is_coordinator and sequences is None:
            raise ValueError(f"the coordinator needs the sequences of plan {key!r}, not None.")
        with self._changed:
            if key in self._pending or key in self._ready:
                raise ValueError(f"plan {key!r} was already requested; take() it first.")
            self._pending.add(key)
        self._requests.put((key, sequences))

    def take(self, key: Hashable) -> ReadyPlan:
        """The plan of a key, once; waits up to config.plan_timeout_s. Every rank calls it.

        Raises:
            ValueError: the sequences broke a rule of the planner.
            PlanError: never requested, not there in time, planner or peer dead, or ranks differ.
        """
        started = time.monotonic()
        with self._changed:
            if key not in self._pending and key not in self._ready:
                raise PlanError(f"plan {key!r} was never requested on this rank; request() it.")
            self._changed.wait_for(
                lambda: key in self._ready or self._broken is not None, self._timeout_s
            )
            found = self._ready.pop(key, None)
        waited_ms = (time.monotonic() - started) * 1000
        if waited_ms > 1:
            # the first plan has nothing to hide behind
            hint = "; raise plan_ahead" if self._has_waited else ""
            logger.info("waited %.1f ms for plan %r%s", waited_ms, key, hint)
        self._has_waited = True
        if isinstance(found, ReadyPlan):
            return found
        problem = found or self._broken
        if problem is not None:
            kind = PlanError if isinstance(problem, PlanError) else ValueError
            raise kind(str(problem)) from problem
        raise PlanError(
            f"plan {key!r} did not come within {self._timeout_s:g} s (plan_timeout_s); "
            "a rank of the group is dead, behind, or did not request it."
        )

    def close(self) -> None:
        """Finish what was requested and stop. Every rank calls it; a dead peer costs seconds."""
        self._is_closing = True
        self._requests.put(None)
        self._thread.join(CLOSE_S)
        if self._server is not None:
            self._server.close()

    def _work(self) -> None:
        """Background thread: one request after the other, until close() or the first broken one."""
        while (request := self._requests.get()) is not None:
            key, sequences = request
            try:
                ready = ReadyPlan(self._exchange(key, sequences), self._worker)
                if not self._is_closing:  # what nobody will take needs no row numbers
                    ready.number_rows()
                outcome: ReadyPlan | Exception = ready
            except ValueError as error:
                outcome = error
            except Exception as error:
                self._break(error)
                return
            with self._changed:
                self._pending.discard(key)
                self._ready[key] = outcome
                self._changed.notify_all()

    def _break(self, error: Exception) -> None:
        """After this no plan comes any more: ranks may be out of step."""
        broken = error
        if not isinstance(error, PlanError):
            broken = PlanError(f"the plan group failed: {error!r}")  # some have no text
            broken.__cause__ = error
        with self._changed:
            self._broken = broken
            self._changed.notify_all()

    def _exchange(self, key: Hashable, sequences: Sequences | None) -> PoolPlan:
        """Plan or receive, then compare. Collective on the plan group, in the background."""
        message = self._ask_planner(sequences) if self._server is not None else b""
        if self._group is not None:
            message = _broadcast(message, self._group, self._coordinator_rank)
        kind, body = message[:1], message[1:]
        plan = _decode(body) if kind == b"P" else None
        if self._group is not None:
            self._compare(key, "" if plan is None else plan.digest, self._group)
        if plan is not None:
            return plan
        if kind == b"P":  # of one rank alone, or of all alike: their digests do not differ
            raise PlanError(f"plan {key!r} cannot be read; see the log above for the reason.")
        raise (ValueError if kind == b"V" else PlanError)(body.decode(errors="replace"))

    def _ask_planner(self, sequences: Sequences | None) -> bytes:
        """A kind (P plan, V ValueError, E error) and a body; errors must reach every rank too."""
        assert self._server is not None and sequences is not None
        started = time.monotonic()
        try:
            plan = self._server.plan(sequences)
            self.last_plan_ms = (time.monotonic() - started) * 1000
            return b"P" + plan
        except ValueError as error:
            return b"V" + str(error).encode()
        except PlanError as error:
            return b"E" + str(error).encode()
        except Exception as error:
            logger.exception("the planner cannot be asked")
            return b"E" + f"the planner cannot be asked ({error!r})".encode()

    def _compare(self, key: Hashable, digest: str, group: dist.ProcessGroup) -> None:
        """Raise PlanError unless all ranks hold the same key, settings and plan. Collective."""
        exact = _sha(repr((key, self._settings, digest)))
        shown = (_sha(repr(self._settings)), digest[:SHOWN_DIGITS], repr(key))
        rows = _all_gather("\n".join((exact, *shown)).encode(), group)
        if len({row[:SHOWN_DIGITS] for row in rows}) > 1:
            by_rank = dict(zip(dist.get_process_group_ranks(group), rows, strict=True))
            raise PlanError(f"plan {key!r}: {_difference(by_rank)}")


def _difference(rows: dict[int, bytes]) -> str:
    """What the ranks hold differently, and the rule."""
    columns = {
        rank: row.decode(errors="replace").rstrip().split("\n") for rank, row in rows.items()
    }
    for column, name, rule in (
        (3, "key", "every rank must request the same plans in the same order."),
        (1, "settings", "CP size, attention shape, config and seq_length must be equal."),
        (2, "digest", "all ranks must run the same versions of megatron_libra and numpy."),
    ):
        values = {rank: parts[column] or "none" for rank, parts in columns.items()}
        if len(set(values.values())) > 1:
            held = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            return f"ranks differ in the {name} ({held}); {rule}"
    return "ranks differ in a key that is too long to show; use shorter keys."


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:SHOWN_DIGITS]


def _decode(body: bytes) -> PoolPlan | None:
    """The plan, or None if this rank cannot read it: then its digest differs from the others'."""
    try:
        return PoolPlan.from_bytes(body)
    except Exception:
        logger.exception("a plan could not be read")
        return None


def _broadcast(message: bytes, group: dist.ProcessGroup, source: int) -> bytes:
    """The source's message on every rank of the group."""
    size = torch.tensor([len(message)])
    dist.broadcast(size, group=group, group_src=source)
    data = torch.empty(int(size), dtype=torch.uint8)
    if group.rank() == source:
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=source)
    return data.numpy().tobytes()


def _all_gather(row: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The first ROW_BYTES of all ranks' rows, in rank order."""
    mine = torch.frombuffer(bytearray(row[:ROW_BYTES].ljust(ROW_BYTES)), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    return [row.numpy().tobytes() for row in rows]

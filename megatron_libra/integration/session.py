"""One run, from the first hook to the last. In: Megatron's namespace. Out: what each hook needs.

begin          settings are checked, config and homes are known
connect        the model is built: groups, executor, plan coordinator, batch splitter
sample_order   a dataset is built: which samples this replica loads
plan_batches   its iterators are built: each batch with its plan
close          training is over
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training.utils import print_rank_0

from megatron_libra.data.lengths import length_table
from megatron_libra.data.sampler import LibraSampler, ReplicaLayout
from megatron_libra.data.schedule import constant_batch_size, parse_step_batch_size
from megatron_libra.executor.coordinator import PlanCoordinator
from megatron_libra.executor.plan_server import PlanSettings
from megatron_libra.executor.runtime import pool_runtime
from megatron_libra.integration import rope
from megatron_libra.integration.arguments import config_from_args, shape_from_args
from megatron_libra.integration.batch import BatchSplitter
from megatron_libra.integration.groups import RunGroups, create_run_groups
from megatron_libra.integration.plan_stream import PlannedBatches, PlanStream, pipeline_skew
from megatron_libra.integration.telemetry import Telemetry
from megatron_libra.plan.layout import TokenLayout

__all__ = ["Session"]


class Session:
    """State of a run on one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = config_from_args(args)
        self.shape = shape_from_args(args)
        self.layout = TokenLayout(self.config.layout, args.seq_length, args.context_parallel_size)
        self.replicas = ReplicaLayout(
            data_parallel_size=args.data_parallel_size,
            pool_size=self.config.pool_size,
            scope=_scope(args, self.config.vrsp_scope),
            pipeline_parallel_size=args.pipeline_model_parallel_size,
        )
        self.telemetry = Telemetry(self.replicas, args.context_parallel_size, args.libra_log_file)
        self._streams: dict[str, PlanStream] = {}
        self._orders: dict[str, LibraSampler] = {}
        self._coordinator: PlanCoordinator | None = None
        self._splitter: BatchSplitter | None = None

    def connect(self, model_chunks: list[Any]) -> list[Any]:
        """A pre-wrap hook of the model. Collective: every rank, once, after Megatron's groups."""
        for chunk in model_chunks:
            rope.attach(chunk)
        args = self.args
        device = torch.device("cpu" if args.libra_cpu else f"cuda:{torch.cuda.current_device()}")
        groups = create_run_groups(
            pool_size=self.config.pool_size,
            context_parallel_size=args.context_parallel_size,
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
        )
        runtime = pool_runtime(
            groups.pool,
            self.config,
            device=device,
            dtype=args.params_dtype,
            head_dim=self.shape.head_dim,
        )
        self._coordinator = PlanCoordinator(
            groups.pool.plan,
            PlanSettings(
                context_parallel_size=args.context_parallel_size,
                shape=self.shape,
                config=self.config,
                seq_length=args.seq_length,
            ),
            worker=groups.pool.worker,
        )
        self._splitter = BatchSplitter(
            self.layout, runtime, groups.pool.worker, num_chunks=len(model_chunks)
        )
        self.telemetry.connect(groups)
        _report_groups(groups, runtime.kernel.name)
        return model_chunks

    @property
    def splitter(self) -> BatchSplitter:
        """Cuts this rank's batches; there from `connect` on."""
        assert self._splitter is not None, "the model is not built yet"
        return self._splitter

    def sample_order(self, dataset: Any, consumed_samples: int) -> LibraSampler:
        """Which samples of a dataset this replica loads, in order; a batch sampler for its loader.

        Args:
            dataset: of one split, on a rank that holds data.
            consumed_samples: of this split, before this run.
        """
        name = _split_of(dataset)
        sampler = LibraSampler(
            length_table(dataset),
            self.replicas,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            batch_size=self._batch_size(name),
            consumed_samples=consumed_samples,
        )
        self._orders[name] = sampler
        return sampler

    def plan_batches(self, name: str, batches: Iterator[Any] | None) -> PlannedBatches:
        """Batches of one model chunk with their plans.

        Args:
            name: train, valid or test.
            batches: the loader's, or None on a rank that holds no data of this split.
        """
        if name not in self._streams:
            self._streams[name] = self._start_stream(name)
        return PlannedBatches(self._streams[name], batches)

    def _start_stream(self, name: str) -> PlanStream:
        """A stream, fed if this rank's first model chunk holds data of the split."""
        assert self._coordinator is not None, "the model is not built yet"
        args = self.args
        skew = pipeline_skew(
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size or 1,
            args.microbatch_group_size_per_vp_stage,
        )
        stream = PlanStream(
            name,
            self._coordinator,
            ahead=self.config.plan_ahead + skew,
            pool_size=self.config.pool_size,
        )
        order = self._orders.get(name)
        upcoming = None if order is None else order.microbatches()
        if upcoming is None and self._coordinator.is_coordinator:
            upcoming = iter(())  # a split without data: --eval-iters 0, or a split of 100,0,0
        stream.start(upcoming)
        if order is not None and name == "train":
            self.telemetry.watch(order.windows())
        return stream

    def close(self) -> None:
        """Stop planning. Local; nothing may be taken afterwards."""
        if self._coordinator is not None:
            self._coordinator.close()

    def _batch_size(self, split: str) -> Any:
        args = self.args
        if split != "train":
            return constant_batch_size(args.eval_global_batch_size)
        if args.step_batch_size_schedule is None:
            return constant_batch_size(args.global_batch_size)
        return parse_step_batch_size(args.step_batch_size_schedule, seq_length=args.seq_length)


def _scope(args: argparse.Namespace, scope: str) -> Any:
    """What VRSP may balance: Ulysses keeps Megatron's order; experts that ranks of several pools
    share couple these in every layer, so each microbatch must be balanced.

    Megatron spreads experts over neighbouring ranks of a stage, EP x expert TP of them, and a pool
    is P x CP x TP neighbours.
    """
    if args.context_parallel_impl == "ulysses":
        return "off"
    workers = args.libra_pool_size * args.context_parallel_size
    sharing = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    coupled = workers * args.tensor_model_parallel_size % sharing > 0
    return "microbatch" if scope == "auto" and coupled else scope


def _split_of(dataset: Any) -> str:
    """train, valid or test: Megatron's datasets know their split."""
    split = getattr(dataset, "split", None) or dataset.index_split
    return str(split.name)


def _report_groups(groups: RunGroups, kernel: str) -> None:
    print_rank_0(
        f"> libra: pools of {len(groups.pool.ranks)} workers (the first: ranks "
        f"{', '.join(map(str, groups.pool.ranks))}), {groups.num_created} process groups "
        "created by "
        f"this rank, attention kernel {kernel}"
    )

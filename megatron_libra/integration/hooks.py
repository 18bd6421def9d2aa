"""The few places of Megatron that libra hangs on. In: Megatron's calls. Out: the same, extended.

    hook             called in megatron.training              to
    add_arguments    arguments.parse_args                     add the flags
    begin            training.pretrain, first                 refuse; log how CUDA started; set
                                                              layer spec, forward step
    data_loader      training.build_pretraining_data_loader   order the samples of each step
    data_iterators   training.build_train_valid_test_data_    put a plan to each batch
                     iterators
    end_iteration    training.training_log, last              report balance and traffic
    end              training.pretrain, last                  stop planning

`install()` puts them there in this process; patches/ puts the same calls into a Megatron tree.
Every hook but the first is the identity unless `--context-parallel-impl` is ulysses or libra.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training import get_args
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from megatron.training.utils import print_rank_0, print_rank_last

from megatron_libra.integration import connections, refusals, state
from megatron_libra.integration.arguments import add_arguments
from megatron_libra.integration.errors import RunError
from megatron_libra.integration.forward_step import loss_function_of, make_forward_step
from megatron_libra.integration.layer_spec import wrap_spec
from megatron_libra.integration.session import Session
from megatron_libra.integration.telemetry import IterationReport

__all__ = [
    "add_arguments",
    "begin",
    "data_iterators",
    "data_loader",
    "end",
    "end_iteration",
]

SHARING_PLACERS = ("home_first", "paper")
"""Placers that even out a pool, so that a hint makes sense when it stays uneven."""
SPLITS = ("train", "valid", "test")


def begin(
    cfg_container: Any, forward_step: Callable[..., Any], model_provider: Any = None
) -> Callable[..., Any]:
    """Prepare a run before Megatron initializes. Every rank; nothing is communicated.

    Args:
        cfg_container: PretrainConfigContainer; its model config gets a layer spec and a hook.
        forward_step: the script's.
        model_provider: the script's, if it builds its model without the config.

    Returns:
        The forward step to train with.

    Raises:
        RunError: the run cannot be trained exactly, with a line for each reason.
    """
    args = get_args()
    if args.context_parallel_impl == "megatron":
        return forward_step
    if model_provider is not None:
        raise RunError(
            "pretrain() was given a model_provider; libra's layers come from the model config: "
            "build the model from it, as pretrain_gpt.py does."
        )
    model = cfg_container.model
    refusals.check(args, model.transformer)
    session = Session(args)
    step = make_forward_step(
        loss_function_of(forward_step), lambda: session.splitter, session.telemetry.observe
    )
    line = connections.report(args)
    if line is not None:
        print_rank_0(line, args.rank)
    model.transformer_layer_spec = wrap_spec(model.transformer_layer_spec)
    model.pre_wrap_hooks.append(session.connect)
    state.put(session)
    return step


def data_loader(dataset: Any, consumed_samples: int, build: Callable[[Any, int], Any]) -> Any:
    """The data loader of one split, in libra's order.

    Args:
        dataset: of one split, or None on ranks without data.
        consumed_samples: of this split, before this run.
        build: Megatron's function, whose loader is kept but for its sampler.
    """
    session = state.get()
    loader = build(dataset, consumed_samples)
    if session is None or loader is None:
        return loader
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=session.sample_order(dataset, consumed_samples),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )


def data_iterators(iterators: Sequence[Any]) -> tuple[Any, ...]:
    """Megatron's (train, valid, test) iterators of one model chunk, each with plans beside its
    batches.

    Ranks without data get iterators as well: they take part in every plan.
    """
    session = state.get()
    if session is None:
        return tuple(iterators)
    return tuple(
        RerunDataIterator(session.plan_batches(name, None if it is None else it.iterable))
        for name, it in zip(SPLITS, iterators, strict=True)
    )


def end_iteration(iteration: int, losses: Mapping[str, Any]) -> None:
    """Close an iteration's telemetry; at a log interval, report it. Every rank.

    Args:
        iteration: number of the iteration that ended, from 1.
        losses: Megatron's reduced losses of the iteration.
    """
    session = state.get()
    if session is None:
        return
    session.telemetry.end_iteration(iteration, losses)
    if iteration % session.args.log_interval == 0:
        _report(session, session.telemetry.flush())


def end(completed: bool) -> None:
    """Finish the run. Every rank, when pretrain has returned (completed) or raised."""
    session = state.get()
    if session is None:
        return
    state.clear()
    if completed:
        _report(session, session.telemetry.flush())
    session.close()


def _report(session: Session, reports: Sequence[IterationReport]) -> None:
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    for report in reports:
        print_rank_last(report.line())
        hint = report.hint() if session.config.placer in SHARING_PLACERS else None
        if hint is not None and not session.telemetry.has_hinted:
            print_rank_last(hint)
            session.telemetry.has_hinted = True
        for name, value in report.scalars().items():
            if tensorboard:
                tensorboard.add_scalar(f"libra/{name}", value, report.iteration)
            if wandb:
                wandb.log({f"libra/{name}": value}, report.iteration)

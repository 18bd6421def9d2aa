"""The forward step of a run. In: the script's own. Out: one that trains on planned batches.

Megatron's script cuts its batch and makes plain packed-sequence parameters inside its forward
step, so that function is replaced as a whole; its loss function is kept.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_timers
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_libra.integration.batch import BatchSplitter
from megatron_libra.integration.errors import RunError
from megatron_libra.integration.plan_stream import PlannedBatch

__all__ = ["loss_function_of", "make_forward_step"]

ForwardStep = Callable[..., tuple[Any, Callable[..., Any]]]


def loss_function_of(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """`loss_func(loss_mask, output, model=)` of the module in which a forward step is defined.

    Raises:
        RunError: the module has none.
    """
    while isinstance(forward_step, functools.partial):
        forward_step = forward_step.func
    plain = inspect.unwrap(forward_step)
    loss_func = getattr(plain, "__globals__", {}).get("loss_func")
    if loss_func is None:
        raise RunError(
            f"the module of {getattr(plain, '__name__', plain)} has no loss_func(loss_mask, "
            "output, model=); "
            "define it beside the forward step, as pretrain_gpt.py does."
        )
    return loss_func


def make_forward_step(
    loss_func: Callable[..., Any],
    splitter: Callable[[], BatchSplitter],
    on_batch: Callable[[PlannedBatch], None],
) -> ForwardStep:
    """A forward step with Megatron's signature.

    Args:
        loss_func: the script's.
        splitter: gives the rank's splitter, which exists once the model is built.
        on_batch: told of every microbatch once a rank while training, for the log.
    """
    stimer = StragglerDetector()

    def forward_step(
        data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        with stimer(bdata=True):
            planned = next(data_iterator)
            batch = splitter().split(
                planned,
                embeds=get_attr_wrapped_model(model, "pre_process"),
                has_loss=get_attr_wrapped_model(model, "post_process"),
            )
            if _counts(model):
                # The sum of squares is the attention work; a second model chunk would count it
                # again.
                update_seqlen_stats_from_cu_seqlens(batch.params.cu_seqlens_q)
                on_batch(planned)
        timers("batch-generator").stop()
        with stimer:
            output = model(
                batch.tokens,
                batch.position_ids,
                None,
                labels=batch.labels,
                loss_mask=batch.loss_mask,
                packed_seq_params=batch.params,
            )
        return output, functools.partial(loss_func, batch.loss_mask, model=model)

    return forward_step


def _counts(model: Any) -> bool:
    return model.training and not get_attr_wrapped_model(model, "vp_stage")

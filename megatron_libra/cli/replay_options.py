"""Which options of `libra replay` go together. In: its context. Out: nothing, or a refusal.

CORPUS + job + plans   planned here, or a prepared file (--load) that has all three
--prepare              ends there: nothing is timed or drawn
--figure 5             single calls: no plans, no pool to trace
"""

from __future__ import annotations

import typer

from megatron_libra.cli.given_options import given_options, refuse_given
from megatron_libra.config import CHOICES
from megatron_libra.replay.figures import FIGURES

__all__ = ["check_options"]

JOB = (
    "seq_length",
    "context_parallel_size",
    "data_parallel_size",
    "global_batch_size",
    "query_heads",
    "kv_heads",
    "head_dim",
    "gpus_per_node",
)
PLANS = (
    "method",
    "seeds",
    "steps",
    "pack",
    "pool_size",
    "block_size",
    "head_split",
    "chunks",
    "load_slack",
    "placer",
    "scope",
    "processes",
    "to_prepare",
)
WORKERS = ("sample", "seconds")
TIMES = (
    "cost_model",
    "intra_node_gb_s",
    "inter_node_gb_s",
    "message_us",
    "overlap_loss",
    "measure",
    *WORKERS,
    "kernel",
    "device",
)
TRACE = ("trace", "trace_pool")


def check_options(context: typer.Context) -> None:
    """Return if the options that were given all have an effect.

    Raises:
        ValueError: an unknown figure or kernel, no or two sources, or options without an effect.
    """
    values, given = context.params, given_options(context)
    figure, kernel = values["figure"], values["kernel"]
    if figure != "5" and figure not in FIGURES:
        raise ValueError(f"figure ({figure!r}) must be one of 5, {', '.join(FIGURES)}.")
    if kernel not in CHOICES["kernel"]:
        raise ValueError(f"kernel ({kernel!r}) must be one of {', '.join(CHOICES['kernel'])}.")
    if (values["corpus"] is None) == (values["to_load"] is None):
        raise ValueError("give either CORPUS or --load FILE; try libra replay longtail-256k.")
    _refuse_idle(given, figure)


def _refuse_idle(given: dict[str, str], figure: str) -> None:
    """ValueError for options that would have no effect."""
    if "to_load" in given:
        why = "not with --load, whose file has its figure, job and plans"
        refuse_given(given, ("figure", *JOB, *PLANS), why)
    elif figure == "5":
        why = "not with --figure 5, which is of single calls, without plans"
        refuse_given(given, (*PLANS, *WORKERS, *TRACE), why)
    elif figure != "13":
        refuse_given(given, ("method",), f"not with --figure {figure}, which has its own")
    if "to_prepare" in given:
        why = "not with --prepare, which only plans; give it with --load"
        refuse_given(given, (*TIMES, *TRACE, "out", "png"), why)
    if "trace" not in given:
        refuse_given(given, ("trace_pool",), "without --trace FILE nothing is traced")

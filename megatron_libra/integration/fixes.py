"""Repair five faults of Megatron, most of them without TransformerEngine, Apex or a git checkout.

In: an importable megatron. Out: the same megatron, working. They matter on GPUs as on CPU. Each
repair first asks whether its fault is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["apply", "repair_help"]


def apply() -> None:
    """Repair what needs it; calling it twice is as good as once."""
    _keep_compiled_helpers()
    _repair_torch_adam_checkpoints()
    _name_te_gemm()


def _keep_compiled_helpers() -> None:
    """1: the start compiles helpers_cpp again. The wheel has no Makefile for that (sys.exit), and
    in a venv a checkout's Makefile may build for another Python; what can be imported is kept.
    """
    import megatron.core.datasets.utils as utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils.compile_helpers = lambda: None


def _repair_torch_adam_checkpoints() -> None:
    """2 and 3: with torch's Adam the distributed optimizer cannot save or load before a step."""
    from megatron.core.optimizer import distrib_optimizer

    optimizer = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(optimizer, "libra_repaired"):
        return
    optimizer.state_dict = _with_adam_state(optimizer.state_dict)
    optimizer.load_state_dict = _with_adam_step(optimizer.load_state_dict)
    optimizer.libra_repaired = True


def _with_adam_state(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """2: state_dict() asserts that Adam has a `step`, which is not there before the first."""

    def wrapped(self: Any) -> Any:
        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                        "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
                    }
        return state_dict(self)

    return wrapped


def _with_adam_step(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """3: loading writes into views of leaves outside no_grad, and zeroes the tensors `step`."""

    @torch.no_grad()
    def wrapped(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        steps = [group.get("step") for group in state_dict["optimizer"]["param_groups"]]
        if steps and steps[0] is not None:
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(float(steps[0]))

    return wrapped


def _name_te_gemm() -> None:
    """4: some versions' MoE router names a function that only TransformerEngine binds."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def repair_help(parser: argparse.ArgumentParser) -> None:
    """5: a flag's help with a bare percent sign, as 0.19.2 has, ends --help in a trace."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = re.sub(r"%%|%(?!\(\w+\)[a-z])", "%%", action.help)

"""Refuse, at start, what cannot be trained exactly. In: a validated namespace. Out: nothing.

A run that breaks rules (rules.py, and the relations here) ends with one line for each.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_libra.config import LibraConfig
from megatron_libra.integration.arguments import config_from_args, shape_from_args
from megatron_libra.integration.errors import RunError
from megatron_libra.integration.processes import pool_fault
from megatron_libra.integration.rules import RULES, Rule, Settings, name_of
from megatron_libra.plan.layout import TokenLayout

__all__ = ["check"]


def check(args: argparse.Namespace, transformer: Any = None) -> None:
    """Refuse a run that libra cannot train exactly. Every rank calls it, before any process group
    is made.

    Args:
        args: Megatron's validated namespace.
        transformer: the TransformerConfig that will be built, if a script made its own.

    Raises:
        RunError: with one line for each rule that is broken.
    """
    settings = Settings(args, transformer)
    lines = [_fill(rule, settings) for rule in RULES if rule.applies(settings)]
    try:
        config = config_from_args(args)
    except ValueError as error:
        raise RunError("\n".join([*lines, str(error)])) from error
    for relation in (_check_heads, _check_layout, _check_pools, _check_log_file):
        try:
            relation(args, config)
        except ValueError as error:
            lines.append(str(error))
    if lines:
        raise RunError("\n".join(lines))


def _fill(rule: Rule, settings: Settings) -> str:
    line = rule.line
    for name in ("eval_micro_batch_size", rule.name):
        line = line.replace("{" + name + "}", name_of(getattr(settings, name)))
    return line


def _check_heads(args: argparse.Namespace, config: LibraConfig) -> None:
    """H and M against the heads of a tensor-parallel rank; Ulysses cuts CP shards instead."""
    shape = shape_from_args(args)
    if config.placer != "ulysses":
        config.check_shape(shape)
    elif shape.query_heads % args.context_parallel_size:
        raise ValueError(
            f"context_parallel_size ({args.context_parallel_size}) must divide the "
            f"{shape.query_heads} query heads of a tensor-parallel rank for ulysses; use "
            "--context-parallel-impl libra --libra-placer home."
        )


def _check_layout(args: argparse.Namespace, config: LibraConfig) -> None:
    """L against the pieces that homes are made of."""
    TokenLayout(config.layout, args.seq_length, args.context_parallel_size)


def _check_pools(args: argparse.Namespace, config: LibraConfig) -> None:
    """P against DP."""
    fault = pool_fault(config.pool_size, args.data_parallel_size)
    if fault is not None:
        raise ValueError(fault)


def _check_log_file(args: argparse.Namespace, config: LibraConfig) -> None:
    """That the last rank, which writes it, can; it would fail behind the first iteration."""
    if not args.libra_log_file or args.rank != args.world_size - 1:
        return
    try:
        with open(args.libra_log_file, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ValueError(
            f"--libra-log-file {args.libra_log_file}: {error.strerror}; give a file in a folder "
            "that the last rank can write."
        ) from None

"""The flags of a run. In: an argparse parser, later its namespace. Out: flags, later a LibraConfig.

Every field of LibraConfig is a flag: its type and default are the field's, its help is the
sentence under the field. `--context-parallel-impl` says who computes attention; the few other
flags concern the launch alone.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from typing import Any

from megatron_libra.config import CHOICES, AttentionShape, LibraConfig
from megatron_libra.integration.flag_faults import explain_faults

__all__ = ["IMPLEMENTATIONS", "add_arguments", "config_from_args", "field_docs", "shape_from_args"]

IMPLEMENTATIONS = ("megatron", "ulysses", "libra")
"""Who computes attention: Megatron untouched; Ulysses on this executor; Libra."""


def field_docs(owner: type) -> dict[str, str]:
    """The sentence under each field of a dataclass, by field name."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant))
        ):
            docs[field.target.id] = str(text.value.value)
    return docs


def flag_of(field_name: str) -> str:
    """The command line's name of a LibraConfig field: pool_size is --libra-pool-size."""
    return "--libra-" + field_name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags; a wrong one is refused in a line. A parser that has them comes back as it is.

    It has the signature of Megatron's `extra_args_provider`.
    """
    if "--context-parallel-impl" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group("libra", "attention load balancing (megatron_libra)")
    group.add_argument(
        "--context-parallel-impl",
        choices=IMPLEMENTATIONS,
        default="megatron",
        help="Who computes attention. megatron: nothing is touched. libra: balanced over pools of "
        "packed sequences. ulysses: all-to-all over heads on the same executor, in Megatron's "
        "sample order.",
    )
    docs = field_docs(LibraConfig)
    for field in dataclasses.fields(LibraConfig):
        _add_field(group, field, docs[field.name])
    group.add_argument(
        "--libra-log-file",
        metavar="FILE",
        help="File to which the last rank appends one JSON line an iteration: imbalances (ratios), "
        "bytes, straggler pairs, planning time (ms).",
    )
    group.add_argument(
        "--libra-keep-one-queue",
        action="store_true",
        help="Let CUDA_DEVICE_MAX_CONNECTIONS=1 hold. Without tensor parallelism only Megatron's "
        "check sees it, and CUDA starts without: NCCL's transfers overlap nothing with it.",
    )
    group.add_argument(
        "--libra-cpu",
        action="store_true",
        help="Hide every GPU and train on CPU with gloo (tests and the quickstart; add "
        "--distributed-backend gloo --transformer-impl local).",
    )
    flags = {name: action for action in group._group_actions for name in action.option_strings}
    explain_faults(parser, flags)
    return parser


def _add_field(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], doc: str) -> None:
    options: dict[str, Any] = {"dest": "libra_" + field.name, "default": field.default}
    if isinstance(field.default, bool):
        options["action"] = "store_false" if field.default else "store_true"
    else:
        # the one field without a default value, chunks, is a number
        options["type"] = int if field.default is None else type(field.default)
        options["choices"] = CHOICES.get(field.name)
        options["metavar"] = None if field.name in CHOICES else field.name.upper()
        doc += "" if field.default is None else f" Default: {field.default}."
    group.add_argument(flag_of(field.name), help=doc.replace("%", "%%"), **options)


def config_from_args(args: argparse.Namespace) -> LibraConfig:
    """The LibraConfig of parsed flags.

    `ulysses` is the placer of that name on pools of one packed sequence, so that it differs from
    `libra` in the plan alone.

    Raises:
        ValueError: a value is outside its field's range.
    """
    values = {field.name: getattr(args, "libra_" + field.name) for field in _fields()}
    if args.context_parallel_impl == "ulysses":
        values.update(placer="ulysses", pool_size=1)
    return LibraConfig(**values)


def _fields() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(LibraConfig)


def shape_from_args(args: argparse.Namespace) -> AttentionShape:
    """Attention heads of one tensor-parallel rank; Megatron gives each at least one kv head."""
    tensor_parallel = args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return AttentionShape(
        query_heads=args.num_attention_heads // tensor_parallel,
        kv_heads=max(1, groups // tensor_parallel),
        head_dim=args.kv_channels,
        bytes_per_element=args.params_dtype.itemsize,
    )

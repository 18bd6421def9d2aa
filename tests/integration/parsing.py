"""Megatron's own parsing and validation of a command line, in a process that has Megatron."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from tests.integration.harness import call


def parse_all(commands: list[tuple[int, dict[str, Any], list[str]]]) -> list[Any]:
    """For each (world size, run file's mapping, words): the namespace, or the error's lines."""
    return call(_parse_all, commands)


def _parse_all(commands: list[tuple[int, dict[str, Any], list[str]]]) -> list[Any]:
    return [_parse(*command) for command in commands]


def _parse(world_size: int, settings: dict[str, Any], words: list[str]) -> Any:
    import megatron.training.arguments as megatron_arguments

    from megatron_libra.integration import refusals, yaml
    from megatron_libra.integration.arguments import add_arguments

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_arguments(parser)
        sys.argv[1:1] = yaml.expand(settings, parser)
        return parser

    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["pretrain_gpt.py", *words]
    try:
        args = megatron_arguments.parse_args(provider)
        megatron_arguments.validate_args(args)
        refusals.check(args)
    except ValueError as error:
        return str(error).splitlines()
    return argparse.Namespace(**{k: v for k, v in vars(args).items() if _travels(v)})


def _travels(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | tuple | None)

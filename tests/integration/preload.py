"""Imported once by the fork server: torch, Megatron and the hooks, on CPU. Ranks fork from here."""

from __future__ import annotations

import argparse
import gc
import importlib
from typing import Any

from megatron_libra.integration import cpu

MODULES = (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.models.gpt",
    "megatron.core.models.mimo",
    "megatron.core.optimizer",
    "megatron.training.checkpointing",
    "megatron.training.datasets.sft_dataset",
    "megatron.training.training",
    "megatron_libra.integration.install",
    "tests.integration.dense_attention",
)


def warm_up() -> None:
    """Import what a rank needs, torch.cuda meaning the CPU; read Megatron's help texts once."""
    cpu.install()
    for name in MODULES:
        importlib.import_module(name)
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    read = factory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def docstrings(self: Any, owner: type) -> dict[str, str]:
        if owner not in known:
            known[owner] = read(self, owner)
        return dict(known[owner])

    factory._get_field_docstrings = docstrings
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    gc.freeze()  # ranks then collect, and count, only what they made themselves


warm_up()

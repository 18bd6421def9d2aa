"""The command line `libra`: plan, order, verify, lengths, doctor. The only package that prints."""

from megatron_libra.cli.app import main

__all__ = ["main"]

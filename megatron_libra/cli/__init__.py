"""The command line `libra`; app.py lists its commands. The only package that prints."""

from megatron_libra.cli.app import main

__all__ = ["main"]

"""Run a training script with libra at hand. In: a command line. Out: what the script does.

    python -m megatron_libra.run [--config RUN.yaml] SCRIPT [the script's flags]

The script is any that trains through `megatron.training.pretrain`; Megatron's pretrain_gpt.py
needs no edit. `--libra-cpu` (there or in RUN.yaml) hides every GPU: then torch.cuda means the
CPU, see cpu.py. Without it, and without a GPU, nothing starts: training on CPU is never a silent
fallback.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_libra.extras import install_hint
from megatron_libra.integration import connections, yaml
from megatron_libra.integration.errors import RunError

__all__ = ["finish", "main", "prepare", "refuse"]

USAGE = "usage: torchrun [...] -m megatron_libra.run [--config RUN.yaml] SCRIPT [flags of SCRIPT]"
NEEDED = ("torch", "megatron", "yaml")
"""Packages of the extra for training; the base install has none of them."""
PATIENCE_S = 10.0
"""How long a refused rank lets rank 0 speak first."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script; exits with code 2, and a line for each fault, if the run cannot start."""
    try:
        config, script, words = _split(sys.argv[1:] if argv is None else argv)
        settings = yaml.load(config) if config is not None else {}
        sys.argv = [script, *words]
        # As python does for the script that it runs: its neighbours can be imported, and a script
        # in a Megatron checkout trains with that Megatron.
        sys.path.insert(0, str(Path(script).resolve().parent))
        prepare(settings)
        runpy.run_path(script, run_name="__main__")
    except RunError as error:
        refuse(error)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in NEEDED:
            raise
        refuse(RunError(f"training needs {name}; {install_hint('megatron')}."))
    finish()


def prepare(settings: dict[str, Any] | None = None) -> None:
    """Make this process ready for Megatron; call it before the first `import megatron`.

    A script of yours that calls it needs no launcher, and works under the launcher as well: once
    Megatron is imported, a second call changes nothing.

    Args:
        settings: a run file's mapping; its words go before the command line's.

    Raises:
        RunError: there is no GPU, and CPU was not asked for; or a setting does not suit its flag.
    """
    if "megatron.training" in sys.modules:
        return
    on_cpu = "--libra-cpu" in sys.argv or (settings or {}).get("libra-cpu") is True
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Megatron asserts it with context parallelism, on a CPU as well, where it means nothing.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    else:
        connections.start(sys.argv[1:], settings)
    import torch

    if on_cpu:
        from megatron_libra.integration import cpu

        cpu.install()
    elif not torch.cuda.is_available() and not {"-h", "--help"} & set(sys.argv):
        raise RunError(
            "no GPU is visible to torch; add --libra-cpu (with --distributed-backend gloo "
            "--transformer-impl local) to train on CPU, or check the driver and "
            "CUDA_VISIBLE_DEVICES."
        )
    from megatron_libra.integration.install import install

    install(settings)


def refuse(error: RunError) -> NoReturn:
    """Exit with code 2 and a line for each reason; every rank that meets the fault.

    One rank speaks for all: torchrun ends every process once one has exited, so the others let
    rank 0 be the first, and speak only if it did not meet the fault.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(PATIENCE_S)
    sys.stderr.writelines(f"megatron_libra: {line}\n" for line in str(error).splitlines())
    sys.exit(2)


def finish() -> None:
    """Leave the process group in good order, which Megatron's scripts do not. Collective."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _split(argv: Sequence[str]) -> tuple[str | None, str, list[str]]:
    """Run file, script and the script's words."""
    words, config = list(argv), None
    if words[:1] == ["--config"]:
        config, words = (words[1] if len(words) > 1 else ""), words[2:]
    elif words and words[0].startswith("--config="):
        config, words = words[0].removeprefix("--config="), words[1:]
    if not words or words[0].startswith("-"):
        raise RunError(USAGE)
    if not Path(words[0]).is_file():
        raise RunError(f"SCRIPT ({words[0]}) is not a file; give the path of a pretrain_gpt.py.")
    return config, words[0], words[1:]

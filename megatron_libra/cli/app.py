"""The command `libra`. In: argv. Out: tables or JSON on stdout.

Exit codes: 0; 1 when verify finds a difference; 2 for bad input, with one line on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from megatron_libra import __version__
from megatron_libra.cli import tables
from megatron_libra.cli.answers import order_answer, plan_answer, verify_answer
from megatron_libra.cli.bench import bench
from megatron_libra.cli.calibrate import calibrate
from megatron_libra.cli.doctor import examine
from megatron_libra.cli.lengths import lengths
from megatron_libra.cli.output_files import require_writable
from megatron_libra.cli.replay import replay
from megatron_libra.cli.request import faults_of, read_pool, read_window
from megatron_libra.cli.simulate import simulate
from megatron_libra.cli.usage import is_usage_error, usage_line
from megatron_libra.cli.verification import Device, VerificationFailed, run_verification
from megatron_libra.config import CHOICES
from megatron_libra.plan.vrsp import order_window

__all__ = ["app", "main"]

app = typer.Typer(
    name="libra",
    help="Attention load balancing for long-context training: plan, order and check on a CPU.",
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

PoolPath = Annotated[Path, typer.Argument(metavar="POOL.json", help="One sequence pool.")]
WindowPath = Annotated[
    Path, typer.Argument(metavar="WINDOW.json", help="The packed sequences of one global batch.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
DEVICE_HELP = "cpu: gloo and float64; cuda: NCCL and bfloat16, one GPU for each worker."
KERNEL_HELP = f"Attention kernel, before that of the file: {', '.join(CHOICES['kernel'])}."
TRANSPORT_HELP = f"How rows travel, before the file: {', '.join(CHOICES['transport'])}."
DUMP_HELP = "Write q, k, v, dout, out, dq, dk, dv as (slot, token, head, dim) arrays."


@app.callback()
def libra(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Print the version or the help when no command is given."""
    if version:
        typer.echo(f"megatron_libra {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command()
def plan(pool: PoolPath, as_json: AsJson = False) -> None:
    """Plan one pool: who computes which tile, and what moves."""
    with faults_of(pool):
        request = read_pool(pool)
        start = time.perf_counter()
        planned = request.plan()
    plan_ms = (time.perf_counter() - start) * 1000
    if as_json:
        _print_json(plan_answer(planned, plan_ms))
    else:
        tables.show_plan(planned, plan_ms)


@app.command()
def order(window: WindowPath, as_json: AsJson = False) -> None:
    """Order one global batch so that its pools weigh the same."""
    with faults_of(window):
        request = read_window(window)
        ordered = order_window(
            request.sequences,
            pool_size=request.pool_size,
            data_parallel_size=request.data_parallel_size,
            scope=request.scope,
            pipeline_parallel_size=request.pipeline_parallel_size,
        )
    if as_json:
        _print_json(order_answer(ordered))
    else:
        tables.show_order(request, ordered)


@app.command()
def verify(
    pool: PoolPath,
    device: Annotated[Device, typer.Option(help=DEVICE_HELP)] = Device.cpu,
    kernel: Annotated[str | None, typer.Option(help=KERNEL_HELP)] = None,
    transport: Annotated[str | None, typer.Option(help=TRANSPORT_HELP)] = None,
    dump: Annotated[Path | None, typer.Option(metavar="FILE.npz", help=DUMP_HELP)] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of Q, K, V and dO.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run one pool on local processes and compare with dense attention; exit 1 if it differs."""
    require_writable(dump, inputs=[pool])
    with faults_of(pool):
        planned = read_pool(pool).plan()
    config = planned.config
    config = replace(
        config,
        kernel=config.kernel if kernel is None else kernel,
        transport=config.transport if transport is None else transport,
    )
    planned = replace(planned, config=config)
    result = run_verification(planned, device=device.value, seed=seed, dump=dump)
    if as_json:
        _print_json(verify_answer(result.report))
    else:
        tables.show_verify(result.report)
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show versions, and which kernels and transports this machine can use."""
    report = examine()
    if as_json:
        _print_json(report)
    else:
        tables.show_doctor(report)


app.command()(lengths)
app.command()(simulate)
app.command()(calibrate)
app.command()(replay)
app.add_typer(bench)


def _print_json(answer: dict[str, Any]) -> None:
    typer.echo(json.dumps(answer, allow_nan=False))


def main() -> None:
    """Run the command line; every fault of the input is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
    except ValueError as error:
        code = _complain(str(error))
    except BrokenPipeError:
        # The reader, such as head, has seen enough; nothing may be flushed at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except VerificationFailed as error:
        sys.stderr.write(f"error: {error}\n")
        code = 1
    except BrokenExecutor:
        sys.stderr.write(
            "error: a process of this command was killed, as the system does when memory runs "
            "out; try fewer processes.\n"
        )
        code = 1
    except OSError as error:
        if error.filename is None:
            raise
        code = _complain(
            f"{error.filename}: {error.strerror}; check the path, its permissions and the space."
        )
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if not is_usage_error(error):
            raise
        code = _complain(usage_line(error, get_command(app), sys.argv[1:]))
    sys.exit(code)


def _complain(message: str) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return 2

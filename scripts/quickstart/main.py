"""The quickstart. In: a machine without a GPU. Out: three trainings, one table, two pictures.

    corpus -> skew -> train (ulysses, libra with the paper's placer, libra) -> comparison

Started by scripts/quickstart.sh, which makes the environment first. A second start goes on where
the first was interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from corpus import VOCAB_SIZE, build_corpus, document_lengths
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from settings import BASELINE, ITERATIONS, RUNS, write_run_file
from show import TOLERANCE, comparison, largest_difference, skew_tables
from skew import measure_skew
from train import RunFailed, RunResult, train

__all__ = ["main"]

START_STEPS = 8
"""Starting a run takes about as long as so many iterations; the bar counts it so."""


def main() -> int:
    """Run all steps; 0 if the losses agree, 1 if they do not or a run failed."""
    arguments = _parse()
    out: Path = arguments.out.absolute()
    console = Console(highlight=False)
    start = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        out.mkdir(parents=True, exist_ok=True)
        runs = _steps(out, console)
    except OSError as error:
        console.print(f"error: {out}: {error.strerror}; give a writable folder with --out.")
        return 2
    except RunFailed as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the next start goes on from here")
        return 130
    return _conclude(runs, out, time.monotonic() - start, console)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="quickstart.sh", description="Train a small GPT three times on the CPU and compare."
    )
    default = Path(__file__).resolve().parents[2] / "quickstart_out"
    parser.add_argument(
        "--out", type=Path, default=default, help="folder for the corpus, logs and pictures"
    )
    return parser.parse_args()


def _steps(out: Path, console: Console) -> list[RunResult]:
    """Corpus, skew, trainings; one progress bar over all of it."""
    prefix = out / "corpus" / "stdlib"
    with _progress(console) as bar:
        task = bar.add_task("corpus", total=START_STEPS + len(RUNS) * (START_STEPS + ITERATIONS))
        build_corpus(prefix, lambda share: bar.update(task, completed=share * START_STEPS))
        skew = measure_skew(document_lengths(prefix))
        console.print(skew_tables(skew))
        from plots import plot_skew

        plot_skew(skew, out / "skew.png")
        run_file = write_run_file(out / "run.yaml", data_path=prefix, vocab_size=VOCAB_SIZE)
        runs = []
        for number, (name, own_flags) in enumerate(RUNS.items()):
            first = START_STEPS + number * (START_STEPS + ITERATIONS)
            bar.update(task, description=f"training: {name}", completed=first)
            began = time.monotonic()
            runs.append(
                train(
                    name,
                    run_file,
                    own_flags,
                    out / "runs" / name.replace(" ", "-"),
                    lambda done, first=first: bar.update(
                        task, completed=first + (START_STEPS + done if done else 0)
                    ),
                )
            )
            seconds = time.monotonic() - began
            console.print(f"trained {name}: {ITERATIONS} iterations in {seconds:.0f} s")
    return runs


def _progress(console: Console) -> Progress:
    """On a terminal a bar; in a log nothing but the lines printed beside it."""
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _conclude(runs: list[RunResult], out: Path, seconds: float, console: Console) -> int:
    from plots import plot_losses

    plot_losses(runs, out / "training.png")
    console.print(comparison(runs))
    baseline = next(run for run in runs if run.name == BASELINE)
    worst = max(largest_difference(run, baseline) for run in runs)
    console.print(f"Pictures: {out / 'skew.png'}\n          {out / 'training.png'}", soft_wrap=True)
    console.print(f"Logs:     {out / 'runs'}", soft_wrap=True)
    if worst > TOLERANCE:
        console.print(f"DIFFERENT: losses differ by {worst:.1e}, more than {TOLERANCE:g}.")
        return 1
    console.print(f"The losses agree to {worst:.1e} (relative). {seconds:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

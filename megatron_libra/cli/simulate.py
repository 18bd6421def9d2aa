"""The command `libra simulate`. In: a corpus and a job. Out: a table or JSON, a report, a run file.

libra simulate longtail-256k --html report.html --yaml libra.yaml
libra simulate corpus.idx --seq-length 262144 --cp 8 --dp 32 --gbs 128 --query-heads 128 \
    --kv-heads 16 --head-dim 256 --num-layers 48 --processes 8
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from megatron_libra.cli.corpus_name import check_corpus_name
from megatron_libra.cli.json_reader import short
from megatron_libra.cli.options import MAX_PROCESSES, option, size_option
from megatron_libra.cli.output_files import files_read, require_writable
from megatron_libra.cli.progress import show_progress
from megatron_libra.cli.request import MAX_HEAD_DIM, MAX_HEADS
from megatron_libra.cli.simulate_heads import ModelHeads
from megatron_libra.cli.simulate_size import (
    MAX_COUNT,
    check_candidates,
    check_preset,
)
from megatron_libra.cli.simulation import show_simulation
from megatron_libra.config import (
    DEFAULT_LOAD_SLACK,
    MAX_INTEGER,
    AttentionShape,
    LibraConfig,
)
from megatron_libra.simulator.answer import simulation_answer
from megatron_libra.simulator.calibration import BUILT_IN, load_cost_model
from megatron_libra.simulator.candidates import Grid
from megatron_libra.simulator.corpus import PACKINGS, PRESET_STEPS, CorpusRequest, load_corpus
from megatron_libra.simulator.job import PRESET_JOBS, TrainingJob
from megatron_libra.simulator.plots import require_matplotlib
from megatron_libra.simulator.processes import TaskPool
from megatron_libra.simulator.report import html_report
from megatron_libra.simulator.run_file import run_file
from megatron_libra.simulator.search import Effort
from megatron_libra.simulator.search import simulate as search

__all__ = ["simulate"]


Size = int | None
MAX_DIGITS = len(str(MAX_INTEGER))


def simulate(
    corpus: Annotated[
        str,
        typer.Argument(
            metavar="CORPUS",
            help="Lengths (.json .npy .npz .parquet .idx, or .jsonl with its sidecar), or a preset "
            f"with its job: {', '.join(PRESET_JOBS)}.",
        ),
    ],
    seq_length: Annotated[
        Size, size_option("--seq-length", "L, tokens of a packed sequence.")
    ] = None,
    context_parallel_size: Annotated[
        Size, size_option("--context-parallel-size --cp", "CP.")
    ] = None,
    data_parallel_size: Annotated[Size, size_option("--data-parallel-size --dp", "DP.")] = None,
    global_batch_size: Annotated[
        Size, size_option("--global-batch-size --gbs", "Packed sequences of an optimizer step.")
    ] = None,
    query_heads: Annotated[Size, size_option("--query-heads", "Of the model.", MAX_HEADS)] = None,
    kv_heads: Annotated[Size, size_option("--kv-heads", "Of the model.", MAX_HEADS)] = None,
    head_dim: Annotated[
        Size, size_option("--head-dim", "Elements of a head.", MAX_HEAD_DIM)
    ] = None,
    tensor_parallel_size: Annotated[int, size_option("--tensor-parallel-size --tp", "TP.")] = 1,
    pipeline_parallel_size: Annotated[int, size_option("--pipeline-parallel-size --pp", "PP.")] = 1,
    num_layers: Annotated[
        int, size_option("--num-layers", "Attention layers; 1: per layer.", MAX_COUNT)
    ] = 1,
    other_ms: Annotated[
        float, option("--other-ms", "Ms of a microbatch on a stage besides core attention.")
    ] = 0.0,
    gpus_per_node: Annotated[int, size_option("--gpus-per-node", "GPUs of a node.")] = 8,
    lockstep: Annotated[
        bool, option("--lockstep", "Replicas wait for each other in every microbatch (FSDP).")
    ] = False,
    pack: Annotated[str, option("--pack", f"How: {', '.join(PACKINGS)}.")] = "auto",
    column: Annotated[str | None, option("--column", "Of a .parquet.")] = None,
    shuffle: Annotated[
        bool, option("--shuffle/--no-shuffle", "Shuffle documents, as Megatron does.")
    ] = True,
    sequences: Annotated[
        Size,
        size_option("--sequences", f"Packed sequences of a preset; default {PRESET_STEPS} steps."),
    ] = None,
    seed: Annotated[int, option("--seed", "Of shuffles and samples.", min=0, max=MAX_INTEGER)] = 0,
    pool_sizes: Annotated[str, option("--pool-sizes", "P to try, such as 4,8.")] = "",
    block_sizes: Annotated[str, option("--block-sizes", "B to try, tokens.")] = "",
    head_splits: Annotated[str, option("--head-splits", "H to try.")] = "",
    scopes: Annotated[str, option("--scopes", "Of VRSP: microbatch,step,pipeline,off.")] = "",
    placers: Annotated[str, option("--placers", "To try.")] = "home_first",
    chunks: Annotated[int, size_option("--chunks", "M, or the most that fits an H.")] = 4,
    load_slack: Annotated[float, option("--load-slack", "tau.")] = DEFAULT_LOAD_SLACK,
    kv_fetch: Annotated[str, option("--kv-fetch", "prefix or group.")] = "prefix",
    layout: Annotated[str, option("--layout", "zigzag or contiguous.")] = "zigzag",
    backward_kv: Annotated[str, option("--backward-kv", "save or refetch.")] = "save",
    screen_steps: Annotated[
        int, size_option("--screen-steps", "Planned for all candidates.", MAX_COUNT)
    ] = 1,
    steps: Annotated[int, size_option("--steps", "Planned for the finalists.", MAX_COUNT)] = 4,
    finalists: Annotated[
        int, size_option("--finalists", "Fastest of the screening.", MAX_COUNT)
    ] = 8,
    max_kv_gib: Annotated[
        float | None, option("--max-kv-gib", "Most K and V of a layer on a worker.")
    ] = None,
    cost_model: Annotated[
        str, option("--cost-model", f"{', '.join(BUILT_IN)}, or a calibration FILE.")
    ] = "h200-fa4",
    processes: Annotated[
        Size, size_option("--processes", "Default: the CPU cores.", MAX_PROCESSES)
    ] = None,
    html: Annotated[Path | None, option("--html", "Write a report with pictures.")] = None,
    yaml: Annotated[Path | None, option("--yaml", "Write the run file.")] = None,
    as_json: Annotated[bool, option("--json", "Print one JSON object.")] = False,
) -> None:
    """Replay a corpus, compare configurations and recommend one."""
    check_corpus_name(corpus)
    given_heads = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes, shape = _sizes(
        PRESET_JOBS.get(corpus),
        {
            "seq_length": seq_length,
            "context_parallel_size": context_parallel_size,
            "data_parallel_size": data_parallel_size,
            "global_batch_size": global_batch_size,
        },
        given_heads,
    )
    heads = ModelHeads(shape, given_heads, corpus, tensor_parallel_size)
    job = TrainingJob(
        **sizes,
        shape=heads.of_rank(),
        pipeline_parallel_size=pipeline_parallel_size,
        num_layers=num_layers,
        other_ms=other_ms,
        workers_per_node=max(1, gpus_per_node // tensor_parallel_size),
        lockstep=lockstep,
    )
    model = load_cost_model(cost_model)
    grid = Grid(
        pool_sizes=_numbers(pool_sizes, "--pool-sizes"),
        block_sizes=_numbers(block_sizes, "--block-sizes"),
        head_splits=_numbers(head_splits, "--head-splits"),
        scopes=_words(scopes),
        placers=_words(placers),
    )
    heads.check_head_splits(grid.head_splits)
    base = LibraConfig(
        chunks=chunks,
        load_slack=load_slack,
        kv_fetch=kv_fetch,  # type: ignore[arg-type]
        layout=layout,  # type: ignore[arg-type]
        backward_kv=backward_kv,  # type: ignore[arg-type]
    )
    effort = Effort(
        screened_windows=screen_steps,
        planned_windows=steps,
        finalists=finalists,
        max_kv_gib=max_kv_gib,
        seed=seed,
    )
    # faults that can be seen now are told before the work begins
    check_candidates(job, grid.candidates(job, base))
    if corpus in PRESET_JOBS:
        check_preset(job.global_batch_size, sequences)
    require_writable(html, yaml, inputs=files_read(corpus, cost_model))
    if html:
        require_matplotlib()
    request = CorpusRequest(
        source=corpus,
        pack=pack,
        column=column,
        shuffle=shuffle,
        seed=seed,
        num_sequences=sequences,
    )
    with TaskPool(processes or os.cpu_count() or 1) as tasks, show_progress() as told:
        loaded = load_corpus(
            request,
            seq_length=job.seq_length,
            global_batch_size=job.global_batch_size,
            context_parallel_size=job.context_parallel_size,
            map_parts=lambda function, parts: tasks.run(function, parts, told("packing")),
        )
        found = search(
            loaded, job, grid=grid, base=base, model=model, effort=effort, tasks=tasks,
            progress=lambda stage, finished, total: told(stage)(finished, total),
        )  # fmt: skip
    _write(html, lambda: html_report(found))
    _write(yaml, lambda: run_file(found))
    if as_json:
        typer.echo(json.dumps(simulation_answer(found), allow_nan=False))
    else:
        show_simulation(found)


def _sizes(
    preset: TrainingJob | None, sizes: dict[str, Size], heads: dict[str, Size]
) -> tuple[dict[str, int], AttentionShape]:
    """Those of a preset, or of options; ValueError names the options that are missing."""
    known = _known(sizes, preset)
    known_heads = _known(heads, preset and preset.shape)
    missing = [name for name in (*sizes, *heads) if name not in {**known, **known_heads}]
    if missing:
        raise ValueError(
            f"missing {' '.join('--' + name.replace('_', '-') for name in missing)}; a file of "
            f"lengths says nothing about the job (only {', '.join(PRESET_JOBS)} have one)."
        )
    return known, AttentionShape(**known_heads)


def _known(given: dict[str, Size], preset: TrainingJob | AttentionShape | None) -> dict[str, int]:
    """What was given, else what the preset says; neither: left out."""
    found = {}
    for name, value in given.items():
        if value is not None:
            found[name] = value
        elif preset is not None:
            found[name] = int(getattr(preset, name))
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    for word in _words(text):
        if not (word.isascii() and word.isdecimal()):
            raise ValueError(f"{option} ({text!r}) must be numbers with commas; try 4,8.")
        if len(word) > MAX_DIGITS or not 1 <= int(word) <= MAX_INTEGER:
            raise ValueError(
                f"{option} ({short(text)}) must be numbers from 1 to {MAX_INTEGER}; try 4,8."
            )
    return tuple(map(int, _words(text)))


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}); give another path."
        ) from None

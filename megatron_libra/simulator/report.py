"""One self-contained HTML file. In: Simulation. Out: text with style and pictures inside.

Nothing is loaded from elsewhere: pictures are SVG inside the file, there are no scripts.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from megatron_libra.simulator.calibration import BUILT_IN, built_in
from megatron_libra.simulator.metrics import CandidateResult
from megatron_libra.simulator.plots import draw
from megatron_libra.simulator.report_page import PAGE
from megatron_libra.simulator.run_file import NOTHING, run_file
from megatron_libra.simulator.simulation import Simulation
from megatron_libra.simulator.units import GIB, bytes_text, gb_text

__all__ = ["COLUMNS", "columns_of", "headings", "html_report", "model_sentence"]

COLUMNS = {
    "P": "pool size",
    "B": "block size, tokens",
    "H": "head shards",
    "M": "head chunks",
    "scope": "what VRSP balances",
    "placer": "who places tiles",
    "pools": "heaviest pool over the mean, all steps (max / mean - 1)",
    "workers": "busiest worker of a pool over the mean, average pool (max / mean - 1)",
    "steps": "busiest worker group of a step over the mean, all steps (max / mean - 1)",
    "GB": "bytes between the workers of a pool, one layer's forward",
    "GB worker": "most loaded worker, the larger of sent and received",
    "tile/C": "heaviest tile over the load target, worst pool",
    "K/V GiB": "K and V on the worker that holds most, worst pool",
    "layer ms": "mean straggler of one attention layer, forward and backward",
    "step ms": "predicted step",
    "mean": "speedup over the reference, mean straggler",
    "worst": "speedup, slowest microbatch of a step",
    "step": "speedup of the step",
}
"""Columns of the candidate table, with their meaning."""
AMOUNTS = {
    "GB": ("bytes", "pool_bytes", 1e9, 1),
    "GB worker": ("bytes worker", "worker_bytes", 1e9, 2),
    "K/V GiB": ("K/V", "resident_kv_bytes", GIB, 2),
}
"""Column -> its heading where all amounts are small, the result's field, the unit, decimals."""
CAPTIONS = {
    "distribution": "Lengths of all samples as they attend, after packing.",
    "skew": "The first planned step. Grey: every packed sequence on its own CP group, as without "
    "Libra. Green: pools of P sequences, whose workers share the work of the pool.",
    "pool_sizes": "Left: mean over all steps. Right: finalists; computation in green.",
    "grid": "Every B and H that was tried at the recommended pool size, on the screened steps.",
    "time_against_bytes": "Every candidate on the screened steps.",
    "timeline": "The pool with the heaviest packed sequence of the first planned step, predicted. "
    "Each bar is a worker; colours say whose sequence it computes.",
    "traffic": "The same pool: Q, K, V and the output of one layer's forward.",
    "scaling": "Left: P is the recommended one, or what divides a smaller DP. Right: every "
    "planned microbatch; the longest one stalls a pipeline.",
}


def columns_of(result: CandidateResult, simulation: Simulation) -> list[str]:
    """The cells of one candidate, in the order of COLUMNS."""
    c = result.candidate
    pool_bytes, worker_bytes, kv_bytes = (_amount(name, result, simulation) for name in AMOUNTS)
    known = [(s.pool_size, s.scope) for s in simulation.skew]
    pools = steps = "-"
    if (c.pool_size, c.scope) in known:
        skew = simulation.skew_of(c.pool_size, c.scope)
        pools, steps = f"{skew.after.mean():.4f}", f"{skew.step_after.mean():.4f}"
    return [
        str(c.pool_size),
        str(c.block_size),
        str(c.head_split),
        str(c.chunks),
        c.scope,
        c.placer,
        pools,
        f"{result.intra_imbalance:.3f}",
        steps,
        pool_bytes,
        worker_bytes,
        f"{result.tile_over_target:.2f}",
        kv_bytes,
        _ms(result.layer_ms),
        _ms(result.step_ms),
        f"{result.speedup_mean:.2f}x",
        f"{result.speedup_worst:.2f}x",
        f"{result.speedup_step:.2f}x",
    ]


def headings(simulation: Simulation) -> dict[str, str]:
    """Column -> its heading. Small jobs have no GB: their cells bring their own units."""
    return {
        name: AMOUNTS[name][0] if name in AMOUNTS and _is_small(name, simulation) else name
        for name in COLUMNS
    }


def _amount(name: str, result: CandidateResult, simulation: Simulation) -> str:
    _, field, unit, digits = AMOUNTS[name]
    count = float(getattr(result, field))
    if _is_small(name, simulation):
        return bytes_text(round(count))
    return f"{count / unit:.{digits}f}"


def _is_small(name: str, simulation: Simulation) -> bool:
    """Whether the column's decimals would show a tenth or more of its largest amount as nothing."""
    _, field, unit, digits = AMOUNTS[name]
    results = (*simulation.references.values(), *simulation.finalists, *simulation.screened)
    return bool(max(getattr(each, field) for each in results) < unit * 10 ** (1 - digits))


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def html_report(simulation: Simulation) -> str:
    """The report; ValueError if matplotlib is not installed."""
    best = simulation.recommendation.result
    references = list(simulation.references.values())
    reasons = (*([] if best.is_faster else [NOTHING]), *simulation.recommendation.reasons)
    shown = headings(simulation)
    return PAGE.substitute(
        title=escape(f"libra simulate: {simulation.corpus_name}"),
        subtitle=escape(_subtitle(simulation)),
        cards=_cards(simulation),
        reasons="".join(f"<li>{escape(r)}</li>" for r in reasons),
        run_file=escape(run_file(simulation)),
        sampling=escape(simulation.sampling.sentence),
        model=escape(model_sentence(simulation)),
        figures="".join(_figure(simulation, name) for name in CAPTIONS),
        reference=escape(simulation.reference_name),
        finalists=_table([*references, *simulation.finalists], best, simulation),
        screened=_table(simulation.screened, best, simulation),
        meanings="".join(f"<dt>{shown[k]}</dt><dd>{escape(v)}</dd>" for k, v in COLUMNS.items()),
    )


def _subtitle(simulation: Simulation) -> str:
    job, shape = simulation.job, simulation.job.shape
    return (
        f"{simulation.sequences.sequences:,} packed sequences of {job.seq_length:,} tokens "
        f"({simulation.lengths.samples:,} samples; {simulation.packing}). DP "
        f"{job.data_parallel_size}, CP {job.context_parallel_size}, PP "
        f"{job.pipeline_parallel_size}, GBS {job.global_batch_size}; {shape.query_heads} query "
        f"heads, {shape.kv_heads} kv heads of {shape.head_dim}."
    )


def model_sentence(simulation: Simulation) -> str:
    """What times rest on; for every output."""
    model = simulation.model
    if model.name not in BUILT_IN or built_in(model.name) != model:
        return (
            f"Times are predictions of the cost model {model.name}, read from a file. Imbalances, "
            "bytes and memory do not depend on it."
        )
    return (
        f"Times are predictions of the built-in cost model {model.name}, of an H200-class GPU, not "
        "of your machine (measure it with libra calibrate, give it with --cost-model FILE). "
        "Imbalances, bytes and memory do not depend on it."
    )


def _cards(simulation: Simulation) -> str:
    best, candidate = simulation.recommendation.result, simulation.recommendation.result.candidate
    choice = "configuration" if best.is_faster else "best of those tried"
    cards = {
        choice: f"P {candidate.pool_size} &middot; B {candidate.block_size} &middot; "
        f"H {candidate.head_split}",
        f"step against {simulation.reference_name}": f"{best.speedup_step:.2f}x",
        "slowest microbatch": f"{best.speedup_worst:.2f}x",
        "most loaded worker": gb_text(best.worker_bytes),
        "heaviest tile": f"{best.tile_over_target:.2f} C",
    }
    return "".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in cards.items())


def _figure(simulation: Simulation, name: str) -> str:
    picture = base64.b64encode(draw(simulation, name)).decode()
    caption = escape(CAPTIONS[name])
    return (
        f'<figure id="{name}"><img alt="{caption}" src="data:image/svg+xml;base64,{picture}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _table(
    results: Sequence[CandidateResult], best: CandidateResult, simulation: Simulation
) -> str:
    shown = headings(simulation)
    head = "".join(
        f'<th title="{escape(text)}">{shown[name]}</th>' for name, text in COLUMNS.items()
    )
    rows = [
        f"<tr{_mark(each, best)}>"
        + "".join(f"<td>{cell}</td>" for cell in columns_of(each, simulation))
        + "</tr>"
        for each in results
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _mark(result: CandidateResult, best: CandidateResult) -> str:
    """The attribute that makes the recommended row stand out."""
    return ' class="best"' if best.is_faster and result.candidate == best.candidate else ""

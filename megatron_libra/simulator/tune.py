"""Choose a configuration and say why. In: results, skew. Out: Recommendation.

The fastest predicted step wins; configurations within 1 % of it count as equal, and among those
the smallest pool is taken (fewer workers wait for each other, less leaves the node), then the one
whose most loaded worker moves the fewest bytes, then larger blocks and fewer shards.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_libra.simulator.candidates import Candidate
from megatron_libra.simulator.metrics import CandidateResult
from megatron_libra.simulator.simulation import Recommendation
from megatron_libra.simulator.skew import PoolSkew
from megatron_libra.simulator.units import GIB, gb_text, gib_text

__all__ = ["recommend"]

EQUAL = 0.01
"""Ratio of predicted steps below which two configurations count as equally fast."""


def recommend(
    finalists: Sequence[CandidateResult],
    screened: Sequence[CandidateResult],
    skew: Sequence[PoolSkew],
    reference: CandidateResult,
    *,
    windows: Sequence[int],
    max_kv_gib: float | None = None,
) -> Recommendation:
    """The configuration to train with.

    Args:
        finalists: the candidates to choose from, all on the same steps.
        screened: all candidates, on fewer steps.
        skew: by (P, scope).
        reference: Ulysses, or what stands for it.
        windows: steps of the finalists.
        max_kv_gib: most K and V of a layer that a worker may hold, in GiB.

    Raises:
        ValueError: no finalist stays below max_kv_gib.
    """
    eligible = _eligible(finalists, max_kv_gib)
    best = min(eligible, key=_step)
    equal = [r for r in eligible if r.step_ms <= best.step_ms * (1 + EQUAL)]
    chosen = min(equal, key=_preference)
    reasons = [
        *_warnings(chosen),
        _gain(chosen, reference, skew, windows),
        _pool(chosen, eligible, skew),
        _tiles(chosen, screened),
        *_scope(chosen, finalists, skew),
        _traffic(chosen, reference),
        _memory(chosen, max_kv_gib),
        _choice(chosen, best, equal),
    ]
    return Recommendation(chosen, tuple(reasons))


def _eligible(
    finalists: Sequence[CandidateResult], max_kv_gib: float | None
) -> list[CandidateResult]:
    ordered = [r for r in finalists if r.candidate.scope != "off"]
    limit = float("inf") if max_kv_gib is None else max_kv_gib * GIB
    fitting = [r for r in ordered if r.resident_kv_bytes <= limit]
    if not fitting:
        least = min(r.resident_kv_bytes for r in ordered) / GIB
        raise ValueError(
            f"max_kv_gib ({max_kv_gib:g}) must be at least {least:.3g}, what the leanest finalist "
            "holds; raise it, or try smaller pools or more head shards."
        )
    return fitting


def _preference(result: CandidateResult) -> tuple[int, float, int, int, float]:
    candidate = result.candidate
    return (
        candidate.pool_size,
        round(result.worker_bytes / 1e8),  # a tenth of a GB is no difference
        -candidate.block_size,
        candidate.head_split,
        result.step_ms,
    )


def _gain(
    chosen: CandidateResult,
    reference: CandidateResult,
    skew: Sequence[PoolSkew],
    windows: Sequence[int],
) -> str:
    limit_mean, limit_worst = _skew(skew, chosen).limits(windows)
    return (
        f"A predicted step is {chosen.speedup_step:.2f}x as fast as with {_name(reference)}, core "
        f"attention alone {chosen.speedup_mean:.2f}x (mean straggler) and "
        f"{chosen.speedup_worst:.2f}x (slowest microbatch of a step). Perfect balance inside "
        f"pools and free communication would give {limit_mean:.2f}x and "
        f"{limit_worst:.2f}x on the same steps."
    )


def _pool(
    chosen: CandidateResult, finalists: Sequence[CandidateResult], skew: Sequence[PoolSkew]
) -> str:
    mine = _skew(skew, chosen)
    what, after, before = "heaviest pool", mine.after, mine.before
    if chosen.candidate.scope != "microbatch":
        what, after, before = "busiest group of a step", mine.step_after, mine.step_before
    text = (
        f"P = {chosen.candidate.pool_size}: the {what} does {after.mean():.2%} more than the mean, "
        f"{before.mean():.0%} in the sampler's order"
    )
    others = {r.candidate.pool_size for r in finalists}
    smaller = [size for size in others if size < chosen.candidate.pool_size]
    larger = [size for size in others if size > chosen.candidate.pool_size]
    for size in [*sorted(smaller)[-1:], *sorted(larger)[:1]]:
        rival = min((r for r in finalists if r.candidate.pool_size == size), key=_step)
        text += (
            f"; the best P = {size} takes {rival.step_ms / chosen.step_ms:.2f}x the step and "
            f"{_ratio(rival.worker_bytes, chosen.worker_bytes)} the most loaded worker's bytes"
        )
    return text + "."


def _tiles(chosen: CandidateResult, screened: Sequence[CandidateResult]) -> str:
    """Granularity, against the coarsest tiles; both on the screened steps."""
    candidate = chosen.candidate
    same = [
        r
        for r in screened
        if (r.candidate.pool_size, r.candidate.scope, r.candidate.placer)
        == (candidate.pool_size, candidate.scope, candidate.placer)
    ]
    coarsest = max(same, key=lambda r: (r.tile_over_target, r.candidate))
    text = (
        f"B = {candidate.block_size}, H = {candidate.head_split}: the heaviest tile is "
        f"{chosen.tile_over_target:.2f} of the load target C, so the slowest worker of a pool "
        f"does {chosen.intra_imbalance:.1%} more than the mean"
    )
    if coarsest.candidate != candidate:
        mine = next(r for r in same if r.candidate == candidate)
        text += (
            f"; the coarsest choice (B = {coarsest.candidate.block_size}, H = "
            f"{coarsest.candidate.head_split}) has tiles of {coarsest.tile_over_target:.2f} C and "
            f"takes {coarsest.step_ms / mine.step_ms:.2f}x the step"
        )
    return text + "."


def _scope(
    chosen: CandidateResult, finalists: Sequence[CandidateResult], skew: Sequence[PoolSkew]
) -> list[str]:
    """Why this VRSP scope, against the best of each other that was tried."""
    candidate = chosen.candidate
    others = {s.scope for s in skew} - {candidate.scope, "off"}
    return [_scopes(chosen, finalists, skew, other) for other in sorted(others)]


def _scopes(
    chosen: CandidateResult,
    finalists: Sequence[CandidateResult],
    skew: Sequence[PoolSkew],
    other: str,
) -> str:
    size = chosen.candidate.pool_size
    rivals = [r for r in finalists if (r.candidate.pool_size, r.candidate.scope) == (size, other)]
    rival = min(rivals, key=_step)
    mine, theirs = _skew(skew, chosen), _skew(skew, rival)
    return (
        f"Scope {chosen.candidate.scope}: the best step of P = {size} with scope {other} takes "
        f"{rival.step_ms / chosen.step_ms:.2f}x. The busiest group of a step does "
        f"{mine.step_after.mean():.2%} more than the mean with this scope and "
        f"{theirs.step_after.mean():.2%} with that, the heaviest pool {mine.after.mean():.2%} and "
        f"{theirs.after.mean():.2%}."
    )


def _traffic(chosen: CandidateResult, reference: CandidateResult) -> str:
    return (
        f"The most loaded worker moves {gb_text(chosen.worker_bytes)} in a layer's forward "
        f"({gb_text(reference.worker_bytes)} with {_name(reference)}), a pool "
        f"{gb_text(chosen.pool_bytes, 1)}, {chosen.inter_node_share:.0%} of it between nodes; "
        f"{1 - chosen.compute_share:.0%} of the attention time is communication that nothing hides."
    )


def _memory(chosen: CandidateResult, max_kv_gib: float | None) -> str:
    limit = "" if max_kv_gib is None else f" (limit {max_kv_gib:g} GiB)"
    held = gib_text(chosen.resident_kv_bytes)
    return f"A worker holds at most {held} of one layer's K and V{limit}."


def _choice(
    chosen: CandidateResult, best: CandidateResult, equal: Sequence[CandidateResult]
) -> str:
    if len(equal) == 1:
        return f"No other finalist comes within {EQUAL:.0%} of its predicted step."
    text = f"{len(equal)} finalists are within {EQUAL:.0%} of the fastest"
    if chosen is best:
        return f"{text}; it is also the one to prefer by pool size and bytes."
    return (
        f"{text}; this one has the smallest pool, then the fewest bytes, and takes "
        f"{chosen.step_ms / best.step_ms - 1:.1%} longer than the fastest."
    )


def _warnings(chosen: CandidateResult) -> list[str]:
    found = []
    if chosen.speedup_step < 1.05:
        found.append(
            f"Warning: the predicted gain is {chosen.speedup_step - 1:.0%} of a step; the "
            "attention of this corpus is nearly balanced as it is, or too small to be worth moving."
            + (" Train without libra." if not chosen.is_faster else "")
        )
    if chosen.tile_over_target > 1:
        found.append(
            "Warning: the heaviest tile exceeds what a worker should do; add smaller blocks or "
            "more head shards to the grid."
        )
    if chosen.compute_share < 0.6:
        found.append(
            "Warning: most of the time is communication; check the bandwidths of the cost model "
            "and prefer pools inside a node."
        )
    return found


def _name(reference: CandidateResult) -> str:
    """ulysses, or home."""
    return reference.candidate.placer.capitalize()


def _skew(skew: Sequence[PoolSkew], result: CandidateResult) -> PoolSkew:
    key = (result.candidate.pool_size, result.candidate.scope)
    return next(s for s in skew if (s.pool_size, s.scope) == key)


def _step(result: CandidateResult) -> tuple[float, Candidate]:
    return (result.step_ms, result.candidate)


def _ratio(number: float, base: float) -> str:
    return f"{number / base:.1f}x" if base else f"{gb_text(number)} against none of"

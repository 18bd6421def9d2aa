"""A simulation as JSON. In: Simulation. Out: dicts of numbers and texts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_libra.simulator.calibration import model_json
from megatron_libra.simulator.metrics import CandidateResult
from megatron_libra.simulator.simulation import Simulation
from megatron_libra.simulator.skew import PoolSkew

__all__ = ["simulation_answer"]


def simulation_answer(simulation: Simulation) -> dict[str, Any]:
    """The answer of `libra simulate --json`; ratios are max / mean - 1, bytes one layer's
    forward.
    """
    return {
        "corpus": {
            "name": simulation.corpus_name,
            "packing": simulation.packing,
            "lengths": asdict(simulation.lengths),
            "sequences": asdict(simulation.sequences),
        },
        "job": asdict(simulation.job),
        "libra": asdict(simulation.base),
        "cost_model": model_json(simulation.model),
        "sampling": {
            **asdict(simulation.sampling),
            "sentence": simulation.sampling.sentence,
        },
        "recommendation": {
            **_result(simulation.recommendation.result),
            "train_with_libra": simulation.recommendation.result.is_faster,
            "reasons": list(simulation.recommendation.reasons),
        },
        "reference": simulation.reference_name,
        "references": {name: _result(each) for name, each in simulation.references.items()},
        "finalists": [_result(each) for each in simulation.finalists],
        "screened": [_result(each) for each in simulation.screened],
        "vrsp": [_skew(each) for each in simulation.skew],
        "data_parallel_scaling": [asdict(point) for point in simulation.scaling],
    }


def _result(result: CandidateResult) -> dict[str, Any]:
    """One flat object, the choices first."""
    values = asdict(result)
    return {**values.pop("candidate"), **values}


def _skew(skew: PoolSkew) -> dict[str, Any]:
    limit_mean, limit_worst = skew.limits()
    return {
        "pool_size": skew.pool_size,
        "scope": skew.scope,
        "inter_pool_imbalance_before": float(skew.before.mean()),
        "inter_pool_imbalance": float(skew.after.mean()),
        "worst_inter_pool_imbalance": float(skew.after.max()),
        "step_imbalance_before": float(skew.step_before.mean()),
        "step_imbalance": float(skew.step_after.mean()),
        "worst_step_imbalance": float(skew.step_after.max()),
        "limit_speedup_mean": limit_mean,
        "limit_speedup_worst": limit_worst,
    }

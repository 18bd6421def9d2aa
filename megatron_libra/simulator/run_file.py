"""Write the recommended run file. In: Simulation. Out: YAML for `megatron_libra.run --config`.

Keys are flag names without the dashes; the reasons travel as comments. Flags on the command line
win over the file, so it can be laid beside an existing run. Where libra would be slower, its lines
are comments: the file then trains without it.
"""

from __future__ import annotations

import textwrap

from megatron_libra.simulator.simulation import Simulation

__all__ = ["NOTHING", "run_file"]

NOTHING = "Nothing is recommended: train without libra."
"""For every output, if no configuration is faster than the reference."""
REQUIRED = {
    "dataloader-inter-document-masking": "true",
    "calculate-per-token-loss": "true",
    "attention-dropout": "0",
}
"""What libra refuses to train without (integration/rules.py), besides the layout below."""


def run_file(simulation: Simulation) -> str:
    """The text of the file."""
    job, result = simulation.job, simulation.recommendation.result
    config = result.candidate.config(simulation.base)
    choices = {
        "libra-pool-size": config.pool_size,
        "libra-block-size": config.block_size,
        "libra-head-split": config.head_split,
        "libra-chunks": config.chunks,
        "libra-vrsp-scope": config.vrsp_scope,
        "libra-placer": config.placer,
        "libra-load-slack": config.load_slack,
        "libra-kv-fetch": config.kv_fetch,
        "libra-layout": config.layout,
        "libra-backward-kv": config.backward_kv,
    }
    layout = {
        "seq-length": job.seq_length,
        "context-parallel-size": job.context_parallel_size,
        "pipeline-model-parallel-size": job.pipeline_parallel_size,
        "global-batch-size": job.global_batch_size,
        "micro-batch-size": 1,
    }
    reasons = "\n".join(_comment(reason) for reason in simulation.recommendation.reasons)
    is_faster = result.is_faster
    mark = "" if is_faster else "# "
    recommended = f"Recommended by libra simulate for {simulation.corpus_name}."
    tried = f"{NOTHING} The best that libra simulate tried for {simulation.corpus_name} is below."
    return "\n".join(
        [
            _comment(recommended if is_faster else tried),
            _comment(simulation.sampling.sentence),
            _comment(f"Times are predictions of the cost model {simulation.model.name}."),
            "#",
            reasons,
            "",
            f"context-parallel-impl: {'libra' if is_faster else 'megatron'}",
            *(f"{mark}{key}: {value}" for key, value in choices.items()),
            "",
            _comment(
                "What libra requires, with documents as samples (for --sft: without the first)."
            ),
            *(f"{mark}{key}: {value}" for key, value in REQUIRED.items()),
            "",
            _comment(f"The job that was simulated; it has {job.data_parallel_size} replicas (DP)."),
            *(f"{key}: {value}" for key, value in layout.items()),
            "",
        ]
    )


def _comment(text: str) -> str:
    return textwrap.fill(text, 98, initial_indent="# ", subsequent_indent="#   ")

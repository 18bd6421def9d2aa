"""What a user of a patched tree runs: a training script that knows nothing of libra.

Only the CPU stands in for the GPU here. Nothing installs hooks: `main` is that of
scripts/pretrain_gpt.py without the line that does.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from megatron_libra.integration import cpu

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"

if __name__ == "__main__":
    cpu.install()
    import torch.distributed as dist
    from megatron.training import training

    # The file of the patched tree, not the mark that the launcher leaves in its place.
    assert training.libra_hooks.INSTALLED
    runpy.run_path(str(SCRIPT), run_name="pretrain_gpt")["main"]()
    dist.barrier()
    dist.destroy_process_group()

"""Pictures of a simulation. In: Simulation. Out: matplotlib figures; one file a question.

style.py, corpus.py (how long, how skewed), choices.py (which P, B, H), pool.py (one pool's plan),
job.py (scaling and spread). matplotlib is imported when a picture is drawn.
"""

from megatron_libra.simulator.plots.figures import FIGURES, draw, require_matplotlib

__all__ = ["FIGURES", "draw", "require_matplotlib"]

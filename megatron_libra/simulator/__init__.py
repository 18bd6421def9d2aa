"""Which configuration to train with, answered on a CPU from sample lengths. NumPy only, no prints.

In reading order: job.py and corpus.py (what is simulated), candidates.py (what is tried), skew.py
(VRSP on every window), pool_work.py and cost_model.py (what a plan costs), replay.py, pipeline.py
and metrics.py (plans of sampled windows), search.py (all of it), tune.py (which one and why),
report.py.
"""

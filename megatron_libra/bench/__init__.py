"""Evidence for the planner: published rules side by side, and the paper's tables computed again.

In: length metadata. Out: tables. Nothing here is used in training.
"""

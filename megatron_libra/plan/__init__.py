"""Pure planning: sample lengths in, plans out.

Standard library and numpy only; same input, same plan.
"""

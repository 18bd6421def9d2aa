"""The error of a plan that breaks an invariant; what users cause is a ValueError."""

__all__ = ["PlanError"]


class PlanError(RuntimeError):
    """A plan breaks one of its invariants, or workers hold different plans."""

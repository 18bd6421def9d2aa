"""Heads of `libra simulate`. In: heads of the model, TP, H to try. Out: heads of a rank.

A rank's heads are a quotient that nobody typed, so a refusal of H shows what it is the quotient of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_libra.config import AttentionShape, divisors
from megatron_libra.plan.heads import fits

__all__ = ["ModelHeads"]


@dataclass(frozen=True, slots=True)
class ModelHeads:
    """Heads of the whole model, and where they are from."""

    shape: AttentionShape
    given: Mapping[str, int | None]
    """query_heads and kv_heads as the command line gives them; None: of the preset."""
    corpus: str
    """The preset, if there is one."""
    tensor_parallel_size: int
    """TP."""

    def of_rank(self) -> AttentionShape:
        """Heads of a tensor-parallel rank; below TP kv heads each is on several ranks.

        Raises:
            ValueError: TP does not divide the heads.
        """
        model, size = self.shape, self.tensor_parallel_size
        is_shared = model.kv_heads < size and not size % model.kv_heads
        for name, heads in (("query_heads", model.query_heads), ("kv_heads", model.kv_heads)):
            if heads % size and not (is_shared and name == "kv_heads"):
                raise ValueError(
                    f"tensor_parallel_size ({size}) must divide {name} ({heads}); try one of "
                    f"{divisors(heads)}."
                )
        return replace(
            model, query_heads=model.query_heads // size, kv_heads=max(1, model.kv_heads // size)
        )

    def check_head_splits(self, head_splits: Sequence[int]) -> None:
        """ValueError for an H of --head-splits that does not cut a rank's heads evenly."""
        rank = self.of_rank()
        allowed = [heads for heads in divisors(rank.query_heads) if fits(rank, heads, 1)]
        for heads in head_splits:
            if heads in allowed:
                continue
            rule = f"must divide {self._name('query_heads', rank)}"
            if rank.query_heads % heads == 0:
                rule = f"must divide {self._name('kv_heads', rank)} or be a multiple of it"
            raise ValueError(f"--head-splits ({heads}) {rule}; try one of {allowed}.")

    def _name(self, name: str, rank: AttentionShape) -> str:
        """Heads of a rank as the quotient of what was typed."""
        heads = getattr(self.shape, name)
        text = f"--{name.replace('_', '-')} ({heads})"
        if self.given[name] is None:
            text = f"{heads} {name.replace('_', ' ')} of {self.corpus}"
        if self.tensor_parallel_size == 1:
            return text
        return f"{text} / --tp ({self.tensor_parallel_size}) = {getattr(rank, name)}"

"""What may stand for a corpus on the command line. In: a word. Out: a refusal, or nothing."""

from __future__ import annotations

from pathlib import Path

from megatron_libra.simulator.job import PRESET_JOBS

__all__ = ["check_corpus_name"]


def check_corpus_name(corpus: str) -> None:
    """ValueError unless the word is a preset or a path that exists."""
    if corpus not in PRESET_JOBS and not Path(corpus).exists():
        raise ValueError(
            f"{corpus!r} is neither a file nor a preset ({', '.join(PRESET_JOBS)}); give the path "
            "of a file of lengths or one of these names."
        )

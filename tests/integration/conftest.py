"""Fixtures: one corpus a session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a small .bin/.idx corpus; Megatron is imported in another process."""
    from tests.integration.harness import call

    return call(_build, tmp_path_factory.mktemp("corpus"))


def _build(directory: Path) -> str:
    from tests.integration.corpus import build_corpus

    return build_corpus(directory)

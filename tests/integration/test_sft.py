"""SFT jsonl through Megatron's SFTDataset: lengths from the sidecar, the reference's losses.

Megatron pads conversations to 2 * CP, so only layouts with CP = 1 train on the reference's tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_libra.data.sidecar import build_sidecar
from tests.integration.corpus import EOD, VOCABULARY
from tests.integration.harness import train
from tests.integration.layouts import Layout
from tests.integration.reference import dense_reference


class ByteTokenizer:
    """A conversation is its bytes; the system message is no target."""

    vocab_size, eod, pad = VOCABULARY, EOD, EOD - 1
    unique_identifiers: dict[str, str] = {}

    def tokenize_conversation(
        self, conversation: list[dict[str, str]], return_target: bool, add_generation_prompt: bool
    ) -> tuple[Any, Any]:
        texts = [np.frombuffer(m["content"].encode(), np.uint8) for m in conversation]
        tokens = np.concatenate(texts).astype(np.int64) % (EOD - 1)
        targets = tokens.copy()
        targets[: len(texts[0])] = -100
        return tokens, targets


def read_chats() -> None:
    """Stand-ins for the packages datasets and transformers."""
    from megatron.core.tokenizers.utils import build_tokenizer
    from megatron.training.datasets import sft_dataset

    def read(self: Any, path: str) -> None:
        self.dataset = [json.loads(line) for line in Path(path).read_text().splitlines()]

    sft_dataset.SFTLowLevelDataset.__init__ = read
    build_tokenizer.build_tokenizer = lambda *args, **kwargs: ByteTokenizer()


def read_chats_densely() -> None:
    dense_reference()
    read_chats()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 lines of one to six conversations, some longer than a sequence."""
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for _ in range(200):
            messages = []
            for _ in range(rng.integers(1, 7)):
                for role in ("system", "user", "assistant"):
                    size = int(np.clip(rng.lognormal(2.5, 1.0), 1, 200))
                    text = bytes(97 + (np.arange(size) * rng.integers(1, 4)) % 26).decode()
                    messages.append({"role": role, "content": text})
            file.write(json.dumps({"messages": messages}) + "\n")
    build_sidecar(path, tokenizer="byte")
    return path


def flags(layout: Layout, chats: Path) -> list[str]:
    # SFTDataset has no empty splits
    words = layout.command_line(str(chats), "--eval-iters", "1")
    words[words.index("--dataloader-inter-document-masking")] = "--sft"
    return words


@pytest.fixture(scope="module")
def expected(chats: Path) -> list[float]:
    record = train(1, flags(Layout().reference, chats), arrange=read_chats_densely)[-1]
    assert record.losses[-1] < record.losses[0]
    return record.losses


def test_same_losses(chats: Path, expected: list[float]) -> None:
    record = train(2, flags(Layout(dp=2, pool=2), chats), arrange=read_chats)[-1]
    assert record.losses == pytest.approx(expected, rel=1e-5)


def test_padded_conversations_train_with_context_parallelism(chats: Path) -> None:
    layout = Layout(cp=2, dp=2, pool=2)
    record = train(4, flags(layout, chats), arrange=read_chats)[-1]
    assert record.losses[-1] < record.losses[0]
    assert all(n % 4 == 0 for _, pool, _ in record.order for lengths in pool for n in lengths[:-1])

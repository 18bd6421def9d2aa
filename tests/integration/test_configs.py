"""Every run file of configs/ parses, validates and is supported; what it stands for, by hand."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_libra.integration.arguments import config_from_args
from megatron_libra.integration.yaml import load
from tests.integration.harness import ROOT
from tests.integration.parsing import parse_all

FILES = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
WORLD_SIZES = {"tiny_cpu": 4, "256k": 256, "1m": 256}
# what a GPU machine has and this one may not
WITHOUT_FUSIONS = ["--transformer-impl", "local", "--no-gradient-accumulation-fusion"]


@pytest.fixture(scope="module")
def namespaces() -> dict[str, argparse.Namespace]:
    commands: list[tuple[int, dict[str, Any], list[str]]] = [
        (WORLD_SIZES[name], load(path), WITHOUT_FUSIONS) for name, path in FILES.items()
    ]
    return dict(zip(FILES, parse_all(commands), strict=True))


def test_there_is_a_world_for_every_file() -> None:
    assert FILES.keys() == WORLD_SIZES.keys()


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_loads(name: str, namespaces: dict[str, Any]) -> None:
    args = namespaces[name]
    assert isinstance(args, argparse.Namespace), args
    assert args.context_parallel_impl == "libra"


@pytest.mark.parametrize(
    ("name", "data_parallel", "context_parallel", "seq_length", "batch", "pool", "block"),
    [
        ("256k", 32, 8, 2**18, 128, 8, 4096),
        ("1m", 16, 16, 2**20, 32, 8, 8192),
        ("tiny_cpu", 2, 2, 4096, 8, 2, 512),
    ],
)
def test_layouts(
    name: str,
    data_parallel: int,
    context_parallel: int,
    seq_length: int,
    batch: int,
    pool: int,
    block: int,
    namespaces: dict[str, Any],
) -> None:
    args = namespaces[name]
    config = config_from_args(args)
    assert (args.data_parallel_size, args.context_parallel_size) == (
        data_parallel,
        context_parallel,
    )
    assert (args.seq_length, args.global_batch_size) == (seq_length, batch)
    assert (config.pool_size, config.block_size) == (pool, block)


def test_paper_models_have_qwen3_30b_a3b_shapes(namespaces: dict[str, Any]) -> None:
    for name in ("256k", "1m"):
        args = namespaces[name]
        sizes = (args.num_layers, args.hidden_size, args.num_attention_heads, args.num_query_groups)
        assert sizes == (48, 2048, 32, 4)
        experts = (args.kv_channels, args.num_experts, args.moe_router_topk)
        assert experts == (128, 128, 8) and args.moe_ffn_hidden_size == 768


def test_no_file_names_a_path_of_a_machine() -> None:
    values = [value for path in FILES.values() for value in load(path).values()]
    assert not [value for value in values if isinstance(value, str) and value.startswith("/")]

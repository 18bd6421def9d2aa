"""Flags mirror LibraConfig: names, types, defaults, help; the config that parsed flags mean."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
import torch

from megatron_libra.config import CHOICES, AttentionShape, LibraConfig
from megatron_libra.integration.arguments import (
    add_arguments,
    config_from_args,
    field_docs,
    flag_of,
    shape_from_args,
)

FIELDS = dataclasses.fields(LibraConfig)


def parse(*words: str) -> argparse.Namespace:
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(list(words))


def test_defaults_are_the_config_defaults_and_nothing_is_touched() -> None:
    args = parse()
    assert args.context_parallel_impl == "megatron"
    assert config_from_args(args) == LibraConfig()


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_field_is_a_flag(field: dataclasses.Field[object]) -> None:
    value: object = next(
        (choice for choice in CHOICES.get(field.name, ()) if choice != field.default), None
    )
    if isinstance(field.default, bool):
        words, value = [flag_of(field.name)], not field.default
    elif value is None:
        number = 0.5 if field.name == "load_slack" else 7
        value = number if field.default is None else type(field.default)(number)
        words = [flag_of(field.name), str(value)]
    else:
        words = [flag_of(field.name), str(value)]
    assert getattr(config_from_args(parse(*words)), field.name) == value


def test_help_is_the_sentence_under_the_field() -> None:
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    text = " ".join(parser.format_help().split())
    docs = field_docs(LibraConfig)
    assert docs.keys() == {field.name for field in FIELDS}
    for field in FIELDS:
        assert docs[field.name] in text
        assert flag_of(field.name) in text


def test_adding_twice_is_adding_once() -> None:
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    count = len(parser._actions)
    assert len(add_arguments(parser)._actions) == count


def test_ulysses_is_a_placer_on_pools_of_one() -> None:
    config = config_from_args(parse("--context-parallel-impl", "ulysses", "--libra-pool-size", "8"))
    assert (config.placer, config.pool_size) == ("ulysses", 1)


def test_unknown_choice_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--libra-placer", "best")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("megatron_libra: --libra-placer: invalid choice: 'best' (choose from ")
    assert "home_first, paper" in line.replace("'", "")
    assert line.endswith("; try --libra-placer home_first.\n")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((32, 4, True, 1), (32, 4)),
        ((32, 4, True, 2), (16, 2)),
        ((32, 4, True, 8), (4, 1)),  # fewer kv heads than ranks: each rank has one
        ((8, 1, False, 2), (4, 4)),  # no grouped query attention
    ],
)
def test_shape_is_one_tensor_parallel_rank_s(
    sizes: tuple[int, int, bool, int], expected: tuple[int, int]
) -> None:
    heads, groups, grouped, tensor_parallel = sizes
    args = argparse.Namespace(
        num_attention_heads=heads,
        num_query_groups=groups,
        group_query_attention=grouped,
        tensor_model_parallel_size=tensor_parallel,
        kv_channels=128,
        params_dtype=torch.bfloat16,
    )
    query_heads, kv_heads = expected
    assert shape_from_args(args) == AttentionShape(
        query_heads=query_heads, kv_heads=kv_heads, head_dim=128, bytes_per_element=2
    )

"""Counting one jsonl line: bytes, a function of one's own, a stand-in for a hub tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_libra.data.counters import load_counter, split_conversations


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHAT = {"messages": [say("system", "abc"), say("user", "de"), say("system", ""), say("user", "f")]}


def test_each_system_message_begins_a_conversation() -> None:
    talks = split_conversations([say("user", "hi"), *CHAT["messages"]])
    assert [[m["role"] for m in talk] for talk in talks] == [
        ["user"],
        ["system", "user"],
        ["system", "user"],
    ]


def test_bytes_of_conversations_and_of_text() -> None:
    count = load_counter("byte")
    assert count(CHAT) == [5, 1]
    assert count({"text": "h\u00e9"}) == [3]
    assert count({"messages": [], "text": "ab"}) == [2]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"prompt": "x"},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": "hi"},
        {"messages": ["hi"]},
        [1],
        "text",
        None,
    ],
)
def test_other_lines_are_refused_with_the_way_out(record: Any) -> None:
    with pytest.raises(
        ValueError, match="no 'messages' .* use|count other formats with --tokenizer"
    ):
        load_counter("byte")(record)


def test_a_function_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_counter_xyz.py").write_text(
        "def words(line):\n    return len(line['t'].split())\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert load_counter("my_counter_xyz:words")({"t": "a b c"}) == 3
    assert sys.path == before
    with pytest.raises(ValueError, match="my_counter_xyz:missing: the module has no function"):
        load_counter("my_counter_xyz:missing")
    with pytest.raises(ValueError, match="No module named 'nowhere_xyz'.*give MODULE:FUNCTION"):
        load_counter("nowhere_xyz:f")


class Tokenizer:
    """Four characters to a token; a template that is given counts one more for each message."""

    def encode(self, text: str) -> list[int]:
        return [0] * -(-len(text) // 4)

    def apply_chat_template(
        self, talk: list[dict[str, str]], *, tokenize: bool, return_dict: bool, chat_template: Any
    ) -> list[int]:
        assert tokenize and not return_dict
        text = "".join(message["content"] for message in talk)
        return self.encode(text) + [1] * (len(talk) if chat_template else 0)


def from_pretrained(name: str) -> Tokenizer:
    if name != "good":
        raise OSError(f"{name} is not a local folder\nsecond line")
    return Tokenizer()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("transformers")
    module.AutoTokenizer = SimpleNamespace(from_pretrained=from_pretrained)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)


@pytest.mark.usefixtures("hub")
def test_hugging_face_counts_conversations_through_the_template() -> None:
    assert load_counter("good")(CHAT) == [2, 1]
    assert load_counter("good", chat_template="{{ x }}")(CHAT) == [4, 3]
    assert load_counter("good")({"text": "abcde"}) == [2]


@pytest.mark.usefixtures("hub")
def test_a_tokenizer_that_does_not_exist_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"'bad' cannot be loaded \(bad is not a local folder\)"):
        load_counter("bad")


def test_without_transformers_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ValueError, match="needs the package transformers.*pip install transformers"
    ):
        load_counter("some/name")

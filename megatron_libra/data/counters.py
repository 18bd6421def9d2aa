"""Count the tokens of a jsonl line. In: the name of a tokenizer. Out: a function of a parsed line.

A line is Megatron's SFT format {"messages": [{"role": .., "content": ..}, ..]}, where each system
message begins a conversation, or {"text": ..}. Other formats: a function of your own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["LineCounter", "load_counter", "split_conversations"]

LineCounter = Callable[[Any], "int | Sequence[int]"]
"""Parsed line -> tokens of the line, or of each of its conversations."""

Message = dict[str, Any]


def load_counter(tokenizer: str, *, chat_template: str | None = None) -> LineCounter:
    """The counter that `tokenizer` names.

    Args:
        tokenizer: `byte` (UTF-8 bytes of the contents), `MODULE:FUNCTION` (a LineCounter of your
            own; the working directory is on its path), or the name or folder of a Hugging Face
            tokenizer.
        chat_template: Jinja text instead of the tokenizer's own chat template.

    Raises:
        ValueError: the module, the function or the library is missing.
    """
    if tokenizer == "byte":
        return count_bytes
    if ":" in tokenizer:
        return _imported(*tokenizer.split(":", 1))
    return _hugging_face(tokenizer, chat_template)


def split_conversations(messages: Sequence[Message]) -> list[list[Message]]:
    """Conversations of a line: each system message begins one."""
    conversations: list[list[Message]] = []
    for message in messages:
        if not conversations or message["role"] == "system":
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def read_line(record: Any) -> str | list[list[Message]]:
    """The text of a line, or its conversations; ValueError if it has neither."""
    if isinstance(record, dict):
        text, messages = record.get("text"), record.get("messages")
        if isinstance(text, str):
            return text
        if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
            return split_conversations(messages)
    found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
    raise ValueError(
        f"has no 'messages' (a list of role and content) and no 'text', but {found}; count other "
        "formats with --tokenizer MODULE:FUNCTION."
    )


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict) and "role" in message and isinstance(message.get("content"), str)
    )


def count_bytes(record: Any) -> list[int]:
    """UTF-8 bytes of a text, or of each conversation's contents; no separators."""
    line = read_line(record)
    if isinstance(line, str):
        return [len(line.encode())]
    return [sum(len(message["content"].encode()) for message in talk) for talk in line]


def _hugging_face(name: str, chat_template: str | None) -> LineCounter:
    """As Megatron's SFTTokenizer counts: a conversation through the chat template."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            f"tokenizer {name!r} needs the package transformers, which is not installed; "
            "pip install transformers, or use byte or MODULE:FUNCTION."
        ) from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"tokenizer {name!r} cannot be loaded ({str(error).splitlines()[0]}); give a name of "
            "the hub or a folder with its files."
        ) from None

    def count(record: Any) -> list[int]:
        line = read_line(record)
        if isinstance(line, str):
            return [len(tokenizer.encode(line))]
        return [
            len(
                tokenizer.apply_chat_template(
                    talk, tokenize=True, return_dict=False, chat_template=chat_template
                )
            )
            for talk in line
        ]

    return count


def _imported(module_name: str, function_name: str) -> LineCounter:
    """A user's function, found from the working directory as `python -m` finds modules."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"tokenizer {module_name}:{function_name}: {error}; give MODULE:FUNCTION of a module "
            "in the working directory or on PYTHONPATH."
        ) from None
    finally:
        sys.path.pop(0)
    counter = getattr(module, function_name, None)
    if not callable(counter):
        raise ValueError(
            f"tokenizer {module_name}:{function_name}: the module has no function of that name; it "
            "must take a parsed line and return its tokens, or a list of each conversation's."
        )
    return counter  # type: ignore[no-any-return]

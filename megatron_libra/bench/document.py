"""Tables inside a Markdown file. In: the file's text. Out: the text with tables replaced, or rows.

A table stands between two comments, which the file has from the start:

    <!-- table planners longtail-256k -->
    <!-- end -->
"""

from __future__ import annotations

import re

__all__ = ["read_rows", "replace_table"]


def replace_table(text: str, name: str, body: str) -> str:
    """The text with the lines between a table's comments replaced.

    Raises:
        ValueError: the text has no place for the table.
    """
    found = _place(name).search(text)
    if found is None:
        raise ValueError(
            f"the document has no place for table {name!r}; add the lines "
            f"'<!-- table {name} -->' and '<!-- end -->'."
        )
    return f"{text[: found.start(1)]}\n{body}\n\n{text[found.end(1) :]}"


def read_rows(text: str, name: str) -> dict[str, list[str]]:
    """Cells of a table by the key of their row, heads left out; ValueError if it is missing."""
    found = _place(name).search(text)
    if found is None:
        raise ValueError(f"the document has no table {name!r}; write it with --write.")
    lines = [line for line in found.group(1).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row[1:] for row in rows}


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- table {re.escape(name)} -->\n(.*?)<!-- end -->", re.DOTALL)

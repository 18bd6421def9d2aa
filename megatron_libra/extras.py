"""How to get what is missing. In: an extra of setup.py. Out: the command that a hint names.

No registry has this package: pip finds its extras in a checkout only.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["Extra", "install_hint"]

Extra = Literal["megatron", "fa4", "plots", "parquet"]
"""The extras that a user may lack; those of setup.py besides test and dev."""


def install_hint(extra: Extra) -> str:
    """The command that installs an extra, and where to run it; no full stop at its end."""
    return f"pip install -e '.[{extra}]' in the checkout"

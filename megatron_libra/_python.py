"""The oldest Python that runs this package. Imported first: an older one cannot read the rest."""

import sys

if sys.version_info < (3, 12):  # noqa: UP036, a checkout can be imported without being installed
    raise ImportError(
        "megatron_libra needs Python 3.12 or later, this is "
        + ".".join(map(str, sys.version_info[:3]))
        + "; in the checkout: source .venv/bin/activate."
    )

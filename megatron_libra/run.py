"""`python -m megatron_libra.run [--config RUN.yaml] SCRIPT ...`: train a Megatron script with
libra at hand."""

from __future__ import annotations

from megatron_libra.integration.launch import main

if __name__ == "__main__":
    main()

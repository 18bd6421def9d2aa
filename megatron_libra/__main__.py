"""`python -m megatron_libra` is `libra`, where the command is not on the path."""

from megatron_libra.cli import main

if __name__ == "__main__":
    main()

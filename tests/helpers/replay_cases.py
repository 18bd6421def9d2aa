"""A small cluster for `libra replay`: its options and two optimizer steps of packed sequences."""

SIZES = ("--seq-length", 64, "--cp", 2, "--dp", 4, "--gbs", 8)
HEADS = ("--query-heads", 4, "--kv-heads", 2, "--head-dim", 8)
CHOICES = ("--pool-size", 2, "--block-size", 8, "--head-split", 2)
SMALL = (*SIZES, *HEADS, *CHOICES, "--seeds", 0, "--processes", 1)
PREDICTED = ("--measure", 0)
STEP = [[64], [8] * 8, [8] * 8, [64], *[[4] * 16] * 4]

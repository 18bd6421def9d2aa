"""Libra inside Megatron: the only package that imports it.

In reading order: launch.py and install.py (how a run begins), hooks.py (where Megatron calls us),
session.py (one run), plan_stream.py and batch.py (one microbatch), core_attention.py (one layer);
beside them rules.py with refusals.py, arguments.py and yaml.py (what a run is set to),
telemetry.py, rope.py, groups.py, and cpu.py with fixes.py (machines without a GPU or without
TransformerEngine).
"""

"""Libra inside Megatron: the only package that imports it.

In reading order: launch.py and install.py (how a run begins; native.py in a patched tree), hooks.py
(where Megatron calls us), session.py (one run, which state.py remembers), plan_stream.py, batch.py,
packed_params.py and forward_step.py (one microbatch), layer_spec.py and core_attention.py (one
layer); beside them arguments.py and yaml.py (what a run is set to), rules.py with refusals.py,
processes.py and flag_faults.py (what is refused), groups.py, rope.py, telemetry.py, connections.py
(how CUDA starts), and cpu.py with fixes.py (machines without a GPU or without TransformerEngine).
"""

"""Lengths in, sample order out: length tables, the sampler, packing and corpora. NumPy only.

In reading order: rows.py (lengths in memory), lengths.py (Megatron datasets), files.py (files of
lengths), conversations.py, counters.py and sidecar.py (SFT-style jsonl), schedule.py and sampler.py
(which sample each replica trains on), packing.py and corpora.py (for measurements), summary.py.
"""

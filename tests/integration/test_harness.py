"""Runs of the harness leave nothing behind."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing import util

import psutil

from tests.integration.harness import call


def start_a_server() -> int:
    """As Megatron does to save a checkpoint; it is told to end late, after other things."""
    manager = multiprocessing.get_context("spawn").Manager()
    globals()["kept"] = manager
    util.Finalize(None, time.sleep, args=(5,), exitpriority=1000)
    pid: int = manager._process.pid
    return pid


def test_what_a_process_started_ends_with_it() -> None:
    server = call(start_a_server)
    assert not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE

"""Do libra's runs get several hardware queues? In: one GPU. Out: a verdict, in 15 s.

Each process has CUDA_DEVICE_MAX_CONNECTIONS as named, starts CUDA in a way, and runs two long
kernels on a stream, then short ones on others, at normal and high priority: with one queue these
wait for the first long one and end at half of the long ones' time (0.50), else at once (0.00).
Ways: by torch alone; late: by torch, then connections.start, which must do nothing; libra: by
connections.start before torch is imported, after which Megatron's check sees the 1.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_libra.integration import connections, state

NAME, WORDS = "CUDA_DEVICE_MAX_CONNECTIONS", ["--context-parallel-impl=libra"]
LONG, SHORT = 200_000_000, 100_000  # clock cycles: 0.1 s, 0.05 ms
WAITS = {"unset torch": False, "1 torch": True, "1 late": True, "1 libra": False}


def shares(way):
    connections.start(WORDS) if way == "libra" else None
    import torch

    assert torch.cuda.is_available() and torch.cuda.get_device_properties(0)
    connections.start(WORDS) if way == "late" else None
    assert state.has_queues() == (way == "libra"), f"started by libra: {state.has_queues()}"
    assert way == "torch" or os.environ[NAME] == "1", "Megatron's check must see the 1"
    assert not torch._C._cuda_hasPrimaryContext(0), "a CUDA context was made"
    torch.cuda.set_device(0)
    long, *others = [torch.cuda.Stream(priority=p) for p in (0, 0, 0, 0, -1, -1)]
    for scale in (1000, 1):  # the first round loads the kernel
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
        events[0].record(long)
        for stream, event in zip([long, long, *others], events[1:], strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep((LONG if stream is long else SHORT) // scale)
                event.record(stream)
        torch.cuda.synchronize()
    total, *short = map(events[0].elapsed_time, events[2:])
    return f"{min(short[:3]) / total:.2f} {min(short[3:]) / total:.2f}"


def main():
    import torch

    if not torch.cuda.is_available():
        sys.exit("error: no CUDA device here; the question is about one.")
    found = {}
    for value, way in map(str.split, WAITS):
        variable = ["-u", NAME] if value == "unset" else [f"{NAME}={value}"]
        command = ["env", *variable, sys.executable, __file__, way]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        found[f"{value} {way}"] = None if done.returncode else float(done.stdout[:4]) > 0.3
        print(f"{NAME} {value}, started by {way}:", done.stdout.strip() or "FAILED", flush=True)
    print("VERDICT: connections.start", "WORKS" if found == WAITS else f"does NOTHING: {found}")
    sys.exit(found != WAITS)


if __name__ == "__main__":
    print(shares(sys.argv[1])) if sys.argv[1:] else main()

"""When does the CUDA driver read CUDA_DEVICE_MAX_CONNECTIONS? In: one GPU. Out: a verdict.

libra unsets it after Megatron's check (megatron_libra/integration/connections.py), when CUDA is
initialized but has no context. Four processes have it set or not at the start, and after that
point. Each runs two long kernels on a stream, then short ones on others: with one queue these wait
for the first long one and end at half of the long ones' time (0.50), else at once (0.00).
"""

import os
import subprocess
import sys

import torch

VARIABLE, ONE, UNSET = "CUDA_DEVICE_MAX_CONNECTIONS", "1", "unset"
LONG, SHORT = 200_000_000, 100_000  # clock cycles, about 0.1 s and 0.05 ms


def put(environment, value):
    environment.pop(VARIABLE, None)
    environment.update({} if value == UNSET else {VARIABLE: value})


def waits(later):
    """When a short kernel ends at normal and at high priority, as shares of the long ones' time."""
    torch.cuda.is_available()  # cuInit
    torch.cuda.get_device_properties(torch.device("cuda:0")), torch.cuda.get_device_capability()
    assert not torch._C._cuda_hasPrimaryContext(0), "Megatron's check makes a CUDA context"
    put(os.environ, later)
    torch.cuda.set_device(0)
    long, *others = [torch.cuda.Stream(priority=p) for p in (0, 0, 0, 0, -1, -1)]
    work = [(long, LONG), (long, LONG), *((stream, SHORT) for stream in others)]
    for scale in (1000, 1):  # the first round loads the kernel
        torch.cuda.synchronize()
        begin = torch.cuda.Event(enable_timing=True)
        begin.record(long)
        ends = [torch.cuda.Event(enable_timing=True) for _ in work]
        for (stream, cycles), event in zip(work, ends, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles // scale)
                event.record(stream)
        torch.cuda.synchronize()
    total, *short = map(begin.elapsed_time, ends[1:])
    return min(short[:3]) / total, min(short[3:]) / total


def main():
    found = ""
    for start, later in ((ONE, ONE), (ONE, UNSET), (UNSET, ONE), (UNSET, UNSET)):
        put(os.environ, start)
        shares = subprocess.check_output([sys.executable, __file__, later], text=True).split()
        print(f"{start} at the start, {later} after:", *shares, flush=True)
        found += "w" if float(shares[0]) > 0.3 else "-"
    verdicts = {"w-w-": "lifting WORKS", "ww--": "lifting does NOTHING: cuInit reads it"}
    print("VERDICT:", verdicts.get(found, f"unclear ({found}), do not rely on lifting"))


if __name__ == "__main__":
    print(*(f"{share:.2f}" for share in waits(sys.argv[1]))) if sys.argv[1:] else main()

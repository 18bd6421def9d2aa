"""Files of measured calls: every damaged value is named, with its file and its rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_libra.replay.calibrate import MeasuredCall
from megatron_libra.replay.calls import call_of
from megatron_libra.replay.grid import FIT
from megatron_libra.replay.links import LinkFit
from megatron_libra.replay.machine import Measurements
from megatron_libra.replay.measure import CallSeconds
from megatron_libra.replay.samples import read_measurements, write_measurements


def _measured(tokens: int) -> MeasuredCall:
    call = call_of([0, tokens], [8, 2 * tokens], query_heads=8, kv_heads=2, head_dim=128)
    return MeasuredCall(call, FIT, CallSeconds(1e-6 * tokens, 3e-6 * tokens))


MEASUREMENTS = Measurements(
    label="a machine",
    kernel="fa4",
    num_sms=132,
    gather_gb_s=3000.0,
    host={128: CallSeconds(0.0, 0.0)},
    calls=tuple(map(_measured, range(1, 13))),
    links={"symmetric": LinkFit(380.0, 0.0, 0.0), "nccl": LinkFit(270.0, 50.0, 0.25)},
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Twelve calls are enough, and links and hosts may cost nothing."""
    write_measurements(tmp_path / "calls.json", MEASUREMENTS)
    found = read_measurements(tmp_path / "calls.json")
    assert [each.call.key for each in found.calls] == [each.call.key for each in MEASUREMENTS.calls]
    assert [each.seconds for each in found.calls] == [each.seconds for each in MEASUREMENTS.calls]
    assert (found.host, found.links) == (MEASUREMENTS.host, MEASUREMENTS.links)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.update(calls=file["calls"][:1]), "calls has 1 of head dimension 128"),
        (lambda file: file.update(calls=[]), "calls has 0 of .* a fit needs at least 12"),
        (lambda file: file.update(calls=5), r"calls \(5\) must be a list"),
        (
            lambda file: file["calls"][3].update(forward=-1),
            r"calls\[3\].forward \(-1\) must be a n",
        ),
        (lambda file: file["calls"][3].update(backward=0), "must be a number above 0"),
        (lambda file: file["calls"][3].update(backward=10**400), "must be a number above 0"),
        (lambda file: file["calls"][3].update(forward=float("nan")), "NaN is not a number"),
        (lambda file: file["calls"][3].update(forward="1"), r'forward \("1"\) must be a number'),
        (lambda file: file["calls"][3].update(queries=[1.5]), r"calls\[3\].queries\[0\] \(1.5\)"),
        (lambda file: file["calls"][3].update(queries="12"), r"calls\[3\].queries"),
        (lambda file: file["calls"][3].update(keys=[]), "at most as many queries as keys"),
        (lambda file: file["calls"][3].update(kv_heads=3), r"kv_heads \(3\) must divide"),
        (lambda file: file["calls"][3].update(query_heads=8192), "integer from 1 to 4096"),
        (lambda file: file["calls"][3].update(part=4), "integer from 0 to 3"),
        (lambda file: file["calls"][3].update(head_dim=64), "host has no head dimension 64"),
        (lambda file: file["calls"][3].pop("group"), r"missing \['group'\]"),
        (lambda file: file["calls"].insert(0, 1), r"calls\[0\] \(1\) must be an object"),
        (lambda file: file.update(kernel="xyz"), r'kernel \("xyz"\) must be one of fa4'),
        (lambda file: file.update(num_sms=True), r"num_sms \(true\) must be an integer"),
        (lambda file: file.update(host={}), "must map head dimensions"),
        (lambda file: file.update(host={"x": file["host"]["128"]}), r'host\["x"\] \("x"\) must'),
        (
            lambda file: file.update(host={"9" * 5000: file["host"]["128"]}),
            r'host\["9{40,60}\.\.\.\] .* must be an integer from 1 to 256',
        ),
        (lambda file: file.update(links={"tcp": {}}), "links .* must be by symmetric, nccl"),
        (lambda file: file["links"]["nccl"].update(gb_s=0), r"links.nccl.gb_s \(0\) must be"),
    ],
)
def test_a_damaged_value_is_named(tmp_path: Path, change: Change, message: str) -> None:
    """The file, the value and the rule, on one line."""
    path = tmp_path / "calls.json"
    write_measurements(path, MEASUREMENTS)
    file = json.loads(path.read_text())
    change(file)
    path.write_text(json.dumps(file))
    with pytest.raises(ValueError, match=message) as caught:
        read_measurements(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"[]", r"the file \(\[\]\) must be an object"),
        (b'{"label": 1', "is not JSON: line 1, column 12: "),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"label": "\xff"}', "is not UTF-8: byte 11 is 0xff"),
        (b'{"num_sms": ' + b"9" * 5000 + b"}", "has an integer of some thousand digits"),
        (b'{"num_sms": 1, "num_sms": 2}', 'key "num_sms" is given twice'),
        (b'{"' + b"k" * 99 + b'": 1, "' + b"k" * 99 + b'": 2}', r'key "k{36}\.\.\. is given twice'),
        (b'{"num_sms": -Infinity}', "-Infinity is not a number"),
    ],
)
def test_no_json_object_is_named_too(tmp_path: Path, content: bytes, reason: str) -> None:
    """In our words, not in those of Python's reader."""
    path = tmp_path / "calls.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{path}: no measurements of .* \({reason}") as caught:
        read_measurements(path)
    assert str(caught.value).endswith("; write them with --keep-calls.")


def test_a_file_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "calls.json").write_text('{"label": 1}')
    with pytest.raises(ValueError, match="calls.json: no measurements .* missing .*'calls'"):
        read_measurements(tmp_path / "calls.json")

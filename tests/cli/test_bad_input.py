"""Bad input of any kind: exit code 2 and one line that names the value, the rule and a way out."""

from __future__ import annotations

import json
from concurrent.futures.process import BrokenProcessPool

import pytest

from megatron_libra.cli.request import read_pool


def refused(run):
    """The one line on stderr."""
    assert run.code == 2, (run.out, run.err)
    assert run.out == ""
    assert run.err.startswith("error: ") and run.err.endswith("\n") and run.err.count("\n") == 1
    assert "Traceback" not in run.err
    return run.err


POOL_FAULTS = [
    # change of a valid pool, words that the message must hold
    ({"sequences": []}, ["sequences", "non-empty list"]),
    ({"sequences": {}}, ["sequences ({})", "list of lists"]),
    ({"sequences": [1200, 3000]}, ["sequences[0] (1200)", "list of sample lengths"]),
    ({"sequences": [[1200], [-5]]}, ["sequences[1][0] (-5)", "from 0"]),
    ({"sequences": [[True], [5]]}, ["sequences[0][0] (true)", "integer"]),
    ({"sequences": [["12"], [5]]}, ["sequences[0][0] ('12')", "integer"]),
    ({"sequences": [[1.5], [5]]}, ["sequences[0][0] (1.5)", "integer"]),
    ({"sequences": [[None], [5]]}, ["sequences[0][0] (null)", "integer"]),
    ({"sequences": [[2**31], [5]]}, ["sequences[0][0] (2147483648)", "2147483647"]),
    ({"sequences": [[10**4000], [5]]}, ["sequences[0][0] (1000", "...)", "2147483647"]),
    ({"sequences": [[4293], [5]]}, ["4293", "seq_length (4292)", "raise seq_length"]),
    ({"sequences": [[4], [5], [6]]}, ["libra.pool_size (2)", "(3)", "set it to 3"]),
    ({"seq_length": 4293}, ["seq_length (4293)", "multiple", "try 4296"]),
    ({"seq_length": 0}, ["seq_length (0)", "from 1"]),
    ({"seq_length": "4292"}, ["seq_length ('4292')", "integer", "try 4292."]),
    ({"seq_length": 2_000_000_000}, ["4000000000 tokens of a pool; it holds at most 2147483647"]),
    ({"context_parallel_size": 0}, ["context_parallel_size (0)", "from 1"]),
    ({"context_parallel_size": -2}, ["context_parallel_size (-2)", "from 1"]),
    ({"context_parallel_size": 2.0}, ["context_parallel_size (2.0)", "integer", "try 2"]),
    ({"context_parallel_size": True}, ["context_parallel_size (true)", "integer"]),
    ({"context_parallel_size": 1_000_000}, ["2000000 workers of a pool; at most 4096 are planned"]),
    ({"attention": [8, 2, 16]}, ["attention holds [8, 2, 16]", "query_heads"]),
    ({"libra": 3}, ["libra holds 3", "JSON object"]),
    ({"seq_len": 4292}, ["seq_len is not a known key", "did you mean seq_length?"]),
    ({"whatever": 1}, ["whatever is not a known key", "known keys: sequences"]),
    ({"attention.kv_heads": 3}, ["kv_heads (3)", "divide query_heads (8)", "[1, 2, 4, 8]"]),
    ({"attention.head_dim": 0}, ["attention.head_dim (0)", "from 1"]),
    ({"attention.query_heads": 10**9}, ["attention.query_heads (1000000000)", "try 4096."]),
    ({"attention.dim": 16}, ["attention.dim is not a known key"]),
    ({"libra.head_split": 3}, ["head_split (3)", "query_heads (8)", "[1, 2, 4, 8]"]),
    ({"libra.chunks": 3}, ["chunks (3)", "head_split (4)", "[1, 2, 4]"]),
    ({"libra.block_size": 0}, ["libra.block_size (0)", "from 1", "try 4096"]),
    ({"libra.block_size": "512"}, ["libra.block_size ('512')", "integer", "try 512."]),
    ({"libra.block_size": "5 1"}, ["libra.block_size ('5 1')", "integer", "try 4096."]),
    ({"libra.load_slack": -0.1}, ["load_slack (-0.1)", "[0, 1)"]),
    ({"libra.load_slack": True}, ["libra.load_slack (true)", "number"]),
    ({"libra.load_slack": 10**400}, ["libra.load_slack (1000", "must be a number; try 0.01."]),
    ({"libra.placer": "papr"}, ["placer ('papr')", "home_first, paper, ulysses, home"]),
    ({"libra.placer": 7}, ["libra.placer (7)", "string"]),
    ({"libra.layout": "zig"}, ["layout ('zig')", "zigzag"]),
    ({"libra.deterministic": 1}, ["libra.deterministic (1)", "true or false"]),
    ({"libra.blok_size": 512}, ["libra.blok_size is not a known key", "did you mean block_size?"]),
]


@pytest.mark.parametrize(("change", "words"), POOL_FAULTS)
def test_faults_of_a_pool(libra, write, pool, change, words):
    for path, value in change.items():
        *parents, key = path.split(".")
        target = pool
        for parent in parents:
            target = target[parent]
        target[key] = value
    path = write(pool)
    message = refused(libra("plan", path, "--json"))
    assert message.startswith(f"error: {path}: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize("key", ["sequences", "context_parallel_size", "attention"])
def test_a_missing_key_is_named(libra, write, pool, key):
    del pool[key]
    assert f"{key} is missing" in refused(libra("plan", write(pool)))


def test_too_many_tiles_are_refused_at_once(libra, write, pool):
    pool |= {"sequences": [[500_000_000], [5]], "seq_length": 500_000_000}
    pool["libra"]["block_size"] = 1
    message = refused(libra("plan", write(pool)))
    assert "libra.block_size (1)" in message
    pool["libra"]["block_size"] = int(message.rsplit("try ")[1].rstrip(".\n"))
    assert read_pool(write(pool)).config.block_size > 1


def test_too_many_samples_for_the_workers_are_refused_at_once(libra, write, pool):
    pool |= {"sequences": [[1] * 300_000, [1]], "seq_length": 300_032, "context_parallel_size": 128}
    assert "300001 samples" in refused(libra("plan", write(pool)))


WINDOW_FAULTS = [
    ({"pool_size": 3}, ["pool_size (3)", "data_parallel_size (4)", "[1, 2, 4]"]),
    ({"data_parallel_size": 6}, ["8 entries", "data_parallel_size (6)"]),
    ({"data_parallel_size": 2_000_000_000}, ["data_parallel_size (2000000000)", "(8)"]),
    ({"data_parallel_size": 0}, ["data_parallel_size (0)", "from 1"]),
    ({"sequences": []}, ["sequences ([])", "non-empty"]),
    ({"sequences": [[1], 2]}, ["sequences[1] (2)"]),
    ({"scope": "all"}, ["scope ('all')", "auto, microbatch, step"]),
    ({"scope": None}, ["scope (null)", "string"]),
    ({"poolsize": 2}, ["poolsize", "did you mean pool_size?"]),
]


@pytest.mark.parametrize(("change", "words"), WINDOW_FAULTS)
def test_faults_of_a_window(libra, write, window, change, words):
    message = refused(libra("order", write(window | change), "--json"))
    for word in words:
        assert word in message


FILES = [
    ("", 'is empty; give a JSON object such as {"sequences": [['),
    ("   \n", "is empty; give"),
    ("{", "line 1, column 2"),
    ('{"sequences": [[1,]]}', "is not JSON: line 1, column 1"),
    ("sequences: [[1]]", "is not JSON"),
    ("[1, 2]", "must be a JSON object"),
    ("null", "must be a JSON object"),
    ('"text"', "must be a JSON object"),
    ('{"sequences": [[NaN]]}', "NaN is not a number; give a finite one."),
    ('{"sequences": [[-Infinity]]}', "-Infinity is not a number; give"),
    ('{"sequences": [[1e999]]}', "1e999 is too large for a number; give a smaller"),
    ('{"sequences": [[' + "9" * 5000 + "]]}", "has an integer of some thousand digits; give a"),
    (
        '{"sequences": [[1]], "sequences": [[2]]}',
        'key "sequences" is given twice; keep one of them.',
    ),
    ('{"a\\nb": 1}', "is not a known key"),
    ("[" * 100_000, "nests too deeply; lists of"),
    (b"\xff\xfe{\x00}\x00", "is not UTF-8: byte 0 is 0xff; save it as UTF-8 text."),
    (b'{"sequences": "\xe4"}', "byte 15 is 0xe4"),
]


@pytest.mark.parametrize(("content", "word"), FILES)
@pytest.mark.parametrize("command", ["plan", "order"])
def test_faults_of_a_file(libra, write, command, content, word):
    assert word in refused(libra(command, write(content)))


def test_a_byte_order_mark_is_accepted(libra, write, window):
    path = write(b"\xef\xbb\xbf" + json.dumps(window).encode())
    assert libra("order", path, "--json").code == 0


def test_paths_that_are_no_files(libra, tmp_path):
    assert "does not exist" in refused(libra("plan", tmp_path / "missing.json"))
    assert "is a directory" in refused(libra("plan", tmp_path))
    assert "cannot be read" in refused(libra("plan", "x" * 5000))


def test_an_error_of_the_system_is_one_line(libra, write, pool, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr("megatron_libra.cli.app.plan_answer", fail)
    line = refused(libra("plan", write(pool), "--json"))
    assert "/some/file: Permission denied; check the path" in line


def test_a_killed_process_is_one_line(libra, write, pool, monkeypatch):
    def fail(*_):
        raise BrokenProcessPool("a trace")

    monkeypatch.setattr("megatron_libra.cli.app.plan_answer", fail)
    run = libra("plan", write(pool), "--json")
    assert run.code == 1 and run.err.count("\n") == 1
    assert "was killed" in run.err and "try fewer processes" in run.err


@pytest.mark.parametrize(
    ("arguments", "word", "end"),
    [
        (["plan"], "Missing argument 'POOL.json'", "; try libra plan --help."),
        (["plan", "a", "b"], "unexpected extra argument", " (b); try libra plan --help."),
        (["plan", "--jsn", "a"], "No such option: --jsn", "; try libra plan --help."),
        (["calibrate"], "Missing option '--out'", "; try libra calibrate --help."),
        (["verify", "a", "--seed", "-1"], "'-1'", "; try libra verify --help."),
        (["verify", "a", "--device", "tpu"], "'tpu'", "'cuda'; try libra verify --help."),
        (["bench", "plans", "--processes", "x"], "'x'", "; try libra bench plans --help."),
        (
            ["verify", "a", "--json=yes"],
            "'--json' does not take a value",
            "; try libra verify --help.",
        ),
        (["paln", "a"], "'paln'", ". Did you mean 'plan'? Try libra --help."),
        (["bench", "xyz"], "No such command 'xyz'", "; try libra bench --help."),
        (["--bogus"], "No such option: --bogus", "; try libra --help."),
    ],
)
def test_faults_of_the_arguments(libra, arguments, word, end):
    """The value, and the help of the command that was called."""
    message = refused(libra(*arguments))
    assert word in message
    assert message.endswith(end + "\n")


def test_a_group_without_a_command_shows_its_help(libra):
    for group in ([], ["bench"]):
        run = libra(*group)
        assert (run.code, run.err) == (0, "") and "Usage:" in run.out

"""Tables in a document, and that docs/results/planning.md holds what the code computes today."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_libra.bench.catalog import TABLES, table_specs
from megatron_libra.bench.document import read_rows, replace_table
from megatron_libra.bench.pools import BenchSet, file_set, preset_set
from megatron_libra.bench.table import Column, RowTask, TableSpec, compute_table
from megatron_libra.simulator.processes import TaskPool

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT = ROOT / "docs" / "results" / "planning.md"
LENGTHS = ROOT.parent / "shared" / "data"
OURS = "ours, B 2048 H 16, tau 0.01"
DISTCA = "DistCA's rule, re-implemented, tolerance 0.03"
CHUNKS = "equal chunks (MagiAttention's scope), re-implemented, 16 a worker"
SLICE = {
    "table-1": ["1M, 32, 8"],
    "figure-4": ["1M, 64"],
    "figure-8": ["1M, 8"],
    "figure-14": ["1M, 8"],
    "figure-15": ["256K, 16384, 1", "1M, 32768, 8"],
    "steps": ["1M, 8, 2"],
}
FILES = ("lengths_wlbllm.json", "lengths_prolong.json", "lengths_mooncake_conversation.json")


def row(first: int, second: int) -> tuple[float, int]:
    return first / second, second


EXAMPLE = TableSpec(
    "sums",
    "libra bench plans --table sums",
    "name",
    (Column("ratio", ".2f"), Column("count", ".0f", is_timing=True)),
    (RowTask("a", row, (1, 4)), RowTask("b", row, (3, 2))),
)


def test_a_table_goes_into_its_place_and_comes_out_again():
    text = "# Title\n\n<!-- table sums -->\n<!-- end -->\n\nafter\n"
    with TaskPool(1) as pool:
        table = compute_table(EXAMPLE, pool)
        assert compute_table(EXAMPLE, pool, keys=["b"]).texts == [["b", "1.50", "2"]]
        with pytest.raises(ValueError, match=r"sums has no row \['c'\]; it has a, b"):
            compute_table(EXAMPLE, pool, keys=["c"])
    once = replace_table(text, "sums", table.markdown())
    assert once == replace_table(once, "sums", table.markdown()), "writing again changes nothing"
    assert once.startswith("# Title\n") and once.endswith("\n\nafter\n")
    assert "`libra bench plans --table sums`" in once
    assert read_rows(once, "sums") == {"a": ["0.25", "4"], "b": ["1.50", "2"]}
    with pytest.raises(ValueError, match="no place for table 'other'"):
        replace_table(text, "other", "")


def test_the_document_is_whole():
    text = DOCUMENT.read_text(encoding="ascii")
    sets = [preset_set("longtail-256k"), preset_set("longtail-1m"), *map(real_set, FILES)]
    for spec in table_specs(["all"], sets):
        rows = read_rows(text, spec.name)
        assert list(rows) == [task.key for task in spec.rows], spec.name
        assert {len(cells) for cells in rows.values()} == {len(spec.columns)}, spec.name
        assert f"`{spec.command}`" in text


@pytest.mark.parametrize("name", SLICE)
def test_the_document_holds_what_the_presets_give(name):
    check_rows(table_specs([name], [])[0], SLICE[name])


@pytest.mark.parametrize("name", ["longtail-256k", "longtail-1m"])
def test_the_document_holds_what_planners_do(name):
    check_rows(table_specs(["planners"], [preset_set(name)])[0], ["Ulysses", DISTCA, CHUNKS, OURS])


@pytest.mark.parametrize("file", FILES)
def test_the_document_holds_what_real_lengths_give(file):
    bench_set = real_set(file)
    if not (LENGTHS / file).exists():
        pytest.skip(f"{file} is not here; docs/results/planning.md says where it is from")
    check_rows(table_specs(["planners"], [bench_set])[0], ["Ulysses", DISTCA, CHUNKS, OURS])
    check_rows(table_specs(["targets"], [bench_set])[0], ["ours, B 2048 H 16", "floor"])


def real_set(file: str) -> BenchSet:
    return file_set(LENGTHS / file, is_upsampled=file == "lengths_wlbllm.json")


def check_rows(spec: TableSpec, keys: list[str]) -> None:
    """Compute some rows and compare every cell but times, to one unit of the last digit."""
    written = read_rows(DOCUMENT.read_text(encoding="ascii"), spec.name)
    with TaskPool(1) as pool:
        table = compute_table(spec, pool, keys=keys)
    for key, *texts in table.texts:
        for column, here, there in zip(spec.columns, texts, written[key], strict=True):
            assert column.is_timing or same(here, there), (
                spec.name,
                key,
                column.title,
                here,
                there,
            )


def same(here: str, there: str) -> bool:
    """Equal, or numbers that differ by one unit of the last digit."""
    if here == there:
        return True
    try:
        digits = len(here.rstrip("%").partition(".")[2])
        difference = abs(float(here.rstrip("%")) - float(there.rstrip("%")))
    except ValueError:
        return False
    return difference < 1.5 * 10**-digits


def test_unknown_tables_are_refused():
    with pytest.raises(ValueError, match="table 'figure-9' must be one of planners, targets"):
        table_specs(["figure-9"], [])
    assert len(TABLES) == len(set(TABLES))

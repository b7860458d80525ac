"""Launch configs of small-M products: the measured table, and which config a product takes."""

import sys

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.expected_time import tiles_at_a_time, tiles_of
from mxtensor.kernels.runtime.nvrtc import copy_size
from mxtensor.kernels.small_m import launch
from mxtensor.kernels.small_m.config import RESERVED, Gpu, layout_of, pipelined_bytes
from mxtensor.kernels.small_m.heuristics import (
    CLUSTERS_OF_AN_H100,
    COLUMNS,
    FALLBACK,
    ROWS,
    SHARED_BYTES,
    Measured,
    choose_config,
    gpu_of,
    groups_with_rows,
    measured_of,
    row_of,
    table,
)
from tests.helpers.small_m import DECODED, PERSISTENT, PERSISTENT_WIDE, PIPELINED, WGMMA

H100 = Gpu((9, 0), SHARED_BYTES[9, 0], 132, {2: 66, 4: 30})


def test_the_table_of_sm90_has_every_number_of_rows_and_its_configs_fit():
    lines = table((9, 0))
    assert {line.m for line in lines} == set(ROWS)
    for line in lines:
        assert layout_of(mx.FORMATS[line.format], line.config, line.m, line.n, line.k, H100)
        assert line.config.cols >= min(line.m, 128) or tiles_of(line.config, line.m, line.n) <= tiles_at_a_time(
            line.config, H100
        )
        assert line.config.wr * line.config.wk in (4, 8, 12, 16)


def test_an_unknown_gpu_takes_configs_that_fit_it():
    assert table((12, 0)) == table((10, 0)) == table((8, 0)) == table((9, 0))
    cpu = torch.device("cpu")
    assert gpu_of(cpu) == Gpu((9, 0), SHARED_BYTES[9, 0], 132, CLUSTERS_OF_AN_H100)
    for m, k in ((1, 4096), (40, 14336), (64, 77)):
        config = choose_config(
            cpu, mx.FORMATS["mxfp8"], m, 4096, k, m, lambda config, k=k: not config.wgmma or k % 128 == 0
        )
        assert layout_of(mx.FORMATS["mxfp8"], config, m, 4096, k, gpu_of(cpu))
    smallest = max(pipelined_bytes(f, FALLBACK, 1, 65536) for f in DECODED.values())
    assert smallest <= min(SHARED_BYTES.values()) // 2


def test_rows_that_were_not_measured_take_the_config_of_the_next_larger_number():
    def of(m, k=4096, **options):
        return choose_config(torch.device("cpu"), mx.FORMATS["mxfp8"], m, 14336, k, m, **options)

    assert of(1) != of(2) != of(3) == of(4) != of(5) == of(8) != of(9) == of(16)
    assert of(17).cols >= 17 and of(33).cols >= 33 and of(128).wgmma
    few = of(2, 100_000)  # no block can store two rows of this length
    assert few in {line.config for line in table((9, 0)) if line.m > 2} and not few.whole_x


def test_rows_with_a_cast_take_the_config_measured_with_it_of_the_kind_that_is_fastest_without(monkeypatch):
    fast, of_casts = PERSISTENT._replace(stages=4), PERSISTENT._replace(stages=3)
    lines = [
        Measured("mxfp8_e4m3", False, 4, 4096, 4096, 2.0, fast),
        Measured("mxfp8_e4m3", True, 4, 4096, 4096, 2.5, of_casts),
    ]
    monkeypatch.setattr(sys.modules[choose_config.__module__], "table", lambda capability: lines)

    def of(m, casts):
        cpu, mxfp8 = torch.device("cpu"), mx.FORMATS["mxfp8"]
        return choose_config(cpu, mxfp8, m, 4096, 4096, m, lambda config: not config.direct, casts)

    assert (of(4, False), of(4, True)) == (fast, of_casts)
    lines.append(Measured("mxfp8_e4m3", False, 4, 4096, 4096, 1.9, WGMMA))
    assert of(4, False) == of(4, True) == WGMMA
    lines.append(Measured("mxfp8_e4m3", False, 8, 4096, 4096, 1.0, PIPELINED))
    assert of(8, False) == of(8, True) == PIPELINED


def test_up_to_eight_rows_limited_to_pipelined_take_the_configs_of_four():
    def of(m):
        cpu, mxfp4 = torch.device("cpu"), mx.FORMATS["mxfp4"]
        return choose_config(cpu, mxfp4, m, 14336, 4096, 8 * m, lambda config: config.kind == "pipelined")

    assert of(5) == of(8) == of(4) and of(8).cols == 8 and of(9).cols == 16


def test_a_row_with_other_columns_is_refused():
    row = dict(zip(COLUMNS, row_of(table((9, 0))[0]), strict=True))
    assert measured_of(row) == table((9, 0))[0]
    for wrong in ({"casts": 4}, {"k": 12.3}, {"unknown": 1}):
        with pytest.raises(
            ValueError, match=r"a row of a table of launch configs has the columns format, casts, m, .*"
        ):
            measured_of(row | wrong)
    del row["n"]
    with pytest.raises(ValueError, match=r"not \{'format': .* with python -m mxtensor\.report\.tune"):
        measured_of(row)


def test_configs_have_only_the_columns_that_the_activation_rows_need():
    def of(m, **options):
        return choose_config(torch.device("cpu"), mx.FORMATS["mxfp4"], m, 14336, 4096, m, **options)

    assert [of(m).cols for m in (65, 96, 97, 128, 160, 192)] == [96, 96, 128, 128, 160, 192]
    assert all(of(m).cols * -(-m // of(m).cols) - m < 32 for m in (257, 384, 500, 512))
    assert not of(512, allowed=lambda config: not config.wgmma).wgmma  # a config of fewer rows, used several times


@pytest.mark.parametrize(
    "rows, groups, found", [(8, 128, (8, 1)), (8, 64, (8, 1)), (4, 32, (4, 1)), (2, 8, (2, 1)), (512, 64, (64, 11)),
                            (128, 8, (8, 20)), (0, 8, (1, 1)), (5, 1, (1, 5))]
)  # fmt: skip
def test_rows_of_a_token_are_in_groups_of_their_own(rows, groups, found):
    assert groups_with_rows(rows, groups) == found


def test_the_config_of_groups_is_that_of_a_matrix_as_high_as_the_busy_ones():
    """Small matrices alone would divide K over blocks; 64 of them together fill the GPU."""
    device, kind = torch.device("cpu"), (torch.bfloat16,) * 3
    each = [launch.choose(device, mx.FORMATS["mxfp4"], kind, (rows, 2048, groups), (2048,), (0, 0, 0), None, None)
            for rows, groups in ((512, 64), (8, 0))]  # fmt: skip
    assert each[0].config.split == 1 < each[1].config.split * each[1].config.wk


def test_groups_never_take_a_persistent_config(monkeypatch):
    lines = [line._replace(config=PERSISTENT) if i % 2 else line for i, line in enumerate(table((9, 0)))]
    monkeypatch.setattr(sys.modules[choose_config.__module__], "table", lambda capability: lines)
    for m in ROWS:
        config = choose_config(
            torch.device("cpu"), mx.FORMATS["mxfp8"], m, 4096, 4096, 8 * m, lambda config: not config.persistent
        )
        assert not config.persistent


def test_a_persistent_config_stores_the_sums_of_as_many_tiles_as_fit():
    f, x = mx.FORMATS["mxfp8"], PERSISTENT_WIDE._replace(mt=1, wk=8, slabs=4)
    whole, tight = layout_of(f, x, 16, 14336, 4096, H100), layout_of(f, x, 16, 28672, 4096, H100)
    assert whole.x_width == tight.x_width == 4096 and tight.bytes <= H100.memory
    assert 1 <= tight.round < 14 and whole.round <= 7  # a block has 14 and 7 tiles
    assert layout_of(f, x, 16, 4096, 14336, H100) is None  # 16 rows of 14336 need twice the memory
    assert layout_of(f, x._replace(split=4), 16, 4096, 14336, H100).x_width == 3584
    assert layout_of(f, x, 17, 4096, 4096, H100) is None  # more activation rows than columns
    alone = layout_of(f, PERSISTENT, 1, 4096, 4096, H100)
    assert 2 * (alone.bytes + RESERVED) > H100.memory + RESERVED  # a second block does not fit beside it


def test_clusters_that_a_device_cannot_run_do_not_fit():
    without = H100._replace(clusters={2: 66, 4: 0})
    for config in (PIPELINED, WGMMA, PERSISTENT):
        two, four = (layout_of(mx.FORMATS["mxfp8"], config._replace(split=n), 1, 4096, 4096, without) for n in (2, 4))
        assert two and not four
    assert layout_of(mx.FORMATS["mxfp8"], WGMMA._replace(split=4, reduce_global=True), 1, 4096, 4096, without)


def test_rows_are_copied_in_the_largest_pieces_that_their_alignment_allows():
    assert [copy_size(0, n) for n in (4096, 24, 20, 6, 33)] == [16, 8, 4, 2, 1]

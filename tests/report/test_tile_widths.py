"""Tiles that divide the rows of activations evenly: their widths, and which of them are worth timing."""

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.small_m.config import registers
from mxtensor.kernels.small_m.heuristics import gpu_of
from mxtensor.report.costs import even_tiles, pays_off, widths

GPU = gpu_of(torch.device("cpu"))


@pytest.mark.parametrize("rows", [16, 24, 48, 64, 96, 128, 192, 256, 384, 512])
def test_each_width_is_the_least_for_its_number_of_tiles(rows):
    found = widths(rows)
    assert found == sorted(set(found), reverse=True) and all(16 <= cols <= 256 and cols % 8 == 0 for cols in found)
    for cols in found:
        tiles, step = -(-rows // cols), 16 if cols > 32 else 8
        assert tiles * (cols - step) < rows <= tiles * cols


def test_512_rows_have_tiles_that_fill_a_gpu_for_5120_weight_rows():
    """40 x 3 tiles of 128 weight rows by 176 run on 120 of 132 multiprocessors; 40 x 2 of 256 on 80."""
    assert widths(512)[:3] == [256, 176, 128]


@pytest.mark.parametrize("format", ["mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [8, 16, 64, 96, 512])
def test_configs_have_the_registers_of_a_multiprocessor(format, rows):
    configs = list(even_tiles(mx.FORMATS[format], rows))
    assert any(c.direct for c in configs) is (rows >= 16) and any(not c.direct for c in configs) is (rows >= 96)
    for config in configs:
        r = registers(config)
        assert (
            max(r.at_start * config.threads, r.compute * (config.threads - 128) + r.load * 128) * config.blocks <= 65536
        )


def test_narrow_tiles_and_split_columns_are_for_small_weights():
    configs = {(c.cols, c.wr, c.split): c for c in even_tiles(mx.FORMATS["mxfp8"], 512) if not c.direct}
    wide, narrow, split = configs[256, 8, 1], configs[64, 8, 1], configs[128, 8, 4]
    assert pays_off(wide, 512, 28672, GPU) and not pays_off(wide, 512, 512, GPU)
    assert pays_off(narrow, 512, 2048, GPU) and not pays_off(narrow, 512, 28672, GPU)
    assert pays_off(split, 512, 768, GPU) and not pays_off(split, 512, 28672, GPU)

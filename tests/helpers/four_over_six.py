"""NVFP4 with four over six in numpy, whose float32 operations round once each; it shares no code with the package."""

import numpy as np

from tests.helpers.oracle import ELEMENTS, element_codes, element_values

E2M1, E4M3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]


def _candidate(blocks, amax, tensor_amax, largest, squares, multiple):
    """(error, values without the global scale) of blocks (R, rows, C, 16) if their amax becomes 6 / ``multiple``."""
    encode = largest / tensor_amax
    base = amax / np.float32(6) * encode * np.float32(multiple)
    scale = element_values(E4M3)[element_codes(np.minimum(base, np.float32(448)), E4M3)].astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        multiplier = np.minimum(1 / (scale * (1 / encode)), np.finfo(np.float32).max)
        scaled = blocks * multiplier
    values = element_values(E2M1)[element_codes(scaled, E2M1)].astype(np.float32) * scale
    difference = values * tensor_amax / largest - blocks
    each = difference * difference if squares else np.abs(difference)
    sums = each[..., 0]
    for i in range(1, 16):
        sums = sums + each[..., i]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[..., None], values


def rounded(x, rows, kind):
    """x (M, K) float32 as the values of its codes; ``rows`` of a block: 1 or 16, ``kind``: of ``FourOverSix``."""
    (m, k), tensor_amax = x.shape, np.abs(x).max()
    if not tensor_amax:
        return x
    padded = np.pad(x, ((0, -m % rows), (0, -k % 16)))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // 16, 16)
    amax = np.abs(blocks).max((1, 3), keepdims=True)
    largest = np.float32(6 * (448 if kind.value.endswith("448") else 256))
    given = blocks, amax, tensor_amax, largest, kind.value.startswith("mse")
    (six, values_of_six), (four, values_of_four) = (_candidate(*given, multiple) for multiple in (1, 1.5))
    values = np.where(four < six, values_of_four, values_of_six) * (tensor_amax / largest)
    return values.reshape(padded.shape)[:m, :k]

"""Every Triton kernel compiles for the devices it claims, to the expected instructions and without spills."""

import functools

import pytest

from tests.helpers import triton_targets
from tests.helpers.triton_targets import TARGETS, VARIANTS

pytest.importorskip("triton")
report = functools.cache(triton_targets.in_own_process)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [t for t in TARGETS if any(t in v.needs for v in VARIANTS)])
def test_kernels_compile_to_the_instructions_they_are_for_and_spill_nothing(target):
    rows = report(target)
    claimed = {v.name: v for v in VARIANTS if target in v.needs}
    assert rows.keys() == claimed.keys()
    missing = {name: set(v.needs[target]) - set(rows[name]["ptx_has"]) for name, v in claimed.items()}
    assert {name: words for name, words in missing.items() if words} == {}
    spilled = {name: rows[name] for name, v in claimed.items() if rows[name]["spills"] and target not in v.may_spill}
    assert spilled == {}


def test_block_scaled_products_are_claimed_for_tcgen05_and_for_mma_sync():
    claims = {
        (target, word) for v in VARIANTS if "dot_scaled" in v.name for target in v.needs for word in v.needs[target]
    }
    assert {(100, "tcgen05.mma"), (100, "block_scale"), (120, "mma.sync"), (120, "block_scale")} <= claims


def test_names_of_variants_are_unique():
    names = [v.name for v in VARIANTS]
    assert len(names) == len(set(names))

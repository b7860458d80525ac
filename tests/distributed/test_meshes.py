"""FSDP2 and tensor parallelism over two dimensions of a mesh: the results of ``mesh_cases.py``."""

import pytest

from tests.distributed.mesh_cases import CONFIGS, SHAPES
from tests.distributed.test_tensor_parallel import FLIPPED


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_weights_that_are_gathered_again_have_the_codes_and_scales_of_now(shape, config, ranks):
    for told in ranks("weights_gathered_twice_on_a_mesh"):
        assert max(told[shape, config]) < FLIPPED, told[shape, config]

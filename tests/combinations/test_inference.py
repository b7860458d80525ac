"""Inference in combinations: the logits of each step beside float64 and eager mode.

``test_training.py`` has the commands.
"""

import pytest

pytest.importorskip("transformers", minversion="5")

from tests.combinations.axes import inference
from tests.combinations.covering import id_of, sanitized
from tests.combinations.inference_case import check

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "freed_memory_is_nan"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.mark.exhaustive(quick=15)
@pytest.mark.parametrize("case", [c for c in inference(gpu=False) if c["way"] == "eager"], ids=id_of)
def test_batches_on_a_cpu(case, tmp_path):
    check(case, "cpu", tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [c for c in inference(gpu=False) if c["way"] != "eager"], ids=id_of)
def test_compiled_batches_on_a_cpu(case, tmp_path):
    check(case, "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("case", sanitized(inference(gpu=True)), ids=id_of)
def test_batches_on_a_gpu(case, tmp_path):
    check(case, "cuda", tmp_path)

"""Training in combinations: each step beside float64, eager mode and a plain optimizer.

    python -m pytest tests/combinations --suite all         all cases of a CPU
    python -m pytest -m gpu -n 8 tests/combinations         all cases of a CUDA device
    python -m tests.combinations.axes                       counts

Under compute-sanitizer, some 50 of them, eager and compiled, training and inference. Without the caching allocator
memory that was freed is known to be invalid:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
        python -m pytest -m "gpu and sanitized" tests/combinations

The id of a case names the value of each axis.
"""

import pytest

from tests.combinations.axes import training
from tests.combinations.covering import id_of, sanitized
from tests.combinations.training_steps import check

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "freed_memory_is_nan"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.mark.exhaustive(quick=20)
@pytest.mark.parametrize("case", [c for c in training(gpu=False) if c["way"] == "eager"], ids=id_of)
def test_steps_on_a_cpu(case):
    check(case, "cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [c for c in training(gpu=False) if c["way"] != "eager"], ids=id_of)
def test_compiled_steps_on_a_cpu(case):
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", sanitized(training(gpu=True)), ids=id_of)
def test_steps_on_a_gpu(case):
    check(case, "cuda")

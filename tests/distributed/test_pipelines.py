"""Pipelines of quantized stages train like one process: the results of ``pipeline_cases.py``."""

import pytest

from tests.distributed.pipeline_cases import RECIPES, SCHEDULES


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_stages_are_those_of_one_process(recipe, schedule, ranks):
    for told in ranks("pipelined"):
        assert told[recipe, schedule.__name__]

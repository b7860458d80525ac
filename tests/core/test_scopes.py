"""Blocks of every context manager that generators, threads and tasks leave in any order."""

import asyncio
import contextvars
import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.core.dispatch import is_strict
from mxtensor.core.explain import LOGS
from mxtensor.core.scopes import Scopes
from mxtensor.core.select import forced_kernel, is_observed
from mxtensor.te.contexts import model_init
from mxtensor.training.autocast import autocast_state

RECIPES = [mx.recipe.MXFP8BlockScaling(), mx.recipe.Float8CurrentScaling(), mx.recipe.MXFP4BlockScaling()]
KERNELS = ["emulated", "dequant", "scaled_mm"]
LOG_OF = {}
"""Index of a block of explain() -> its log."""


def logged(index):
    with mx.explain() as log:
        LOG_OF[index] = log
        yield


def entered(manager):
    def block(index):
        with manager(index):
            yield

    return block


CONTEXTS = {
    # name: a generator function that is suspended inside the block; what is found inside, and what should be
    "strict": (entered(lambda i: mx.strict()), lambda i: (is_strict(), True)),
    "explain": (logged, lambda i: (LOGS.get(), LOG_OF[i])),
    "kernels": (entered(lambda i: mx.kernels(KERNELS[i])), lambda i: (forced_kernel(), KERNELS[i])),
    "autocast": (
        entered(lambda i: mx.autocast(recipe=RECIPES[i])),
        lambda i: (autocast_state() and autocast_state().recipe, RECIPES[i]),
    ),
    "model_init": (
        entered(lambda i: te.quantized_model_init(recipe=RECIPES[i])),
        lambda i: (model_init().linear_recipe, RECIPES[i].linear_recipe()),
    ),
}
OUTSIDE = {
    "strict": lambda: not is_strict(),
    "explain": lambda: LOGS.get() is None,
    "kernels": lambda: forced_kernel() is None and not is_observed(),
    "autocast": lambda: autocast_state() is None and not torch.overrides._get_current_function_mode_stack(),
    "model_init": lambda: model_init().linear_recipe is None,
}


def start(name, index):
    generator = CONTEXTS[name][0](index)
    next(generator)
    return generator


def holds(name, index):
    found, wanted = CONTEXTS[name][1](index)
    return found is wanted or found == wanted


@pytest.mark.parametrize("name", CONTEXTS)
def test_generators_may_be_closed_in_any_order(name):
    for order in itertools.permutations(range(3)):
        generators = {index: start(name, index) for index in range(3)}
        still = [0, 1, 2]
        for index in order:
            assert holds(name, still[-1])
            generators[index].close()
            still.remove(index)
        assert OUTSIDE[name](), order


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_generator_may_be_closed_in_another_context_and_thread(name):
    generator = start(name, 0)
    contextvars.Context().run(generator.close)  # a ContextVar's token would raise here
    assert OUTSIDE[name]()

    generator, failed = start(name, 1), []

    def close():
        try:
            generator.close()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert failed == [] and not holds(name, 1)
    while torch.overrides._get_current_function_mode_stack():  # no other thread can take it from here; it has no effect
        torch.overrides._pop_mode()
    assert OUTSIDE[name]()


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_generator_that_is_dropped_in_a_task_leaves_its_block(name):
    async def main():
        generator = start(name, 0)

        async def drop():
            assert name in ("autocast", "model_init") or holds(name, 0)
            generator.close()

        await asyncio.create_task(drop())
        return OUTSIDE[name]()

    assert asyncio.run(main())


def test_autocast_leaves_the_modes_of_others_where_they_are():
    """A mode is taken from below another one, which torch would have removed in its place."""
    generator = start("autocast", 0)
    with torch.device("meta"):
        generator.close()
        assert autocast_state() is None and torch.empty(1).is_meta
    assert not torch.empty(1).is_meta and not torch.overrides._get_current_function_mode_stack()


def test_a_layer_runs_as_the_blocks_that_are_open_say():
    layer, x = nn.Linear(64, 32), torch.randn(4, 64)
    plain = layer(x)
    with mx.autocast(recipe=RECIPES[0]):
        quantized = layer(x)
    first, second = start("autocast", 0), start("autocast", 2)
    first.close()
    assert not torch.equal(layer(x), plain) and not torch.equal(layer(x), quantized)
    second.close()
    assert torch.equal(layer(x), plain)


def test_two_generators_that_alternate_forever_reference_two_scopes():
    scopes, seen, before = Scopes("test", 0), [], None
    for i in range(50):
        scope = scopes.enter(i)
        if before is not None:
            scopes.leave(before)
        before = scope
        chain = scope
        while chain is not None:
            seen.append(chain.open)
            chain = chain.before
        assert scopes.get() == i
    assert len(seen) == 50 and all(seen)
    scopes.leave(before)
    assert scopes.get() == 0 and scopes.latest() is None


def test_a_scope_that_was_left_elsewhere_is_dropped_at_the_next_look():
    class Value:
        pass

    scopes, value = Scopes("test", None), Value()
    alive, scope = weakref.ref(value), scopes.enter(value)
    contextvars.Context().run(scopes.leave, scope)
    del scope, value
    assert scopes.get() is None
    gc.collect()
    assert alive() is None

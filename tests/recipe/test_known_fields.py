"""Recipes and configs refuse attributes that they do not have; copies, pickles and subclasses work."""

import copy
import pickle
from dataclasses import dataclass, fields, replace

import pytest

import mxtensor as mx
from mxtensor.ao.quantize import CONFIGS as BY_NAME
from mxtensor.recipe import RECIPES, MXFP8BlockScaling, NVFP4BlockScaling
from mxtensor.recipe.linear_recipe import KernelPreference

CONFIGS = [kind for kind in BY_NAME.values() if hasattr(kind, "linear_recipe")]
KINDS = [*RECIPES, mx.MXFP8Config, *CONFIGS]


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_attributes_are_refused(kind):
    made = kind()
    before = dict(vars(made))
    for name in ("amax_epsilonn_", "nonsense", "linear_recipe", "nvfp4_"):
        with pytest.raises(
            AttributeError, match=f"{kind.__name__} has no field '{name}'; (its fields are|did you mean)"
        ):
            setattr(made, name, 1)
    for field in fields(kind):
        with pytest.raises(AttributeError, match=f"has no field '{field.name}x'; did you mean '{field.name}'\\?"):
            setattr(made, f"{field.name}x", 1)
        setattr(made, field.name, getattr(made, field.name))
    assert vars(made) == before


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_are_equal(kind):
    made = kind()
    for same in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)):
        assert type(same) is kind and same == made and same.linear_recipe() == made.linear_recipe()


def test_the_messages():
    recipe = NVFP4BlockScaling()
    with pytest.raises(AttributeError) as error:
        recipe.fp4_quant_fwd_inp = None
    assert str(error.value).startswith(
        "NVFP4BlockScaling has no field 'fp4_quant_fwd_inp'; its fields are backward_override"
    )
    with pytest.raises(AttributeError) as error:
        recipe.disable_rth = True
    assert str(error.value) == "NVFP4BlockScaling has no field 'disable_rth'; did you mean 'disable_rht'?"


def test_a_subclass_has_fields_of_its_own():
    @dataclass(repr=False)
    class WithField(MXFP8BlockScaling):
        tag: str = "a"

    class WithAttribute(MXFP8BlockScaling):
        tag = "a"
        later: str

        @property
        def shout(self):
            return self.tag.upper()

        @shout.setter
        def shout(self, value):
            self.tag = value.lower()

    for kind in (WithField, WithAttribute):
        made = kind()
        made.tag = "b"
        assert made.tag == "b" and made.linear_recipe() == kind().linear_recipe()
        with pytest.raises(AttributeError, match="did you mean 'tag'"):
            made.tagg = "c"
    made = WithAttribute()
    made.later, made.shout, made._private = "x", "LOUD", 3
    assert (made.later, made.tag, made._private) == ("x", "loud", 3)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if hasattr(kind, "kernel_preference")])
def test_configs_can_be_changed(kind):
    config = kind()
    config.kernel_preference = "emulated"
    assert config.linear_recipe().kernel_preference is KernelPreference.EMULATED

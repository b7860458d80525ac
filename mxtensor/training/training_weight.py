"""TrainingWeight: a high-precision parameter that carries the recipe of its linear layer.

To optimizers, hooks, clipping and initialization it is an ordinary parameter: every op runs on the tensor inside, and
results that are not views or copies of it are plain tensors. Only functions that multiply by a weight reach a rule of
WEIGHT_FUNCTIONS first, and run quantized.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..core.autograd import count_writes, mode_of_views
from ..core.compat import (
    disable_subclass_torch_function,
    in_backward,
    local_of,
    make_wrapper_subclass,
    return_and_correct_aliasing,
    tree_flatten,
    tree_map_only,
)
from ..core.compat_compile import hook_tangents
from ..core.compat_hooks import filler, hook_staging, let_optimizers_take, let_weights_answer
from ..core.dispatch import is_strict, written
from ..core.explain import record
from ..core.fingerprint import compilation_state
from ..core.kernel import Spec
from ..core.scopes import Scopes
from ..core.tracing import is_traced
from ..core.when_imported import PENDING, after_import, install_pending, when_imported
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.assigned import Hidden, must_be_assigned
from ..tensor.attributes import KeepsAttributes, parameter_of, refuse_attributes, set_attributes, user_attributes
from ..tensor.fsdp import Gathered, Shard, gathered_operands, hook, local_part, refilled, shard_of
from ..tensor.graph_attributes import tell_dynamo
from ..tensor.mxtensor import MXTensor
from .delayed_scaling import GATHERS, OWNER, STATE, delayed_states, with_states
from .gathered_weight import Agreement, gathered_values, high_precision_inputs, quantized_inputs, refusal

# ------------------------------------------------------------------------------------------ products that no rule reads

# The rules of ``interception.py`` see torch functions. A class of the input that turns torch functions off inside its
# own, and functions without a rule (``torch.inner``), lead to aten products that reach ``__torch_dispatch__``, which
# runs them with the high-precision values: ``explain()`` logs them, ``strict()`` refuses them.

aten = torch.ops.aten
PRODUCTS = {
    getattr(packet, overload)
    for packet in (
        aten.mm, aten.addmm, aten.linear, aten.matmul, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten._grouped_mm,
    )
    for overload in ("default", "out")
    if overload in packet.overloads()
}  # fmt: skip
"""aten ops that multiply matrices."""
REASON = "torch's function is not a linear layer, or a class of the input turns torch functions off"


class Seen(Enum):
    """What the rules of torch functions know of the product that is running."""

    NOT = "nothing"
    UNREAD = "it is not a linear layer"
    NOTED = "it is logged, or in high precision because the user wants it"


SEEN = Scopes("seen", Seen.NOT)


def note_product(func: Any, weights: Sequence[Tensor], args: Any) -> None:
    """Log an aten product by a weight that trains, in high precision; NotImplementedError inside ``strict()``.

    ``weights``: the weights among the arguments; ``args``: the plain arguments. Not a product of two weights, as when
    an adapter is merged, one of a backward pass, and one that is traced.
    """
    if func not in PRODUCTS or len(weights) > 1 or SEEN.get() is Seen.NOTED or in_backward():
        return
    values: Tensor = weights[0].high_precision  # type: ignore[attr-defined]
    if is_traced(values):
        return
    if is_strict():
        raise NotImplementedError(
            f"{func} would multiply by a weight {tuple(values.shape)} in high precision ({REASON}), which mx.strict() "
            "forbids; use F.linear or x @ weight.t(), with an input x.as_subclass(torch.Tensor)"
        )
    others = [t for t in args if isinstance(t, Tensor) and t is not values and t.dim() > 1]
    x = others[0] if others else values
    spec = Spec(str(func), (tuple(x.shape), tuple(values.shape)), (x.dtype, values.dtype), x.dtype, x.device, False)
    record(spec, "high precision", {"quantized": REASON})


# ---------------------------------------------------------------------------------------------- weights inside DTensors

# torch decomposes a product of DTensors without a call of the class of what is inside, so that the recipe of a weight
# would not apply: an error. The styles of ``mx.parallel`` compute with the local tensors.


def mark_parameters(kind: type[Tensor]) -> None:
    """Mark local tensors of class ``kind`` of every DTensor that becomes a parameter of a module, by ``in_dtensor``."""

    def mark(module: nn.Module, name: str, parameter: Any) -> None:
        local = local_of(parameter)
        if local is not parameter and isinstance(local, kind):
            local.in_dtensor = True  # type: ignore[attr-defined]

    register_module_parameter_registration_hook(mark)


def refuse_product(func: Any, weights: list[Any]) -> None:
    """Raise RuntimeError if ``func``, an aten op, multiplies by a weight inside a DTensor."""
    if len(weights) > 1 or not weights[0].in_dtensor or func not in PRODUCTS:
        return
    if SEEN.get() is not Seen.NOT or in_backward():
        return
    raise RuntimeError(
        f"torch would multiply by a weight {tuple(weights[0].shape)} of a DTensor in high precision: it decomposes the "
        "product before the recipe applies; use mx.parallel.ColwiseParallel and RowwiseParallel instead of torch's "
        "styles, or leave a weight that is not split a plain parameter"
    )


# ---------------------------------------------------------------------------------------------- training weight

WEIGHT_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""torch function -> rule(func, args, kwargs); ``interception.py`` fills it."""

WEIGHT_RESULTS = {
    aten.clone.default, aten.copy_.default, aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default,
    aten._pin_memory.default, aten._to_copy.default,
}  # fmt: skip
"""Ops whose results are TrainingWeights, as are those of all views: modules, FSDP2 and hooks call them on a parameter
without computing with it."""
SHAPES = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.rand_like.default,
    aten.randn_like.default, aten.is_pinned.default,
}  # fmt: skip
"""Ops that do not read the values of the weight."""
INSIDE = {
    Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__format__,
    Tensor.apply_, Tensor.map_, Tensor.map2_,
}  # fmt: skip
"""Functions of the values themselves: torch refuses them for a wrapper, which has no memory, or crashes."""


class TrainingWeight(KeepsAttributes):
    """A wrapper around ``high_precision``, with the same shape, strides, dtype and device, and a ``linear_recipe``.

    A shard of FSDP2 has a ``shard``. While FSDP2 has gathered codes, the tensor inside is an MXTensor: the weight then
    serves the products of its layer only, and ops that would compute with its values raise NotImplementedError.
    """

    high_precision: Tensor
    linear_recipe: LinearRecipe
    shard: Shard | None
    agreement: Agreement
    """Shared with the weight that this is a shard, a view or a copy of."""
    in_dtensor = False
    """Whether this is the local tensor of a DTensor, or comes from it."""
    refilled = False
    """Whether FSDP2 frees the values and fills them anew, which torch counts as no write."""

    @staticmethod
    def __new__(
        cls, high_precision: Tensor, /, linear_recipe: LinearRecipe | None = None, shard: Shard | None = None,
        **attributes: Any,
    ) -> TrainingWeight:  # fmt: skip
        if isinstance(high_precision, TrainingWeight):
            return parameter_of(high_precision, attributes.pop("requires_grad", False), attributes)
        if not isinstance(high_precision, Tensor) or not isinstance(linear_recipe, LinearRecipe):
            raise TypeError(
                "TrainingWeight takes a tensor and a LinearRecipe, not "
                f"{type(high_precision).__name__} and {type(linear_recipe).__name__}; mx.quantize_(module, recipe) "
                "makes one of each weight, after its values are loaded"
            )
        if attributes:
            refuse_attributes("TrainingWeight", attributes)
        self: TrainingWeight = make_wrapper_subclass(
            cls,
            high_precision.size(),
            strides=high_precision.stride(),
            storage_offset=high_precision.storage_offset(),
            dtype=high_precision.dtype,
            layout=high_precision.layout,
            device=high_precision.device,
            pin_memory=high_precision.is_pinned(),
            requires_grad=high_precision.requires_grad,
        )
        # Under torch.compile a needless detach would hide from AOTAutograd that an optimizer writes into its input.
        self.high_precision = high_precision.detach() if high_precision.requires_grad else high_precision
        self.linear_recipe, self.shard, self.agreement = linear_recipe, shard, Agreement()
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"TrainingWeight({self.linear_recipe}, {self.high_precision!r})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[LinearRecipe, Shard | None]]:
        if PENDING:
            install_pending()
        return ["high_precision"], (self.linear_recipe, self.shard)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> TrainingWeight:
        return TrainingWeight(inner["high_precision"], *context)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = WEIGHT_FUNCTIONS.get(func)
        if rule is not None:
            return rule(func, args, kwargs or {})
        if func in INSIDE and isinstance(args[0], TrainingWeight):
            return func(args[0].high_precision, *args[1:], **(kwargs or {}))
        with disable_subclass_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not func._schema.returns:
            return _write(func, args, kwargs or {})
        weights: list[TrainingWeight] = []

        def inside(weight: TrainingWeight) -> Tensor:
            weights.append(weight)
            return weight.high_precision

        def outside(values: Tensor) -> TrainingWeight:
            if isinstance(weights[0].high_precision, MXTensor) and not isinstance(values, MXTensor):
                _refuse_values(func, weights[0])
            out = TrainingWeight(values, weights[0].linear_recipe, _shard_of(values, weights[0], func))
            out.agreement = weights[0].agreement
            if weights[0].in_dtensor:
                out.in_dtensor = True
            if weights[0].refilled:
                out.refilled = True
            return _with_states(out, weights[0], func)  # type: ignore[no-any-return]

        plain_args, plain_kwargs = tree_map_only(TrainingWeight, inside, (args, kwargs or {}))
        refuse_product(func, weights)
        note_product(func, weights, plain_args)
        gathers = func in GATHERS and isinstance(args[0], TrainingWeight) and _gives_matrices(args)
        gives_weights = gathers or func in WEIGHT_RESULTS or func.is_view
        if not gives_weights and func not in SHAPES:
            for weight in weights:
                if isinstance(weight.high_precision, MXTensor):
                    _refuse_values(func, weight)
        with mode_of_views(func, weights[0]):
            out = func(*plain_args, **plain_kwargs)
            if gives_weights:
                out = tree_map_only(Tensor, outside, out)
            return return_and_correct_aliasing(func, args, kwargs or {}, out)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingWeight:
        if id(self) not in memo:
            copied = _rebuild(self.high_precision.clone(), self.linear_recipe, self.requires_grad, is_parameter(self))
            copied.shard, copied.agreement = self.shard, self.agreement  # type: ignore[attr-defined]
            memo[id(self)] = _with_states(copied, self, aten.clone.default)
            if not is_parameter(self):
                set_attributes(copied, copy.deepcopy(user_attributes(self), memo))
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        outer = (self.linear_recipe, self.requires_grad, is_parameter(self))
        return _rebuild, (self.high_precision, *outer, delayed_states(self), user_attributes(self))

    def _stable_hash_for_caching(self) -> str:
        outer = (self.dtype, tuple(self.shape), self.stride(), str(self.device), self.requires_grad)
        values = self.high_precision  # codes while FSDP2 has gathered them
        inside = values._stable_hash_for_caching() if isinstance(values, MXTensor) else type(values).__name__
        key = (*compilation_state(), self.linear_recipe.key, outer, inside, self.shard)
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()

    @cached_property
    def fsdp_pre_all_gather(self) -> Callable[..., Any]:
        """FSDP2 calls it for the tensors to gather: codes and scales, or values with the reason in ``explain()``.

        FSDP2 counts the parameters of the hook. With one parameter, shards of any length may give tensors of any shape.
        With five, the tensor must have the padded shape, and the dtype of a mixed-precision policy is passed. FSDP2
        reads this attribute four times a gather.
        """
        reason, given = refusal(self.linear_recipe, self.shard), (self.high_precision, self.linear_recipe)
        if reason is None and self.shard is not None:
            return hook(quantized_inputs, *given, self.agreement, self.shard)
        return hook(high_precision_inputs, *given, self.agreement, self.shard, reason or "")

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], gathered: Gathered, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[TrainingWeight, tuple[Tensor, ...]] | None:
        """The whole weight over the gathered tensors, and those that FSDP2 frees and fills between uses."""
        if out is not None:  # a weight over these tensors, which FSDP2 has filled again
            out = local_part(out)
            inside = values_of(out)
            if isinstance(inside, MXTensor):
                inside._rowwise, inside._columnwise = refilled((inside._rowwise, inside._columnwise), outputs, gathered)
            setattr(out, OWNER, self)  # FSDP2 may have another shard since, as after load_state_dict(assign=True)
            return None
        if not gathered.quantized:
            out_values = TrainingWeight(gathered_values(outputs, gathered, dtype), self.linear_recipe)
            out_values.refilled = True
            out_values.in_dtensor = self.in_dtensor
            setattr(out_values, OWNER, self)
            return out_values, outputs
        cast = self.linear_recipe.weight.rowwise
        assert cast is not None
        recipe = LinearRecipe.inference(cast, cast, self.linear_recipe.kernel_preference)
        whole = MXTensor(*gathered_operands(outputs, gathered), recipe, dtype, gathered.whole, checked=True)
        out_codes = TrainingWeight(whole, self.linear_recipe)
        out_codes.in_dtensor = self.in_dtensor
        return out_codes, outputs

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, kind: type | None = None) -> Tensor | None:
        """AOTAutograd's question for a gradient of a graph: the values, where it expects a plain tensor."""
        return self.high_precision if kind is Tensor else None

    def share_memory_(self) -> TrainingWeight:
        """Move the values to shared memory (torch's own method needs a storage, which a wrapper lacks)."""
        self.high_precision.share_memory_()
        return self

    def is_shared(self) -> bool:
        return bool(self.high_precision.is_shared())


let_optimizers_take(TrainingWeight)


def values_of(weight: Tensor) -> Tensor:
    """The high-precision values of a TrainingWeight; any other tensor itself."""
    return weight.high_precision if isinstance(weight, TrainingWeight) else weight


def is_parameter(t: Tensor) -> bool:
    """Whether a module would register ``t``."""
    return isinstance(t, torch.nn.Parameter)


def _rebuild(
    values: Tensor, linear_recipe: LinearRecipe, requires_grad: bool, parameter: bool,
    states: dict[str, Any] | None = None, attributes: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    interception = import_module(".interception", __package__)  # fills WEIGHT_FUNCTIONS in a process that unpickles
    if type(requires_grad) is not bool or type(parameter) is not bool:
        raise TypeError(f"requires_grad and parameter must be bool, got {requires_grad!r:.80} and {parameter!r:.80}")
    for name, state in (states or {}).items():
        if not (name.startswith(STATE) and isinstance(state, interception.DelayedState)):
            raise TypeError(f"the state of a TrainingWeight must be a DelayedState, got a {type(state).__name__}")
    out: Tensor = TrainingWeight(values, linear_recipe)
    out = torch.nn.Parameter(out, requires_grad) if parameter else out.requires_grad_(requires_grad)
    for name, state in (states or {}).items():
        setattr(out, name, state)
    return set_attributes(out, attributes or {})  # type: ignore[no-any-return]


def _with_states(out: Tensor, weight: TrainingWeight, func: Any) -> Any:
    """``with_states``, where histories may be: in delayed scaling, and with a gathered weight under ``autocast``."""
    if weight.linear_recipe.delayed is None and OWNER not in vars(weight):
        return out
    return with_states(out, weight, func)


def _shard_of(values: Tensor, weight: TrainingWeight, func: Any) -> Shard | None:
    """The Shard of a result. FSDP2 makes a shard's buffer by ``new_zeros`` of the whole weight, in the padded shape."""
    if func is not aten.new_zeros.default:
        return weight.shard
    return shard_of(weight.shard, tuple(weight.shape), tuple(values.shape))


def _write(func: Any, args: Any, kwargs: Any) -> None:
    """An op without results, such as those by which optimizers write many weights at a time."""

    def inside(t: Any) -> Any:
        if not isinstance(t, TrainingWeight):
            return [*map(inside, t)] if isinstance(t, (list, tuple)) else t
        if isinstance(t.high_precision, MXTensor):
            _refuse_values(func, t)
        return t.high_precision

    func(*map(inside, args), **{key: inside(value) for key, value in kwargs.items()})
    count_writes(func, (t for t in tree_flatten(written(func, args, kwargs))[0] if isinstance(t, TrainingWeight)))


def _gives_matrices(args: Any) -> bool:
    """Whether ``index`` or ``index_select`` gives whole matrices of a stack."""
    stack, where = args[:2]
    return stack.dim() > 2 and (len(where) == 1 if isinstance(where, (list, tuple)) else where == 0)


def _refuse_values(func: Any, weight: TrainingWeight) -> NoReturn:
    """Raise for an op that would compute with the values of a weight that FSDP2 has gathered in codes."""
    raise NotImplementedError(
        f"{func} of a weight {tuple(weight.shape)} that FSDP2 has gathered in the codes of {weight.linear_recipe}: its "
        "high-precision values are in the shards; use the sharded parameter, or a recipe with quantized_gather=False"
    )


def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    """``weight.data = values``: torch exchanges the outer tensor, and this rule the tensor inside."""
    weight, value = args
    values = getattr(value, "high_precision", value).detach()
    values = values.dequantize() if isinstance(values, MXTensor) else values
    with disable_subclass_torch_function():
        func(weight, TrainingWeight(values, weight.linear_recipe))
    weight.high_precision = values
    weight.__dict__.pop("fsdp_pre_all_gather", None)  # it is bound to the old values


def _address(func: Any, args: Any, kwargs: Any) -> int:
    """``weight.data_ptr()``: the address of the tensor inside. A wrapper has none, and torch would say 0 for each: but
    libraries such as accelerate tell parameters apart by it."""
    address: int = args[0].high_precision.data_ptr()
    return address


WEIGHT_FUNCTIONS[Tensor.data.__set__] = _set_data  # type: ignore[attr-defined]
WEIGHT_FUNCTIONS[Tensor.data_ptr] = _address


when_imported("torch._functorch._aot_autograd.input_output_analysis", lambda: hook_tangents(TrainingWeight, values_of))
tell_dynamo(TrainingWeight, {}, constants=("linear_recipe",))
after_import("torch.distributed.checkpoint._state_dict_stager", lambda: hook_staging(MXTensor, TrainingWeight))
after_import("torch.distributed.tensor", lambda: mark_parameters(TrainingWeight))
after_import("torch.nested._internal.nested_tensor", lambda: let_weights_answer(TrainingWeight, WEIGHT_FUNCTIONS))


# ---------------------------------------------------------------------------------------------- conversions by a module


class AssignedWeight(TrainingWeight):
    """A TrainingWeight for ``nn.Module._apply`` alone: see ``tensor/assigned.py``."""

    __tensor_unflatten__ = Hidden()


def _converted(func: Any, args: Any, kwargs: Any) -> Any:
    """``weight.half()`` and the like: a weight in another dtype or on another device."""
    with disable_subclass_torch_function():
        out = func(*args, **kwargs)
    if filler() != "_apply" or type(args[0]) is not TrainingWeight or not must_be_assigned(args[0], out):
        return out
    return AssignedWeight(out.high_precision, out.linear_recipe)


CONVERSIONS = dict.fromkeys(
    (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type),
    _converted,
)
"""torch function -> rule: a conversion by the module while a weak reference to the weight lives."""


WEIGHT_FUNCTIONS.update(CONVERSIONS)

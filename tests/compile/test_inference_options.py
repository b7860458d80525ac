"""Products of one input by several weights become one call in a compiled graph: the pass, and its results."""

from operator import getitem
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.ir import NonOwningLayout
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

import mxtensor as mx
from mxtensor.compile import defaults
from mxtensor.compile.graph import ONE, SHARED
from mxtensor.compile.inference_options import Products
from tests.helpers import cuda_on_cpu

pytestmark = [
    pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("cuda_sources_on_the_cpu"),
]


def one(x, w, out=torch.bfloat16, cast="", bias=None):
    data, scale, global_scale, format = w
    return ONE(x, data, scale, format, x.shape[1], None, global_scale, bias, None, 1.0, 1.0, out, cast, "rceil")


def weights(*rows, format="mxfp4", k=512):
    made = [mx.quantize(torch.randn(n, k), format).rowwise for n in rows]
    return [(w.data.view(torch.uint8), w.scale.view(torch.uint8), w.global_scale, w.format.name) for w in made]


def calls(graph):
    """The number of weights of each product."""
    products = [node for node in graph.nodes if node.target in (ONE, SHARED)]
    return [len(node.kwargs["data"]) if node.target is SHARED else 1 for node in products]


def shared(f, *inputs):
    """The traced function after the pass, and the number of weights of each product."""
    traced = make_fx(f, tracing_mode="fake")(*inputs)
    Products()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced, calls(traced.graph)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_products_of_one_input_are_one_call(rows, format):
    def attention(x, q, k, v, bias):
        a = one(x.reshape(-1, 512), q, torch.float32).sin()
        k = k[0].permute(0, 1), *k[1:]
        b, c = (one(x.reshape(-1, 512), w, torch.float32, bias=added) for w, added in ((k, None), (v, bias)))
        return a, b, c * a.mean()

    inputs = torch.randn(rows, 512).bfloat16(), *weights(48, 16, 32, format=format), torch.randn(32).bfloat16()
    traced, found = shared(attention, *inputs)
    assert found == [3]
    for y, expected in zip(traced(*inputs), attention(*inputs), strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)  # sums in another order


@pytest.mark.parametrize(
    ("rows", "dtype", "kernels"),
    [
        (1, torch.bfloat16, ["persistent"]),
        (40, torch.float16, ["activations", "wgmma"]),
        (40, torch.bfloat16, ["wgmma"]),
    ],
)
def test_a_merged_call_is_one_launch_and_prepares_its_activations_at_most_once(rows, dtype, kernels, kernels_launched):
    data, scale, global_scale, names = zip(*weights(48, 16, 32), strict=True)
    SHARED(torch.randn(rows, 512).to(dtype), data, scale, names[0], 512, None, global_scale, [None] * 3, 1.0, 1.0,
           dtype, "", "")  # fmt: skip
    assert [name for name, _ in kernels_launched] == kernels


def test_products_of_other_inputs_dtypes_or_casts_are_not_merged():
    def f(x, z, q, k):
        return one(x, q), one(z, k), one(x, k, out=torch.float32), one(x, k, cast="mxfp4_e2m1")

    inputs = torch.randn(1, 512).bfloat16(), torch.randn(1, 512).bfloat16(), *weights(16, 16)
    assert shared(f, *inputs)[1] == [1] * 4


def test_a_product_whose_weight_is_computed_later_is_not_merged():
    def f(x, q, k, v):
        a = one(x, q)
        later = k[0] ^ (a.sum() > 0), *k[1:]
        return a, one(x, later), one(x, v)

    inputs = torch.randn(1, 512).bfloat16(), *weights(16, 16, 16)
    traced, found = shared(f, *inputs)
    assert found == [2, 1]
    (late,) = traced.graph.find_nodes(op="call_function", target=ONE)
    assert late.args[1].target is torch.ops.mxtensor.written.default  # a copy that no kernel overtakes
    assert late.args[2].op == "placeholder"
    call = next(node for node in traced.graph.nodes if node.target is SHARED)
    assert [user.target for user in call.users] == [getitem, getitem]
    for y, expected in zip(traced(*inputs), f(*inputs), strict=True):
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, on itself
def test_compiled_graphs_pass_inputs_with_their_strides():
    """Without the traced arguments of the op the compiler would choose other strides for x."""

    def f(h, q, k):
        x = h.transpose(1, 2).tanh().transpose(1, 2).reshape(-1, 512)
        return one(x, q), one(x, k)

    inputs = torch.randn(1, 2, 512).bfloat16(), *weights(16, 16)
    compiled = torch.compile(f, fullgraph=True, options=mx.inference_options())
    for y, expected in zip(compiled(*inputs), f(*inputs), strict=True):
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_this_torch_accepts_the_options():
    options = mx.inference_options()
    assert isinstance(options["post_grad_custom_pre_pass"], Products)
    layer = mx.quantize_(torch.nn.Linear(64, 32, bias=False).bfloat16(), "mxfp8-weight-only")
    x = torch.randn(2, 64).bfloat16()
    y = torch.compile(layer, options=options)(x)
    torch.testing.assert_close(y, layer(x))


WAIT, LAUNCH = TritonKernel.GDC_WAIT, TritonKernel.GDC_LAUNCH


class NopKernelSchedulerNode(SimpleNamespace):
    """A node of torch's scheduler that generates no kernel; the pass knows it by this name."""


def kernel_before(following, lines, the_pass, writes=("buf1",), enabled=True):
    """The lines of a kernel that torch's compiler generates before the nodes ``following``, with this pass.

    The graph returns ``buf7`` and has the input ``arg0``, which ``buf8`` writes; ``buf9`` is a place in another buffer.
    """
    Products()(make_fx(torch.neg)(torch.ones(2)).graph)
    current = SimpleNamespace(node=None, get_buffer_names=lambda: set(writes))
    code = SimpleNamespace(_lines=list(lines))
    places = {"buf9": SimpleNamespace(node=SimpleNamespace(layout=NonOwningLayout.__new__(NonOwningLayout)))}
    scheduler = SimpleNamespace(
        nodes=[SimpleNamespace(node=None), current, *following], current_node=current,
        mutation_real_name={"buf8": "arg0"}, name_to_buf=places,
    )  # fmt: skip
    graph = SimpleNamespace(scheduler=scheduler, get_output_names=lambda: ["buf7"], graph_input_names=["arg0"])
    kernel = SimpleNamespace(GDC_WAIT=WAIT, GDC_LAUNCH=LAUNCH, _enable_pdl_codegen=lambda: enabled)
    with V.set_graph_handler(graph), config.patch(post_grad_custom_pre_pass=the_pass):
        TritonKernel._filter_pdl(kernel, code)
    return code._lines


LINES = ["a", WAIT, "load", WAIT, LAUNCH, "load", WAIT, LAUNCH, 7, "store"]
USUAL = ["a", WAIT, "load", "load", LAUNCH, 7, "store"]
LATE = [WAIT, "a", "load", "load", LAUNCH, 7, "store"]
PRODUCT, OTHER = (SimpleNamespace(node=SimpleNamespace(op_overload=o)) for o in (ONE, torch.ops.aten.mm.default))


@pytest.mark.parametrize("op", [ONE, SHARED])
def test_a_product_may_start_as_soon_as_the_kernel_before_it(op):
    product = SimpleNamespace(node=SimpleNamespace(op_overload=op))
    nothing, unknown = NopKernelSchedulerNode(node=None), SimpleNamespace(node=None)
    for following in ([product], [nothing, product, OTHER]):
        assert kernel_before(following, LINES, Products()) == [LAUNCH, WAIT, "a", "load", "load", 7, "store"]
    for following in ([], [OTHER, product], [unknown, product]):
        assert kernel_before(following, LINES, Products()) == LATE


def test_every_kernel_waits_for_the_one_before_it():
    for following in ([PRODUCT], [OTHER]):
        assert kernel_before(following, ["a", "store"], Products()) == [WAIT, "a", "store"]  # and has no launch call
    assert kernel_before([PRODUCT], LINES, None) == USUAL  # a graph compiled without these options
    assert kernel_before([PRODUCT], ["a", "store"], Products(), enabled=False) == ["a", "store"]


@pytest.mark.parametrize("written", ["buf7", "buf8", "buf9"], ids=["a result", "an input", "a part of a result"])
def test_nothing_starts_before_what_is_read_after_the_graph_is_written(written):
    for following in ([PRODUCT], [OTHER], []):
        lines = kernel_before(following, LINES, Products(), writes=("buf1", written))
        assert lines == [WAIT, "a", "load", "load", 7, "store"]


def copies(f, *inputs):
    """The result of the compiled function, and the number of copies in each of its graphs, inner ones first."""
    found = []

    class Seen(Products):
        def __call__(self, graph):
            super().__call__(graph)
            graph.lint()
            found.append(len(graph.find_nodes(op="call_function", target=torch.ops.mxtensor.written.default)))

    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": Seen(), "fx_graph_cache": False}  # a cached graph does not run the pass
    return torch.compile(f, fullgraph=True, options=options)(*inputs), found


@pytest.mark.exhaustive(quick=1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("deep", [False, True])
def test_a_weight_computed_in_a_graph_is_written_before_a_nested_region_reads_it(deep):
    @torch.compiler.nested_compile_region
    def inner(x, data, scale):
        return one(x.tanh(), (data, scale, None, "mxfp4_e2m1"))

    @torch.compiler.nested_compile_region
    def outer(x, data, scale):
        return inner(x * 2, data.view(64, -1), scale)

    def f(x, data, scale, other):
        region = outer if deep else inner
        return region(x, data, scale), region(x, data ^ other, scale), x.float()

    ((data, scale, _, _),) = weights(64)
    inputs = torch.randn(2, 512).bfloat16(), data, scale, torch.tensor(8, dtype=torch.uint8)
    found, made = copies(f, *inputs)
    assert made[-1] == 1 and not any(made[:-1])
    for y, expected in zip(found, f(*inputs), strict=True):
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_weight_computed_in_a_graph_is_written_before_a_branch_reads_it():
    def f(x, data, scale, other):
        def product(x, data, scale):
            return one(x, (data, scale, None, "mxfp4_e2m1"))

        def nothing(x, data, scale):
            return x.new_zeros(2, 64)

        return torch.cond(x.sum() > 0, product, nothing, (x.tanh(), data ^ other, scale))

    ((data, scale, _, _),) = weights(64)
    inputs = torch.randn(2, 512).bfloat16().abs(), data, scale, torch.tensor(8, dtype=torch.uint8)
    found, made = copies(f, *inputs)
    assert made[-1] == 1 and not any(made[:-1])
    torch.testing.assert_close(found, f(*inputs), rtol=2e-2, atol=2e-2)


def test_products_are_merged_by_default_unless_that_is_turned_off_or_the_user_has_a_pass():
    weight = weights(16)[0]
    with_products = make_fx(lambda x, *w: one(x, w), tracing_mode="fake")(torch.randn(2, 512).bfloat16(), *weight)
    without = make_fx(torch.sin)(torch.randn(2))
    settings = defaults._settings(with_products)
    assert list(settings) == ["post_grad_custom_pre_pass", "combo_kernels"]
    assert isinstance(settings["post_grad_custom_pre_pass"], Products)
    with config.patch({"triton.cudagraphs": True}):
        assert list(defaults._settings(with_products)) == [*settings, "triton.enable_pdl"]
    assert defaults._settings(without) == {}
    with config.patch(post_grad_custom_pre_pass=Products()):
        assert defaults._settings(with_products) == {}
    layer, usual = mx.quantize(torch.randn(32, 32), "mxfp8"), mx.compile_passes
    key = layer._stable_hash_for_caching()
    try:
        usual(False)
        assert defaults._settings(with_products) == {} and layer._stable_hash_for_caching() != key
    finally:
        usual(True)
    assert defaults._settings(with_products)

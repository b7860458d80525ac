"""Rows sorted by expert and put back: each kernel gives the bits of the definition, in Triton's interpreter.

The definition itself is tested sorted_rowsst loops in tests/te/test_permutation.py.
"""

from dataclasses import replace

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te
from mxtensor.kernels.permute import choose_permutation, definition, triton_permute
from mxtensor.kernels.permute.triton_permute import choices_op, gather_op, merge_op
from mxtensor.kernels.runtime import triton_launch
from mxtensor.te import moe

TUPLES = ("CHOICES", "MASK", "CHUNKS", "GATHER", "MERGE", "SPREAD")
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CASES = {
    "some dropped": (9, 5, -3, False), "all": (9, 5, 0, False), "rows of none": (9, 5, 4, False),
    "padded": (9, 5, 0, True), "one token": (1, 3, 0, True), "no choice": (4, 2, 3, False),
    "many experts": (6, 70, 0, True),
}  # fmt: skip
"""(tokens, experts, rows beyond the choices, whether experts are padded)."""
interpreter = pytest.mark.usefixtures("interpreted", "one_rounding", "small")


@pytest.fixture
def small(monkeypatch):
    """Several programs, tiles and blocks to a few rows."""
    monkeypatch.setattr(triton_permute, "MOST_PROGRAMS", 3)
    monkeypatch.setattr(triton_permute, "ENTRIES", 64)
    monkeypatch.setattr(triton_permute, "BYTES", 64)


@pytest.fixture
def launches(triton_anywhere, monkeypatch):
    """The kernels take tensors on the CPU, where the interpreter runs them; the names of those that were launched."""
    names = []

    def launch(kernel, *rest):
        names.append(kernel.fn.__name__)
        triton_launch.launch(kernel, *rest)

    monkeypatch.setattr(triton_permute, "launch", launch)
    for name in TUPLES:
        kernels = getattr(choose_permutation, name)
        monkeypatch.setattr(choose_permutation, name, tuple(replace(k, device=None) for k in kernels))
    return names


def same(found, expected):
    """Whether tensors have the same bits; None equals None."""
    if found is None or expected is None:
        return found is expected
    kind = WORDS[expected.dtype.itemsize]
    return found.dtype is expected.dtype and torch.equal(
        found.contiguous().view(kind), expected.contiguous().view(kind)
    )


def routed(case):
    """A mask of experts, offsets or None, and the number of rows."""
    tokens, experts, more, padded = CASES[case]
    mask = torch.rand(tokens, experts) < (0.0 if case == "no choice" else 0.4)
    counts, offsets, rows = mask.sum(0), None, int(mask.sum()) + more
    if padded:
        sizes = (counts + 3) // 4 * 4
        offsets, rows = (sizes - counts).cumsum(0) - (sizes - counts), int(sizes.sum())
    return mask, offsets, rows


def values(*shape, dtype=torch.float32):
    """Random values with zeros of both signs."""
    x = torch.randn(shape)
    x.view(-1)[::7], x.view(-1)[3::7] = 0.0, -0.0
    return x.to(dtype)


# ---------------------------------------------------------------------------------------------- the kernels


@interpreter
@pytest.mark.parametrize("case", CASES)
def test_maps_of_masks_and_their_inverse(case):
    mask, offsets, rows = routed(case)
    expected = definition.rows_of_mask(mask, rows, offsets)
    for given in (mask, mask.to(torch.int32), mask.t().contiguous().t().to(torch.int64)):
        found = triton_permute.rows_of_mask(given, rows, offsets)
        assert all(map(same, found, expected))
    for row_id_map in (expected[0], expected[0].long()):
        assert same(triton_permute.choices_of_rows(row_id_map, rows, offsets), expected[1])


@interpreter
@pytest.mark.parametrize(
    ("sizes", "index", "spans", "rows"),
    [
        ([2, 0, 5, 4], [2, 0, 3, 1], None, 11), ([2, 0, 5, 4], [2, 0, 3, 1], None, 14), ([3], [0], None, 3),
        ([2, 0, 5, 4], None, [4, 0, 8, 4], 11), ([1] * 80, list(range(79, -1, -1)), None, 80),
    ],
)  # fmt: skip
def test_maps_of_chunks(sizes, index, spans, rows):
    tensors = [None if t is None else torch.tensor(t) for t in (sizes, index, spans)]
    out_rows = rows if spans is None else sum(spans)
    expected = definition.chunk_rows(*tensors, rows, out_rows)
    found = triton_permute.chunk_rows(*[t if t is None else t.int() for t in tensors], rows, out_rows)
    assert all(map(same, found, expected))
    by_hand = []
    for place, chunk in enumerate(index or range(len(sizes))):
        start = sum(sizes[:chunk])
        by_hand += range(start, start + sizes[chunk])
        by_hand += [-1] * (spans[place] - sizes[chunk] if spans else 0)
    by_hand += range(len(by_hand), out_rows)
    assert expected[0].tolist() == by_hand
    assert expected[1].tolist() == [by_hand.index(row) for row in range(rows)]


@interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["rows of none", "padded", "some dropped"])
def test_copies_sums_and_gradients(case, dtype):
    mask, offsets, rows = routed(case)
    (tokens, experts), cols = mask.shape, 37
    row_id_map, choices = definition.rows_of_mask(mask, rows, offsets)
    x, y, grad = values(tokens, cols, dtype=dtype), values(rows, cols, dtype=dtype), values(tokens, cols, dtype=dtype)
    probs, weights = torch.rand(tokens, experts).double(), values(tokens, experts)
    for given in (x, x.t().contiguous().t()):
        assert all(
            map(
                same,
                triton_permute.gather(given, choices, experts, probs),
                definition.gather(x, choices, experts, probs),
            )
        )
    for given_weights, of_rows in ((None, values(rows, dtype=dtype)), (weights, None), (weights.bfloat16(), None)):
        expected = definition.merge(y, row_id_map, offsets, given_weights, of_rows)
        assert all(map(same, triton_permute.merge(y, row_id_map, offsets, given_weights, of_rows), expected))
    for wants in ((True, True), (True, False), (False, True)):
        expected = definition.spread(grad, y, row_id_map, offsets, weights, wants)
        found = triton_permute.spread(grad, y, row_id_map, offsets, weights, wants)
        assert same(found[0], expected[0]) and (found[1] is None) == (expected[1] is None)
        if wants[1]:  # sums over columns in another order
            torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


@interpreter
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int64, torch.float64, torch.bool])
def test_elements_of_any_kind_are_copied(dtype):
    x = torch.randint(0, 256, (5, 24), dtype=torch.uint8)
    x = x % 2 == 0 if dtype is torch.bool else x.view(dtype)
    choices = torch.tensor([3, -1, 0, 4, 3], dtype=torch.int32)
    out, _ = triton_permute.gather(x, choices, 1, None)
    assert same(out, definition.gather(x.view(torch.uint8), choices, 1, None)[0].view(dtype))


# ---------------------------------------------------------------------------------------------- all of it together


def through(x, probs, index):
    """Every function of te, forward and backward: results and gradients."""
    x, probs = (t.detach().clone().requires_grad_() for t in (x, probs))
    mask = torch.zeros(probs.shape, dtype=torch.int32).scatter_(1, index, 1)
    rows, weights, row_id_map, offsets, sizes = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 4)
    back = te.moe_unpermute(rows * weights.unsqueeze(1), row_id_map, pad_offsets=offsets)
    sorted_rows, index_map = te.moe_permute(back, index, index.numel(), map_type="index")
    sizes, order = torch.tensor([1, 0, index.numel() - 1]), torch.tensor([2, 1, 0])
    moved, _ = te.moe_sort_chunks_by_index_with_probs(sorted_rows, sorted_rows[:, 0], sizes, order)
    merged = te.moe_unpermute(moved, index_map, probs.gather(1, index), map_type="index")
    merged.backward(torch.linspace(-1, 1, merged.numel()).view_as(merged))
    return rows, weights, offsets, back, sorted_rows, moved, merged, x.grad, probs.grad


@interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_functions_of_modules_give_what_a_cpu_gives_with_one_launch_each(request):
    x, probs, index = torch.randn(4, 20), torch.rand(4, 3), torch.tensor([[0, 2], [2, 0], [1, 2], [0, 1]])
    expected = through(x, probs, index)
    launches = request.getfixturevalue("launches")
    with mx.explain() as log:
        found = through(x, probs, index)
    assert all(map(same, found[:-1], expected[:-1]))
    torch.testing.assert_close(found[-1], expected[-1])
    assert {e.kernel for e in log.entries} == {"triton"}
    assert launches == [
        "count_choices", "number_rows", "gather_rows",  # permute and pad
        "merge_rows",
        "invert_rows", "gather_rows",  # permute by index
        "chunk_rows", "gather_rows",
        "merge_rows",  # backward from here on
        "invert_rows", "spread_rows", "gather_rows", "merge_rows", "invert_rows", "gather_rows", "merge_rows",
    ]  # fmt: skip


@interpreter
@pytest.mark.exhaustive
def test_a_compiled_graph_calls_the_ops(launches):
    x, probs, mask = torch.randn(4, 20), torch.rand(4, 3), torch.tensor([[1, 0, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]])

    def run(x, probs):
        rows, weights, row_id_map = te.moe_permute_with_probs(x, probs, mask, 8)
        rows = te.moe_sort_chunks_by_index(rows * weights.unsqueeze(1), mask.sum(1), torch.tensor([0, 1, 2, 3]))
        return te.moe_unpermute(rows, row_id_map, probs)

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        launches.clear()
        given = x.clone().requires_grad_(), probs.clone().requires_grad_()
        out = function(*given)
        out.backward(torch.ones_like(out))
        results.append((out, given[0].grad, given[1].grad, sorted(launches)))
    assert all(map(same, results[0][:3], results[1][:3])) and results[0][3] == results[1][3] != []


@interpreter
def test_padding_of_groups_is_one_copy(launches, monkeypatch):
    splits, x = [5, 0, 3, 8], torch.randn(2, 8, 6)
    pad, unpad = te.Fp8Padding(4, 4), te.Fp8Unpadding(4, 4)

    def through():
        given = x.clone().requires_grad_()
        y, sizes = pad(given, splits)
        out = unpad(y * torch.arange(len(y)).unsqueeze(1), splits)
        out.backward(torch.ones_like(out))
        return y, out, given.grad, sizes

    expected = through()
    assert launches == []
    monkeypatch.setattr(moe, "_has_kernels", lambda inp: True)
    found = through()
    assert all(map(same, found[:3], expected[:3])) and found[3] == expected[3]
    assert launches == ["chunk_rows", "gather_rows"] * 2 + ["gather_rows"] * 2


# ---------------------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize("padded", [False, True])
def test_traced_code_calls_ops_with_the_shapes_of_the_results(padded, cuda):
    x, mask = torch.empty(8, 64, dtype=torch.bfloat16, device=cuda), torch.empty(8, 4, dtype=torch.int32, device=cuda)
    probs, offsets = torch.empty(8, 4, device=cuda), torch.empty(4, dtype=torch.int64, device=cuda) if padded else None
    with mx.explain() as log:
        row_id_map, choices = choose_permutation.rows_of_mask(mask, 20, offsets)
        rows, weights = choose_permutation.gather(x, choices, 4, probs)
        out, spread_probs = choose_permutation.merge(rows, row_id_map, offsets, probs, weights)
        grads = choose_permutation.spread(out, rows, row_id_map, offsets, probs, (True, True))
        inverse = choose_permutation.choices_of_rows(row_id_map, 20, offsets)
        source, target = choose_permutation.chunk_rows(choices, choices, offsets, 20, 30 if padded else 20)
    assert {e.kernel for e in log.entries} == {"triton"}
    assert row_id_map.shape == mask.shape and choices.shape == inverse.shape == (20,) == target.shape
    assert rows.shape == (20, 64) and weights.shape == (20,) and weights.dtype is torch.float32
    assert out.shape == x.shape and out.dtype is x.dtype and spread_probs.shape == probs.shape
    assert [g.shape for g in grads] == [rows.shape, probs.shape] and len(source) == (30 if padded else 20)


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_the_host_reads_nothing_from_the_device(map_type, cuda):
    x, routing_map = torch.empty(8, 64, device=cuda), torch.empty(8, 4, dtype=torch.int32, device=cuda)
    probs = torch.empty(8, 4, device=cuda)
    y, row_id_map = te.moe_permute(x, routing_map, 16, map_type=map_type)
    assert te.moe_unpermute(y, row_id_map, probs, map_type=map_type).shape == x.shape
    rows, weights, row_id_map = te.moe_permute_with_probs(x, probs, routing_map, 16)
    rows, weights = te.moe_sort_chunks_by_index_with_probs(rows, weights, row_id_map.view(-1), row_id_map.view(-1))
    assert te.moe_unpermute(rows, row_id_map, pad_offsets=torch.empty(4, device=cuda).long()).shape == x.shape
    with pytest.raises(RuntimeError):  # the number of rows is read, which these tensors do not have
        te.moe_permute(x, routing_map, map_type=map_type)


def refusal(name, *operands, op="gather rows"):
    tensors = [t for t in operands if isinstance(t, torch.Tensor)]
    return getattr(choose_permutation, name)[0].refuses(choose_permutation._spec(op, tensors), *operands)


def test_what_is_left_to_plain_torch(triton_anywhere, monkeypatch):
    x, none = torch.randn(4, 8), torch.empty(4, 0)
    choices, row_id_map = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    assert refusal("GATHER", x, choices, 1, None) is None
    assert refusal("GATHER", none, choices, 1, None) == "no values"
    wide = x.to(torch.complex128)
    assert refusal("GATHER", wide, choices, 1, None) == "copies elements of 1, 2, 4 or 8 bytes, not complex128"
    only = "sums bfloat16, float16 and float32, not float64"
    assert refusal("MERGE", x.double(), row_id_map, None, None, None) == only
    assert refusal("SPREAD", x, x, row_id_map, None, x[:, :2].double(), (True, True)) == only
    experts = torch.zeros(2, 1025, dtype=torch.int32)
    assert refusal("MASK", experts, 3, None) == "is for 1024 experts or chunks, not 1025"
    assert refusal("CHUNKS", experts[0], None, None, 3, 3) == "is for 1024 experts or chunks, not 1025"
    monkeypatch.setattr(triton_permute, "LARGEST", 100)
    assert refusal("MASK", experts, 3, None) == "numbers at most 100 choices"
    row = torch.empty(60, 2000)
    told = "has 240 programs, a launch at most 100"
    assert refusal("GATHER", row, torch.zeros(60, dtype=torch.int32), 1, None) == told


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x, i: gather_op(x, x, 1, None), TypeError, "maps, sizes and offsets are integers, not torch."),
        (lambda x, i: gather_op(x[:0], i, 1, None), ValueError, "needs tensors with values on one device"),
        (lambda x, i: gather_op(x, i, 1, x), ValueError, "probs must have shape (4, 1), got (4, 8)"),
        (lambda x, i: merge_op(x.double(), i.view(2, 2), None, None, None), ValueError, "the kernel sums bfloat16"),
        (lambda x, i: choices_op(i.expand(2000, 4).t(), 4, None), ValueError, "1024 experts or chunks, not 2000"),
    ],
)  # fmt: skip
def test_ops_check_what_anybody_passes(call, error, words):
    with pytest.raises(error) as raised:
        call(torch.randn(4, 8), torch.arange(4, dtype=torch.int32))
    assert words in str(raised.value)


@pytest.mark.gpu
def test_on_a_device():
    x, probs, index = torch.randn(300, 520), torch.rand(300, 9), torch.rand(300, 9).topk(3).indices
    expected = through(x, probs, index)
    with torch.device("cuda"):
        found = through(x.cuda(), probs.cuda(), index.cuda())
    assert all(same(f.cpu(), e) for f, e in zip(found[:-1], expected[:-1], strict=True))
    torch.testing.assert_close(found[-1].cpu(), expected[-1])
    pad, unpad = te.Fp8Padding(3, 16), te.Fp8Unpadding(3, 16)
    padded, _ = pad(x.cuda(), [100, 0, 200])
    assert torch.equal(padded.cpu(), pad(x, [100, 0, 200])[0])
    assert torch.equal(unpad(padded, [100, 0, 200]).cpu(), x)

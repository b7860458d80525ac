"""A recorded program does to other tensors what the call did, or there is none."""

import ctypes
import threading

import pytest
import torch

from mxtensor.core import recording
from mxtensor.core.recording import Launch, active, record
from mxtensor.core.tracing import is_traced


def tensors_of(out):
    return out if isinstance(out, tuple | list) else [out]


def check(function, *makers):
    """Record a call; the program gives what the function gives for other tensors. Returns the program."""
    inputs = [make() for make in makers]
    _out, program = record(lambda: function(*inputs), inputs, tensors_of)
    assert program is not None
    others = [make() for make in makers]
    copies = [t.clone() if t._base is None else t for t in others]
    expected = tensors_of(function(*copies))
    for mine, other in zip(program(*others), expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.stride() == other.stride() and torch.equal(mine, other)
    return program


def below_autograd():
    """Ops reach a recorder as they do inside a custom op of a compiled graph."""
    return torch._C._AutoDispatchBelowAutograd()


def matrix(*shape):
    return lambda: torch.randn(*(shape or (4, 6)))


OPS = [
    lambda x, y: x @ y.t(),
    lambda x, y: (x + y, None, x),
    lambda x, y: torch.addmm(y[0, :4], x, y.t()),
    lambda x, y: x.view(2, 12).t()[:, 1:].contiguous(),
    lambda x, y: [*x.split(2), *torch.stack((x, y)).unbind()],
    lambda x, y: torch.empty_like(x).copy_(y).mul_(2).view(-1),
    lambda x, y: torch.zeros(3, 3).add_(float("inf")),
    lambda x, y: x.to(torch.bfloat16).view(torch.int16).float(),
    lambda x, y: torch.cat([x, y]).amax(0, keepdim=True).expand(3, 6),
    lambda x, y: torch.where(x > y, x, -float("inf")),
    lambda x, y: (x.reshape(6, 4), x[1], y.detach(), torch.full((2,), 3.5)),
    lambda x, y: torch.nn.functional.pad(x, (0, 2, 1, 0)),
]


@pytest.mark.parametrize("function", OPS)
def test_ops_of_torch(function):
    check(function, matrix(), matrix())


@pytest.mark.parametrize(
    "function",
    [
        *OPS,
        lambda x, y: x.t().contiguous() + y.contiguous().t(),
        lambda x, y: (x.t().reshape(24), y.reshape(24)),
        lambda x, y: x.to(torch.float64).to(torch.float64) @ y.t().to(torch.float64),
        lambda x, y: x.t().contiguous().view(-1).view(4, 6).t().contiguous(),
        lambda x, y: x.t().flatten() + y.contiguous().ravel(),
    ],
)
def test_below_autograd_a_copy_by_an_op_that_may_give_a_view_is_a_copy(function):
    """There a recorder sees ``contiguous``, ``reshape`` and ``to``, and a custom op of a compiled graph runs there."""
    with below_autograd():
        check(function, matrix(), matrix())


def test_a_launch_below_autograd_gets_the_address_of_the_copy_of_its_own_call():
    seen = []

    def work(x):
        copy = x.t().contiguous()
        recorder = active()
        if recorder is not None:
            recorder.launch(Launch(lambda *a: seen.append(a), (), (), (x, copy, copy[1])))
        return [copy]

    with below_autograd():
        x = torch.randn(4, 6)
        _, program = record(lambda: work(x), [x], tensors_of)
        other = torch.randn(4, 6)
        (copy,) = program(other)
    assert seen == [(0, other.data_ptr(), copy.data_ptr(), copy[1].data_ptr())] and torch.equal(copy, other.t())


def test_random_numbers_are_drawn_anew():
    _, program = record(lambda: torch.empty(4).uniform_(), [torch.ones(1)], tensors_of)
    torch.manual_seed(3)
    first, second = program(torch.ones(1))[0], program(torch.ones(1))[0]
    torch.manual_seed(3)
    assert torch.equal(first, torch.empty(4).uniform_()) and not torch.equal(first, second)


def test_what_nobody_needs_is_left_out():
    def work(x):
        unused, view = torch.empty(100), x.t().unsqueeze(0)
        return x.view(x.shape), unused is view

    x = torch.randn(2, 3)
    _, program = record(lambda: work(x), [x], lambda out: out[:1])
    assert program.source == "def run(stream, v0):\n    return (v0, )\n"


def test_a_write_to_an_input_is_a_step():
    x, total = torch.ones(3), torch.zeros(3)
    _, program = record(lambda: total.add_(x), [x, total], tensors_of)
    other = torch.full((3,), 5.0)
    (result,) = program(torch.ones(3), other)
    assert result is other and other.tolist() == [6.0] * 3


def test_a_launch_gets_addresses_and_the_allocation_is_its_view():
    seen = []

    def work(x):
        memory = torch.empty(4, 8, dtype=torch.uint8)
        view = memory.view(torch.float32).t()
        recorder = active()
        if recorder is not None:
            recorder.launch(Launch(lambda *a: seen.append(a), ("before",), ("after",), (x, x[1:], memory[1], 7, None)))
        return view

    x = torch.randn(3, 2)
    out, program = record(lambda: work(x), [x], tensors_of)
    assert out.shape == (2, 4)
    other = torch.randn(3, 2)
    (result,) = program(other)
    assert (result.shape, result.stride(), result.dtype) == ((2, 4), (1, 2), torch.float32)
    address, start = other.data_ptr(), result.data_ptr()
    assert seen == [("before", 0, "after", address, address + 8, start + 8, 7, None)]
    assert "view" not in program.source and program.source.count(" = k") == 1


def test_memory_of_launches_is_freed_after_the_last_that_uses_it():
    """Another launch may get it: launches of a stream come one after the other."""
    seen = []

    def work(x):
        first, second, out = torch.empty(600), torch.empty(5, dtype=torch.int32), torch.empty(3)
        recorder = active()
        if recorder is not None:
            for step in ((x, first), (first, second), (second, out[1:])):
                recorder.launch(Launch(lambda stream, *a: seen.append(a), (), (), step))
        return (out,)

    x = torch.randn(3)
    _, program = record(lambda: work(x), [x], tensors_of)
    (out,) = program(x)
    (a, first), (first_too, second), (second_too, result) = seen
    assert (a, first, second, result) == (x.data_ptr(), first_too, second_too, out.data_ptr() + 4)
    steps = [line.split("(")[0].strip() for line in program.source.splitlines()[1:] if "data_ptr" not in line]
    steps = [step.split(" = ")[0] if " = " in step else step for step in steps]
    launched = [i for i, step in enumerate(steps) if step.startswith("k")]
    freed = {step.removeprefix("del "): i for i, step in enumerate(steps) if step.startswith("del ")}
    assert len(launched) == 3 and list(freed.values()) == [launched[1] + 1, launched[2] + 1]


def test_memory_that_two_views_share_is_allocated_once():
    def work(x):
        memory = torch.empty(2, 6)
        memory.copy_(x)
        return memory.t(), memory.view(12)

    check(work, lambda: torch.randn(2, 6))
    x = torch.randn(2, 6)
    _, program = record(lambda: work(x), [x], tensors_of)
    a, b = program(x)
    assert a.data_ptr() == b.data_ptr()


def test_calls_are_steps_and_constants_are_shared():
    made = []

    def constant():
        made.append(torch.arange(3.0))
        return made[-1]

    def work(x):
        twice = recording.call(lambda t: t.numpy() * 2 + 1 if t is None else t * 2, x)
        return twice + recording.constant(constant).view(3, 1).t()

    x = torch.randn(2, 3)
    _out, program = record(lambda: work(x), [x], tensors_of)
    other = torch.randn(2, 3)
    assert torch.equal(program(other)[0], other * 2 + torch.arange(3.0))
    assert len(made) == 1 and "view" not in program.source


OUTSIDE = torch.ones(6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x if bool((x > 0).all()) else -x,
        lambda x: x * float(torch.equal(x, x)),
        lambda x: x + OUTSIDE,
        lambda x: x[x > 0],
        lambda x: (recording.refuse("an address was used"), x)[1],
        lambda x: torch.nonzero(x),
    ],
)
def test_what_another_call_could_not_do_is_refused(function):
    x = torch.randn(4, 6)
    out, program = record(lambda: function(x), [x], tensors_of)
    assert program is None and isinstance(out, torch.Tensor)


def test_a_recorder_traces_nothing_and_sees_one_thread():
    x, seen = torch.randn(2), []

    def work():
        assert active() is not None and not is_traced(x)
        thread = threading.Thread(target=lambda: seen.append((active(), torch.ones(3).sum())))
        thread.start()
        thread.join()
        inner = record(lambda: x * 3, [x], tensors_of)
        assert inner[1] is None  # what is recorded already is not recorded twice
        return x + inner[0]

    _, program = record(work, [x], tensors_of)
    assert seen[0][0] is None and program.source.count("\n") == 5
    assert torch.equal(program(torch.ones(2))[0], torch.full((2,), 4.0))


def test_an_error_ends_the_recording():
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0, [torch.ones(1)], tensors_of)
    assert active() is None


def test_what_is_derived_from_an_input_is_looked_up_and_from_a_new_tensor_is_computed():
    looked_up = []

    def double(t):
        return t * 2

    def look_up(t):
        looked_up.append(t)
        return double(t)

    def work(x):
        return (recording.derived(double, look_up, x) + recording.derived(double, look_up, x + 1),)

    x = torch.randn(3)
    _, program = record(lambda: work(x), [x], tensors_of)
    for other in (torch.randn(3), torch.randn(3)):
        del looked_up[:]
        assert torch.equal(program(other)[0], other * 2 + (other + 1) * 2)
        assert len(looked_up) == 1 and looked_up[0] is other


def by_address(source, out):
    """A copy that torch does not see."""
    ctypes.memmove(out.data_ptr(), source.data_ptr(), out.nbytes)


@pytest.mark.parametrize("told", [False, True])
def test_memory_that_native_code_writes_without_a_word_makes_no_program(told):
    def work(x):
        doubled, out = x * 2, torch.empty_like(x)
        if told:
            recording.call(by_address, doubled, out)
        else:
            by_address(doubled, out)
        return (out,)

    x = torch.randn(5)
    (out,), program = record(lambda: work(x), [x], tensors_of)
    assert torch.equal(out, x * 2) and (program is not None) == told
    if program is not None:
        other = torch.randn(5)
        assert torch.equal(program(other)[0], other * 2)


def test_memory_without_values_needs_no_writer():
    _, program = record(lambda: (torch.empty(0, 4),), [torch.randn(2)], tensors_of)
    assert program is not None and program(torch.randn(2))[0].shape == (0, 4)

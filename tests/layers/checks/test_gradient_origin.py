"""Backwards from plain losses: where they began, and what of them all ranks have alike."""

import pytest
import torch

from distdl_rma import UnsupportedError
from distdl_rma.layers.checks import gradient_origin
from distdl_rma.layers.checks.gradient_origin import GradientCheck, first_differing


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr(gradient_origin._Backward, "shown", True)


def loss_of(x, seen):
    def look(gradient):
        try:
            seen.append(gradient_origin._is_own())
        except UnsupportedError as error:
            seen.append(str(error))

    x.register_hook(look)
    return (x * 2).sum()


def begun(begin):
    x, seen = torch.ones(3, requires_grad=True), []
    begin(loss_of(x, seen), x)
    return seen


def by_engine(loss, _x):
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones(()),), False, False, (), True, accumulate_grad=True)


def test_it_is_known_where_a_backward_began(shown):
    known = (
        lambda loss, x: loss.backward(),
        lambda loss, x: torch.autograd.backward([loss, loss * 2]),
        torch.autograd.grad,
        lambda loss, x: torch.autograd.grad([loss], [x]),
    )
    assert [begun(each) for each in known] == [[False]] * len(known)
    assert "neither by backward()" in begun(by_engine)[0]
    for code, name in gradient_origin._ENTRIES.items():
        assert name in code.co_varnames


def test_a_backward_from_a_split_tensor_lasts_as_long_as_its_context():
    with gradient_origin.from_split_tensor(), gradient_origin.from_split_tensor():
        assert gradient_origin.RUNNING.depth == 2
    assert gradient_origin.RUNNING.depth == 0


def test_where_no_block_was_shown_nobody_asks():
    if not gradient_origin._Backward.shown:
        assert begun(by_engine) == [False]


def test_gradients_that_are_rounded_otherwise_are_alike():
    one, other = GradientCheck(), GradientCheck()
    for each, factor in ((one, 1.0), (other, 1.0 + 1e-7)):
        each.note("a", torch.linspace(-3, 3, 100).double() * factor)
        each.note("b", torch.full((3,), 1e-12 * factor))
    assert one.number() != other.number()
    assert first_differing([[*one.last], [*other.last]]) == ""
    other.note("c", torch.ones(2))
    assert first_differing([[*one.last], [*other.last]]) == "c"
    one.note("c", torch.ones(2, dtype=torch.complex64) * 1j)
    assert first_differing([[*one.last], [*other.last]]) == "c"
    assert "gradient of 'c'" in one.problem({0: [*one.last], 1: [*other.last]})
    assert one.number() == 0 and not one.last


def test_gradients_that_overflow_on_one_rank_are_not_alike():
    def apart(*values):
        noted = [GradientCheck() for _ in values]
        for each, value in zip(noted, values, strict=True):
            each.note("a", torch.tensor([1.0, value]))
        return first_differing([[*each.last] for each in noted])

    nan, inf = float("nan"), float("inf")
    assert [apart(nan, 1.0), apart(inf, 1.0), apart(inf, -inf), apart(1.0, nan)] == ["a"] * 4
    assert [apart(nan, nan), apart(inf, inf)] == ["", ""]

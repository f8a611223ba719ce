"""Products and matrices of split tensors."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.layers.split import SplitTensor
from tests.layers.split.against_whole import check, cut_along, forms, numbers
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi


def definite(x):
    return x @ x.mT + 4 * torch.eye(x.shape[-1], dtype=x.dtype)


def solved(x, y):
    return torch.linalg.solve(definite(x), y)


def solved_by_name(b, a):
    a, factor = definite(a), torch.linalg.cholesky(definite(a), upper=True)
    return (
        torch.cholesky_solve(upper=True, input2=factor, input=b),
        b.cholesky_solve(factor, True),
        torch.linalg.solve(B=b, A=a),
        torch.linalg.solve_triangular(factor, B=b, upper=True),
        torch.linalg.solve_triangular(upper=True, B=b, input=factor),
    )


def transposed(x, y):
    # Which torch refuses of one that is transposed in memory.
    return torch.kron(x.mT if isinstance(x, SplitTensor) and x.is_split else x.mT.contiguous(), y)


def of_both(x, w, b):
    y = F.linear(x, w, b)
    pooled = (y.redistribute() if hasattr(y, "redistribute") else y).flatten(1)[:, :1]
    return F.linear(pooled.expand(-1, 4), w, b) + y.flatten(1)[:, :4]


ROWS = torch.arange(6).view(2, 3)
BRANCHES = [torch.arange(90).view(3, 5, 6).short(), torch.arange(72).view(3, 6, 4).short()]
# Shapes of matrices and of right-hand sides.
SOLVED = [((5, 3, 3), (5, 3, 2)), ((3, 3), (5, 3, 2)), ((1, 3, 3), (5, 3, 2)), ((5, 3, 3), (5, 3))]
# Forms beyond torch's samples.
FORMS = {
    "contractions": (
        lambda x, y: torch.einsum("bhid, bhjd -> bhij", [x, y]), [(2, 3, 5, 4), (2, 3, 6, 4)]
    ),
    "a sum of short integers": (partial(torch.einsum, "ij->i"), [torch.full((4, 6), 99, dtype=torch.uint8)]),
    "a diagonal": (partial(torch.einsum, "ii->i"), [(4, 4)]),
    "fewer rows than ranks": (lambda x, w: F.bilinear(x, x, w), [(2, 1)], [(3, 1, 1)]),
    "factors by name": (lambda x, y: torch.matmul(other=y, input=x), [(4, 4), (4, 4)]),
    "a number is added": (lambda a, x, b: x.addmv(a, b, beta=0.2, alpha=0.6), [(1, 4)], [(), (4,)]),
    "a number is added to rows": (lambda a, x, c: x.addmm(a, c, beta=0.2), [(1, 4)], [(), (4, 3)]),
    "whole numbers": (lambda x: torch.addmm(ROWS[0], x, ROWS.mT @ ROWS, beta=1.7, alpha=2.5), [ROWS]),
    "complex numbers": (lambda x: torch.addmm(x[:, 0], x, x.mT, beta=0.5), [ROWS.to(torch.complex128)]),
    "short whole numbers": (torch.addbmm, [torch.arange(20).view(5, 4).short()], BRANCHES),
    "a parameter of split and replicated tensors": (of_both, [(3, 5, 4)], [(4, 4), (4,)]),
    **{f"solutions of {a} and {b}": (solved, [a], [b]) for a, b in SOLVED},
    **{f"plain {a} solved for {b}": (lambda y, x: solved(x, y), [b], [a]) for a, b in SOLVED},
    "matrices solved for columns": (lambda b, a: torch.linalg.solve(definite(a), b), [(3, 6)], [(3, 3, 3)]),
    "a matrix solved for rows": (lambda b, a: torch.linalg.solve(a, b, left=False), [(3, 3)], [(1, 3, 3)]),
    "solved by name": (solved_by_name, [(2, 3, 4), (2, 3, 3)]),
    "triangles": (
        lambda x, y: torch.linalg.solve_triangular(definite(x), y, upper=False, left=False),
        [(5, 3, 3), (5, 3, 3)],
    ),
    **{
        f"Kronecker products of {a} and {b}": (lambda x, y: (torch.kron(x, y), torch.kron(y, x)), [a], [b])
        for a, b in (((4, 3), (2, 5)), ((4, 3), (5,)), ((4, 3), (2, 2, 3)))
    },
    "a transposed Kronecker product": (transposed, [(5, 5), (10, 20)]),
    "condition numbers": (torch.linalg.cond, [(1, 3, 3)]),
    "condition numbers by -2": (lambda x: torch.linalg.cond(x, -2), [(1, 3, 3)]),
}  # fmt: skip
test_forms = forms(FORMS, atol=1e-8)
test_samples_of_torch = samples_of("contractions", 5)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,jk->bki", [(3, 5, 4), (4, 6)]),
        ("bij,ij->bij", [(3, 5, 4), (5, 4)]),
        ("bij->ji", [(3, 5, 4)]),
        ("bixy,rs,ir,os,xr->boxy", [(2, 3, 5, 4), (2, 3), (3, 2), (6, 3), (5, 2)]),
    ],
)
def test_contractions_by_opt_einsum_are_those_of_torchs_tensors(P_world, equation, shapes):
    contract = pytest.importorskip("opt_einsum").contract
    first, *others = [numbers(*shape) for shape in shapes]
    check(P_world, partial(contract, equation), [first], others)


SHORT = {
    "dot": (torch.dot, (7,), (7,)),
    "vectors": (torch.matmul, (7,), (7,)),
    "inner": (torch.inner, (7,), (7,)),
    "mv": (torch.mv, (5, 7), (7,)),
    "mm": (torch.mm, (5, 7), (7, 3)),
    "matmul": (torch.matmul, (2, 5, 7), (7, 3)),
    "bmm": (torch.bmm, (2, 5, 7), (2, 7, 3)),
    "linear": (F.linear, (2, 5, 7), (3, 7)),
    "linear with a bias": (F.linear, (2, 5, 7), (3, 7), (3,)),
    "einsum": (partial(torch.einsum, "bik,jk->bij"), (2, 5, 7), (3, 7)),
    "tensordot": (lambda x, y: torch.tensordot(x, y, ([2], [1])), (2, 5, 7), (3, 7)),
    "addmv": (lambda x, y, z: torch.addmv(z, x, y), (5, 7), (7,), (5,)),
    "addmm": (lambda x, y, z: torch.addmm(z, x, y), (5, 7), (7, 3), (3,)),
    "addmm, factors": (lambda x, y, z: torch.addmm(z, x, y, beta=0.5, alpha=0.25), (5, 7), (7, 3), (5, 1)),
    "baddbmm": (lambda x, y, z: torch.baddbmm(z, x, y), (2, 5, 7), (2, 7, 3), (1, 5, 3)),
}


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("autocast", [False, True])
def test_sums_of_short_numbers_are_rounded_once(P_world, name, dtype, autocast):
    function, *shapes = SHORT[name]

    def cast(*operands):
        with torch.autocast("cpu", dtype, enabled=autocast):
            return function(*operands)

    # Sums of products that have 24 digits at most, and cancel.
    wholes = [torch.randint(-100, 100, shape).float().mul(8).add(1) for shape in shapes]
    wholes[0][..., 1::2] *= -1
    operands = [x.to(torch.float32 if autocast else dtype).requires_grad_() for x in wholes]
    check(P_world, cast, operands[:1], operands[1:], gradients=False)
    if len({x.dim() for x in operands}) == 1:
        check(P_world, cast, operands, gradients=False)
    # Of the parts of a gradient each rank rounds its own.
    check(P_world, cast, operands[:1], [x.detach() for x in operands[1:]])


@pytest.mark.mpi(min_size=2)
def test_bad_input(P_world):
    x = cut_along(P_world, 1, numbers(5, 4))
    with pytest.raises(ShapeError, match="go together"):
        x @ torch.zeros(5, 4)
    with pytest.raises(UnsupportedError, match="max_norm"):
        F.embedding(x.long(), torch.zeros(9, 3), max_norm=1.0)
    with pytest.raises(RuntimeError, match="integral"):
        torch.addr(ROWS[0, 0], x[0].long(), x[1].long(), alpha=0.5)


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("driver", [None, "gels", "gelsy", "gelsd", "gelss"])
def test_least_squares(P_world, driver):
    def least(a, b):
        return tuple(torch.linalg.lstsq(a, b=b, driver=driver))

    both = [((*batch, 5, 3), (*batch, 5, 2)) for batch in ((2,), (4, 3), ())]
    both += [((*batch, 2, 4), (*batch, 2, 3)) for batch in ((2,), (4, 3), ())]
    for a, b in both:
        check(P_world, least, [numbers(*a), numbers(*b)], atol=1e-8)
    for a, b in (*both[:3], ((4, 5, 3), (4, 5)), ((5, 3), (5,)), ((4, 5, 3), (1, 5, 2))):
        check(P_world, least, [numbers(*a)], [numbers(*b)], atol=1e-8)
    if driver != "gels":
        # Not of full rank: all matrices, and some.
        for a in (torch.ones(2, 4, 3), torch.cat([torch.ones(1, 4, 3), torch.rand(3, 4, 3)])):
            check(P_world, least, [a.double(), numbers(len(a), 4, 2).detach()], atol=1e-8)


@pytest.mark.sizes(1, 2, 3)
def test_a_tensor_beside_matrices_that_every_rank_has_is_as_in_torch(P_world):
    x = torch.diag(torch.tensor([3.0, 1e-3, 2.0]))
    everywhere = cut_along(P_world, 1, x).redistribute()
    found = torch.linalg.matrix_rank(everywhere, torch.tensor(0.1))
    assert int(found) == int(torch.linalg.matrix_rank(x, torch.tensor(0.1))) == 2

"""Ranks that take different ways through a distributed model, or fail in it: what all of them hear."""

import pytest

from tests.test_failures import PREAMBLE, run
from tests.test_peers import REPORT

# Not so long as to be taken for a hang.
TIMEOUT = 3.0
STORY = f"""{PREAMBLE}
from torch import nn
from torch.nn import functional as F
from distdl_rma.split import SplitTensor

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.second = nn.Conv2d(2, 2, 3, padding=1)
        self.third = nn.Conv2d(2, 2, 3, padding=1)

    def act(self, x):
        return self.second(x)

    def forward(self, x):
        return self.act(torch.relu(self.norm(self.first(x)))).square()


torch.manual_seed(1)
model = distribute(Net(), {{"H": -1}})
machine = model.distributed.machine
machine.segments.waiter.timeout = {TIMEOUT}
x = torch.randn(1, 1, 12, 8)
odd = comm.rank == 1
P_x = machine.partition((1, 1, comm.size, 1))
F.mse_loss(model(x), torch.zeros(1, 2, 12, 8)).backward()
comm.Barrier()
{REPORT}
"""
ENDS = """
try:
    act()
except Exception as error:
    told(error)
else:
    told(RuntimeError("nothing was noticed"))
finish()
"""


@pytest.fixture
def tell(tmp_path):
    """Run a story in which ``act`` goes wrong; by rank the seconds it took, and the error."""

    def tell(ranks, body, **options):
        _, err, said = _run(tmp_path, ranks, body, **options)
        assert set(said) == set(range(ranks)), err
        return said

    return tell


def _run(tmp_path, ranks, body, **options):
    code, _, err = run(ranks, body + ENDS, preamble=STORY, REPORTS=str(tmp_path), **options)
    said = {}
    for file in tmp_path.iterdir():
        seconds, _, text = file.read_text().strip().partition(" ")
        said[int(file.name)] = float(seconds), text
    return code, err, said


# Where the odd rank goes another way, and what the errors say.
WAYS = {
    "another function of the same geometry": (
        """
def act():
    model.act = lambda y: (model.third if odd else model.second)(y)
    model(x)
""",
        ["second conv2d (", "third conv2d ("],
    ),
    "another function of the same geometry, when both are connected": (
        """
def act():
    for at in (0, 1, odd):
        model.act = lambda y: (model.third if at else model.second)(y)
        model(x)
""",
        ["second conv2d (", "third conv2d ("],
    ),
    "a module more": (
        """
def act():
    model.act = lambda y: model.second(model.second(y)) if odd else model.second(y)
    model(x)
""",
        ["second conv2d ("],
    ),
    "a module more, later made up for": (
        """
def act():
    for step in range(2):
        model.act = lambda y: model.second(model.second(y)) if odd == step else y
        with torch.no_grad():
            model(x)
""",
        ["second conv2d (", "to send in 'calls of Net"],
    ),
    "backward on one rank": (
        """
def act():
    y = model(x).sum()
    if odd:
        y.backward()
    model(x)
""",
        ["to send in 'calls of Net", "adjoint"],
    ),
    "other reductions of the same geometry": (
        """
def act():
    y = model(x)
    for step in range(2):
        if odd == step:
            z = y.sum()
        else:
            z = y.sum()
""",
        ["sum (<string>:"],
    ),
}


@pytest.mark.parametrize(("name", "ranks"), [(name, 3 if "later" in name else 2) for name in WAYS])
def test_different_ways_are_an_error_on_all_ranks(tell, name, ranks):
    body, expected = WAYS[name]
    said = tell(ranks, body)
    for seconds, text in said.values():
        assert text.startswith(("ExchangeTimeout", "PeerFailedError", "MismatchError")), said
        assert seconds < TIMEOUT + 6, said
    everything = " ".join(text for _, text in said.values())
    assert all(part in everything for part in expected), said


def test_an_exception_on_one_rank_reaches_the_others_soon(tell):
    said = tell(
        3,
        """
def act():
    def broken(y):
        if odd:
            raise OSError("disk on fire")
        return model.second(y)

    model.act = broken
    model(x)
""",
    )
    assert "OSError: disk on fire" in said[1][1]
    for rank in (0, 2):
        assert "PeerFailedError: rank 1 failed: OSError: disk on fire" in said[rank][1]
        assert said[rank][0] < 3, said


def test_an_exception_in_a_rule_of_one_rank_reaches_the_others_soon(tell):
    said = tell(
        3,
        """
def act():
    model.act = lambda y: y.as_strided((1,), (1,)) if odd else model.second(y)
    model(x)
""",
    )
    assert "UnsupportedError" in said[1][1]
    assert all("PeerFailedError: rank 1 failed: UnsupportedError" in said[rank][1] for rank in (0, 2)), said


# Outside of every model: what the odd rank does, and what it raises.
OUTSIDE = {
    "labels that are none": ("F.cross_entropy(y, torch.full((1, 12, 8), 7 * odd))", "IndexError"),
    "a hook of a gradient": (
        "y.register_hook(lambda gradient: [gradient][odd])\n    y.square().mean().backward()",
        "IndexError",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_error_of_one_rank_outside_of_a_model_reaches_the_others_soon(tell, name):
    body, error = OUTSIDE[name]
    said = tell(3, f"def act():\n    y = model(x)\n    {body}\n    y.sum()")
    assert said[1][1].startswith(error)
    for rank in (0, 2):
        assert f"PeerFailedError: rank 1 failed: {error}" in said[rank][1], said
        assert said[rank][0] < TIMEOUT, said


def test_a_rank_that_is_killed_is_named(tmp_path):
    body = "def act():\n    if odd:\n        os.kill(os.getpid(), signal.SIGKILL)\n    model(x)"
    _, err, said = _run(tmp_path, 3, body, survive=True)
    for rank in (0, 2):
        assert "rank 1" in said[rank][1], err
        assert said[rank][0] < TIMEOUT + 6

"""Ranks that take different ways through a distributed model, or fail in it: what all of them hear."""

import json

import pytest

from tests.test_failures import PREAMBLE, run

# Not so long as to be taken for a hang.
TIMEOUT = 3.0
# Where nobody waits in vain for a machine that has other things to do.
SOON = 30
RANKS = 3
STORY = f"""{PREAMBLE}
import json
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


x = torch.randn(1, 1, 12, 8, generator=torch.Generator().manual_seed(1))
odd = comm.rank == 1


def meet():
    # MPI's own barrier would keep the cores busy.
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def told(name, body):
    # Each on a machine of its own: one with a failed rank cannot be used further.
    global model
    torch.manual_seed(1)
    machine = Machine(comm.Dup(), segment_size="8MiB", timeout=60)
    model = distribute(Net(), machine.partition((1, 1, comm.size, 1)))
    F.mse_loss(model(x), torch.zeros(1, 2, 12, 8)).backward()
    exec(body, globals())
    machine.segments.waiter.timeout = {TIMEOUT}
    meet()
    begin, error = time.time(), RuntimeError("nothing was noticed")
    try:
        act()
    except Exception as found:
        error = found
    line = json.dumps([name, time.time() - begin, f"{{type(error).__name__}}: {{error}}"])
    with open(f"{{os.environ['REPORTS']}}/{{comm.rank}}", "a") as file:
        file.write(line + chr(10))


def tell(bodies, survivors=range(comm.size)):
    for name, body in bodies.items():
        told(name, body)
        if len(survivors) == comm.size:
            meet()
    # With the first rank that ends, the launcher may end all.
    files = [f"{{os.environ['REPORTS']}}/{{rank}}" for rank in survivors]
    while not all(os.path.exists(file) and os.path.getsize(file) for file in files):
        time.sleep(0.02)
    os._exit(0)


"""


def run_ways(folder, bodies, survivors=range(RANKS), **options):
    """Run stories in which ``act`` goes wrong, one after the other; by name and rank seconds and error."""
    script = f"tell({bodies!r}, {[*survivors]})"
    _, _, err = run(RANKS, script, preamble=STORY, REPORTS=str(folder), **options)
    said = {}
    for file in folder.iterdir():
        for name, seconds, text in map(json.loads, file.read_text().splitlines()):
            said.setdefault(name, {})[int(file.name)] = seconds, text
    assert all(set(each) == set(survivors) for each in said.values()) and set(said) == set(bodies), (
        said,
        err,
    )
    return said


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What all ranks were told in each story that they all survive; in one job."""
    stories = {name: body for name, (body, _) in WAYS.items()} | EXCEPTIONS
    stories |= {
        name: f"def act():\n    y = model(x)\n    {body}\n    y.sum()" for name, (body, _) in OUTSIDE.items()
    }
    return run_ways(tmp_path_factory.mktemp("ways"), stories)


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


EXCEPTIONS = {
    "an exception": """
def act():
    def broken(y):
        if odd:
            raise OSError("disk on fire")
        return model.second(y)

    model.act = broken
    model(x)
""",
    "an exception in a rule": """
def act():
    model.act = lambda y: y.as_strided((1,), (1,)) if odd else model.second(y)
    model(x)
""",
}
# Outside of every model: what the odd rank does, and what it raises.
OUTSIDE = {
    "labels that are none": ("F.cross_entropy(y, torch.full((1, 12, 8), 7 * odd))", "IndexError"),
    "a hook of a gradient": (
        "y.register_hook(lambda gradient: [gradient][odd])\n    y.square().mean().backward()",
        "IndexError",
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_different_ways_are_an_error_on_all_ranks(outcomes, name):
    said, expected = outcomes[name], WAYS[name][1]
    for seconds, text in said.values():
        assert text.startswith(("ExchangeTimeout", "PeerFailedError", "MismatchError")), said
        assert seconds < SOON, said
    everything = " ".join(text for _, text in said.values())
    assert all(part in everything for part in expected), said


def assert_heard(said, error):
    assert said[1][1].startswith(error)
    for rank in (0, 2):
        seconds, text = said[rank]
        assert f"PeerFailedError: rank 1 failed: {error}" in text and seconds < SOON, said


def test_an_exception_on_one_rank_reaches_the_others(outcomes):
    assert_heard(outcomes["an exception"], "OSError: disk on fire")


def test_an_exception_in_a_rule_of_one_rank_reaches_the_others(outcomes):
    assert_heard(outcomes["an exception in a rule"], "UnsupportedError")


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_error_of_one_rank_outside_of_a_model_reaches_the_others(outcomes, name):
    assert_heard(outcomes[name], OUTSIDE[name][1])


def test_a_rank_that_is_killed_is_named(tmp_path):
    body = "def act():\n    if odd:\n        os.kill(os.getpid(), signal.SIGKILL)\n    model(x)"
    said = run_ways(tmp_path, {"killed": body}, (0, 2), survive=True)
    for seconds, text in said["killed"].values():
        assert "rank 1" in text and seconds < SOON

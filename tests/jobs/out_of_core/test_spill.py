"""Steps with saved tensors on disk: the same bits as without, and nothing that stays."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distdl_rma import spill
from distdl_rma.errors import ConfigurationError, DataError, ProtocolError
from distdl_rma.jobs.out_of_core.scratch import Scratch
from tests.jobs.out_of_core.nets import said
from tests.layers.model.nets import UNet

KIB = 1 << 10


def settled(disk):
    """The scratch file, when its thread has done all that was asked for."""
    scratch = disk._scratch
    scratch.wait(scratch.write(torch.ones(1)))
    gc.collect()
    return scratch


def nothing_on_disk(disk):
    # The one element that ``settled`` writes is freed by nobody.
    return settled(disk).used_nbytes % (1 << 12) == 0 and len(disk._saved) == len(disk._pieces) == 0


def outcome(run, *models):
    """Loss and gradients, of a function that calls backward, by bits."""
    for each in models:
        each.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = run()
    return [loss.detach(), *(p.grad for each in models for p in each.parameters() if p.grad is not None)]


def equal(first, second):
    assert len(first) == len(second) > 1
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


MADE = {
    "unet": lambda: (UNet(), torch.randn(2, 1, 37, 41)),
    "channels last": lambda: (UNet().to(memory_format=torch.channels_last), torch.randn(2, 1, 36, 40)),
    "transformer": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        torch.randn(3, 20, 16),
    ),
    "lstm": lambda: (nn.LSTM(8, 16, 2, dropout=0.2), torch.randn(30, 4, 8)),
    "mlp": lambda: (
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 64)),
        torch.randn(50, 64),
    ),
    "in place": lambda: (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.Sigmoid()),
        torch.randn(100, 64),
    ),
}


def made(kind):
    torch.manual_seed(2)
    return MADE[kind]()


def result(model, x):
    y = model(x)
    return (y[0] if isinstance(y, tuple) else y).square().mean()


def step(model, x, between=None, dtype=None):
    """A loss after its backward; behind the forward something else may happen."""
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = result(model, x)
    if between:
        between()
    loss.backward()
    return loss


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("above", [1, 5 * KIB])
def test_losses_and_gradients_have_the_same_bits(tmp_path, kind, above):
    model, x = made(kind)
    expected, disk = outcome(partial(step, model, x), model), spill(tmp_path, above)
    # Tensors that are needed at once may not have been written yet.
    for between in (None, None, lambda: settled(disk)):
        with disk:
            equal(outcome(partial(step, model, x, between), model), expected)
    assert disk.written_nbytes > 5 * KIB
    assert nothing_on_disk(disk)


def twice(model, x):
    loss = result(model, x)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


@pytest.mark.parametrize("step", [partial(step, dtype=torch.bfloat16), twice])
def test_other_steps_have_the_same_bits(tmp_path, step):
    model, x = made("unet")
    expected = outcome(partial(step, model, x), model)
    with spill(tmp_path, KIB) as disk:
        equal(outcome(partial(step, model, x), model), expected)
    assert nothing_on_disk(disk)


@pytest.fixture
def sent(monkeypatch):
    """Bytes of the tensors that are written; all of them are read back from disk."""
    written, write = [], Scratch.write

    def noted(scratch, tensor):
        region = write(scratch, tensor)
        written.append(tensor.nbytes)
        scratch.wait(region)
        return region

    monkeypatch.setattr(Scratch, "write", noted)
    return written


def test_every_memory_is_written_once_and_parameters_never(tmp_path, sent):
    weight, buffer = nn.Parameter(torch.randn(64, 64)), torch.randn(50, 64)
    frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)
    with spill(tmp_path, KIB):
        h = (buffer @ weight.t()).exp()
        left, right = h.chunk(2, dim=1)
        y = (h @ frozen.t()) * h + h.sin() + torch.cat([left * right.flip(1), left.t().t() * left], 1)
        y.sum().backward()
    # The input of the first product; h, in all its views; and two results that are flipped and multiplied.
    assert sorted(sent) == sorted([buffer.nbytes, h.nbytes, h.nbytes, h.nbytes // 2])


def test_small_views_of_a_large_memory_are_written_alone(tmp_path, sent):
    weight = torch.randn(64, requires_grad=True)
    large = torch.randn(1000, 64)
    expected = torch.autograd.grad((large[3:40] * weight).sum(), weight)[0]
    with spill(tmp_path, KIB):
        loss = (large[3:40] * weight).sum()
        large = None
        equal([loss, *torch.autograd.grad(loss, weight)], [loss, expected])
    assert sent == [37 * 64 * 4]


def test_what_is_alive_in_the_backward_is_not_read(tmp_path, sent):
    weight, x = torch.randn(64, requires_grad=True), torch.randn(1000, 64)
    disk = spill(tmp_path, KIB)
    with disk:
        (x * weight).sum().backward()
        assert disk.read_nbytes == 0
        loss = (torch.ones(1000, 64) * weight).sum()
        loss.backward()
    assert disk.read_nbytes == x.nbytes
    assert weight.grad is not None


@pytest.mark.parametrize("ahead", [1, 3000, 1 << 26])
def test_a_chain_is_read_once_in_reverse_and_ahead(tmp_path, sent, monkeypatch, ahead):
    monkeypatch.setattr("distdl_rma.jobs.out_of_core.spill._AHEAD_NBYTES", ahead)
    asked, prefetch = [], Scratch.prefetch
    monkeypatch.setattr(Scratch, "prefetch", lambda *which: (asked.append(1), prefetch(*which)))
    disk = spill(tmp_path, KIB)
    x = torch.randn(500, requires_grad=True)
    with disk:
        y = x
        for _ in range(20):
            y = (y * 1.01).sin().exp()
        y = y.sum()
        y.backward()
    # The last result is alive, and so is x.
    assert len(asked) >= 37
    assert disk.read_nbytes <= disk.written_nbytes == sum(sent)
    assert nothing_on_disk(disk)


def test_bits_of_conjugates_strides_and_offsets_come_back(tmp_path, sent):
    torch.manual_seed(4)
    x = torch.randn(30, 40, dtype=torch.complex64, requires_grad=True)

    def step():
        y = x * 2
        views = y.conj(), y[3:, 5::2], y.t(), y.imag, torch._neg_view(y), y[:1].expand(9, 40)
        return torch.autograd.grad(sum((view * view).abs().sum() for view in views), x)

    expected = step()
    disk = spill(tmp_path, 64)
    with disk:
        (found,) = step()
    assert torch.equal(found, *expected)
    for change in (lambda y: y.conj()[2:], lambda y: torch._neg_view(y).t(), lambda y: y[7, 3:30:2]):
        view = change(x.detach().clone())
        facts, values = layout(view), view.clone()
        packed = disk._pack(view)
        del view
        back = disk._unpack(packed)
        assert layout(back) == facts
        assert torch.equal(back, values)
    assert disk.read_nbytes >= 2 * x.nbytes


def layout(x):
    return x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg(), x.data_ptr() % 64


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpoints(tmp_path, reentrant):
    torch.manual_seed(3)
    blocks = nn.ModuleList(made("mlp")[0] for _ in range(4))
    x, disk = torch.randn(100, 64, requires_grad=True), spill(tmp_path, KIB)

    def forward(x):
        for block in blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant)
        return x

    expected = outcome(lambda: step(forward, x), blocks)
    with disk:
        # A backward at once would find some tensors in memory, which then are not written.
        equal(outcome(lambda: step(forward, x, lambda: settled(disk)), blocks), expected)
    assert disk.written_nbytes >= 4 * x.nbytes
    assert nothing_on_disk(disk)


def test_within_a_checkpoint(tmp_path):
    model, x = made("mlp")

    def inside(context, x):
        with context:
            return model(x)

    def forward(context, x):
        return checkpoint(partial(inside, context), x.requires_grad_(), use_reentrant=False)

    found, expected = (
        outcome(lambda context=context: step(partial(forward, context), x), model)
        for context in (spill(tmp_path, KIB), torch.enable_grad())
    )
    equal(found, expected)


def test_a_graph_is_used_behind_the_context(tmp_path, sent):
    model, x = made("unet")
    disk, expected = spill(tmp_path, KIB), outcome(lambda: twice(model, x), model)

    def behind():
        with disk:
            loss = result(model, x)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    equal(outcome(behind, model), expected)
    assert nothing_on_disk(disk)


def test_a_graph_outlives_its_context_object_and_then_frees_its_file(tmp_path):
    x = torch.randn(1000, requires_grad=True)
    with spill(tmp_path, KIB) as disk:
        loss = x.exp().sin().sum()
    (thread,) = disk._scratch._thread._threads
    del disk
    gc.collect()
    assert thread.is_alive()
    loss.backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])
    del loss
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_graph_without_a_backward_frees_its_space(tmp_path, sent):
    disk = spill(tmp_path, KIB)
    for _ in range(3):
        with disk:
            loss = (torch.randn(1000, requires_grad=True) * 2).exp().sum()
        assert settled(disk).used_nbytes > 0
        del loss
        assert nothing_on_disk(disk)


def test_second_derivatives_have_the_same_bits(tmp_path):
    torch.manual_seed(5)
    x, w = (torch.randn(40, 40, requires_grad=True) for _ in range(2))

    def second():
        y = (x @ w).tanh().exp()
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, w))

    expected = second()
    with spill(tmp_path, KIB):
        equal(second(), expected)


def test_backwards_of_two_graphs_at_a_time(tmp_path):
    torch.manual_seed(6)
    weights = [torch.randn(2000, requires_grad=True) for _ in range(4)]
    expected = [torch.autograd.grad(deep(w), w)[0] for w in weights]
    with spill(tmp_path, KIB):
        losses = [deep(w) for w in weights]
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda loss, w: torch.autograd.grad(loss, w)[0], losses, weights)]
    equal(found, expected)


def deep(w):
    y = w
    for _ in range(30):
        y = (y * 1.001).sin()
    return y.sum()


CHANGES = {
    "large result": lambda y, w: y.detach().mul_(2),
    "view of it": lambda y, w: y[3:5].detach().zero_(),
    "parameter": lambda y, w: w.mul_(2),
}


@pytest.mark.parametrize("shape", [(2000,), (3,)])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wait", [False, True])
def test_a_change_in_place_is_refused_as_torch_refuses_it(tmp_path, change, shape, wait):
    def step(disk):
        w = torch.randn(shape, requires_grad=True)
        y = (w * w).exp()
        if disk and wait:
            settled(disk)
        with torch.no_grad():
            CHANGES[change](y, w)
        y.sum().backward()

    message = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        step(None)
    with spill(tmp_path, KIB) as disk, pytest.raises(RuntimeError, match=message):
        step(disk)


def test_a_change_in_place_between_two_saves_makes_two_pieces(tmp_path, sent):
    x = torch.randn(1000, requires_grad=True)

    def step():
        y = x * 1.0
        a = y.sin().sum()
        with torch.no_grad():
            y.mul_(2)
        return a, (y * y).sum()

    with spill(tmp_path, KIB):
        _, second = step()
        found = torch.autograd.grad(second, x)[0]
    assert torch.equal(found, torch.autograd.grad(step()[1], x)[0])
    assert len(sent) == 2


def test_a_full_disk_is_raised_where_the_forward_meets_it(tmp_path):
    model, x = made("unet")
    disk, after = spill(tmp_path, KIB, quota="64KiB"), []
    message = r"the quota is used up; .* quota: 65536 bytes; allow a larger quota"
    with pytest.raises(DataError, match=message), disk:  # noqa: PT012
        result(model, x)
        after.append(1)
    assert not after
    gc.collect()
    small = torch.randn(1000, requires_grad=True)
    with disk:
        small.exp().sum().backward()
    assert torch.equal(small.grad, small.exp())


def test_a_write_that_fails_late_fails_the_step_and_the_next_one_works(tmp_path, monkeypatch):
    x, pwrite = torch.randn(1000, requires_grad=True), os.pwrite

    def full(*_):
        raise OSError(28, "No space left on device")

    disk = spill(tmp_path, KIB)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DataError, match="No space left on device"), disk:  # noqa: PT012
        loss = (x * 2).exp().sum()
        disk._scratch.flush()
        # Kept in memory: the gradient is right all the same.
        loss.backward()
        assert torch.equal(x.grad, 2 * (x * 2).exp())
    monkeypatch.setattr(os, "pwrite", pwrite)
    with disk:
        assert torch.equal(torch.autograd.grad((x * 2).exp().sum(), x)[0], x.grad)
    assert nothing_on_disk(disk)


@pytest.mark.parametrize("above", ["much", 0, -1])
def test_a_size_that_is_none_is_refused(tmp_path, above):
    words = "the size above which tensors are spilled is a whole number"
    with pytest.raises(ConfigurationError, match=words):
        spill(tmp_path, above)


def test_a_context_is_entered_once_at_a_time_and_contexts_nest(tmp_path):
    disk, x = spill(tmp_path, KIB), torch.randn(1000, requires_grad=True)
    with disk:
        with pytest.raises(ProtocolError, match="entered already"):
            disk.__enter__()
        with spill(tmp_path, KIB) as inner:
            loss = x.exp().sum()
        loss.backward()
    assert disk.written_nbytes == 0
    assert nothing_on_disk(inner)


def test_tensors_of_other_kinds_stay_in_memory(tmp_path):
    x = torch.randn(200, 200, requires_grad=True)
    dense = torch.randn(200, 200)
    sparse = (dense * (dense > 1)).to_sparse()
    with spill(tmp_path, KIB) as disk:
        torch.sparse.mm(sparse, x).sum().backward()
    torch.testing.assert_close(x.grad, sparse.to_dense().sum(0)[:, None].expand(200, 200))
    assert disk.written_nbytes == 0


GROWN = """
import sys, torch
from torch import nn
from distdl_rma import spill
from benchmarks.memory import status_kib
torch.set_num_threads(1)
model, x = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(50))), torch.randn(1, 4, 1024, 1024)
with spill(sys.argv[1], sys.argv[2]):
    before = status_kib("VmHWM")
    model(x).sum().backward()
    print(status_kib("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_grows_by_less(tmp_path):
    spilled, kept = (int(said(GROWN, tmp_path, above)) for above in ("1MiB", "1TiB"))
    # 50 saved tensors of 16 MiB.
    assert kept > 800 << 10
    assert spilled < kept / 2

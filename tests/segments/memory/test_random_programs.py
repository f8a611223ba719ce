"""Random programs of all ranks against plain arrays: what buffers hold, whatever is called in whatever order.

All ranks draw the same program. Each rank carries out its own part and keeps a model of all buffers: their
bytes, the notifications that nobody has taken yet, and the words that atomics change. Each rank writes to a
stripe of its own in every buffer. ``STRESS_EXAMPLES`` in the environment is the number of programs.
"""

from __future__ import annotations

import collections
import functools
import os
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from distdl_rma import ArgumentError, ClosedError, Machine, ShapeError

pytestmark = pytest.mark.mpi

WAYS = [("auto", "none"), ("auto", "thread"), ("remote", "none"), ("remote", "thread")]
STRIPE, WORDS, NOTES = 1 << 17, 2, 3
DTYPES = ["u1", ">i2", "f4", "i8", "c16", "f2", [("a", "<i4"), ("b", ">f8")]]
FORMS = {
    "row": lambda x: x,
    "reversed": lambda x: x[::-1],
    "every other": lambda x: np.repeat(x, 2)[::2],
    "columns": lambda x: x[: len(x) // 2 * 2].reshape(2, -1).T,
    "bytes": lambda x: x.tobytes(),
    "memoryview": lambda x: memoryview(x.tobytes()),
    "a number": lambda x: x[0] if len(x) else x,
    "tensor": lambda x: torch.from_numpy(x) if x.dtype.isnative and x.dtype.names is None else x,
    "tensor, cut": lambda x: torch.from_numpy(x.view(np.uint8).copy())[::3],
}
REFUSED = {
    "offset": lambda remote: remote.put(b"12", remote.nbytes - 1),
    "index": lambda remote: remote.put_notify(b"1", remote.notifications),
    "value": lambda remote: remote.put_notify(b"1", 0, 1 << 32),
    "list": lambda remote: remote.put_list_notify([(b"1", 0), (b"1", remote.nbytes)], 0),
    "queue": lambda remote: remote.put(b"1", 0, "a"),
    "word": lambda remote: remote.fetch_add(4, 1),
}
KINDS = (int, np.int16, np.uint16, np.int64)
RANK, DRAW = st.integers(0, 11), st.integers(0, 1 << 40)
QUEUE = st.sampled_from((None, "a", "b"))


def content(data):
    return np.frombuffer(
        data if isinstance(data, (bytes, memoryview)) else np.asarray(data).tobytes(), np.uint8
    )


def mine(act):
    """What goes wrong on a rank ends its part of the program; all ranks raise it when they meet next."""

    @functools.wraps(act)
    def acts(self, **drawn):
        try:
            act(self, **drawn)
        except Exception as error:
            self.problem = (
                self.problem or f"rank {self.me}: {type(error).__name__} {error} in {act.__name__} {drawn}"
            )

    return acts


class Programs(RuleBasedStateMachine):
    def __init__(self, machine, comm):
        super().__init__()
        self.machine, self.comm, self.segments = machine, comm, machine.segments
        self.me, self.size, self.problem, self.buffer = comm.rank, comm.size, None, None
        self.queues = {name: self.segments.queue(name) for name in "ab"}
        # The arrays of posted puts and gets, with what gets must give.
        self.held = {name: [] for name in "ab"}
        self.queues[None], self.step = None, 0
        # By rank, the queues of gets that may still be under way.
        self.getting = collections.defaultdict(set)
        self.register()

    def register(self):
        """Everybody's new buffer: a stripe and words for each writer, and a last word that nobody uses."""
        size = self.size
        self.words_at, nbytes = size * STRIPE, size * (STRIPE + 8 * WORDS) + 8
        self.buffer = self.segments.get_segment_buffer(nbytes, size * (NOTES + 1), "programs")
        self.buffer.array[:] = 0
        self.remotes = self.buffer.exchange(dict.fromkeys(range(size), ()), "programs")
        self.there = np.zeros((size, nbytes), np.uint8)
        # The step that wrote each byte last, and by writer and reader the step of the last flush.
        self.written, self.flushed = np.zeros((size, nbytes), int), np.zeros((size, size), int)
        self.given, self.before = {}, self.counted()
        # By writer and reader the number of notifications taken; by reader, how many this writer knows of.
        self.taken, self.known = collections.Counter(), collections.Counter()
        self.expected = collections.Counter()

    def counted(self):
        return {
            name: getattr(self.segments.counters, name)
            for name in ("puts", "bytes_put", "gets", "bytes_got", "notifications")
        }

    def count(self, writer, **more):
        if writer == self.me:
            self.expected.update(more)

    def acting(self, writer, reader):
        """The remote buffer, for the rank that acts, while nothing has gone wrong."""
        self.step += 1
        return self.remotes[reader] if writer == self.me and not self.problem else None

    def may_write(self, writer, reader, at, nbytes):
        """Before bytes are written again, those that are on their way arrive, in either direction."""
        for queue in sorted(self.getting.pop(writer, ())):
            if writer == self.me and not self.problem:
                self.end_queue(queue=queue, wait=True)
        if (self.written[reader, at : at + nbytes] > self.flushed[writer, reader]).any():
            self.flush(writer, reader)

    def wrote(self, reader, at, data):
        self.there[reader, at : at + len(data)] = data
        self.written[reader, at : at + len(data)] = self.step

    def flush(self, writer, reader):
        if remote := self.acting(writer, reader):
            remote.flush()
        self.flushed[writer, reader] = self.step

    def part(self, writer, draw, most=STRIPE):
        """Values that no other step has, and a place for them; a few are long."""
        dtype = np.dtype(DTYPES[draw % 7])
        nbytes = (0, dtype.itemsize, 40 * dtype.itemsize, most)[draw // 7 % 4]
        values = np.random.default_rng((draw, self.step)).integers(0, 256, nbytes, np.uint8)
        values = values[: nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return values, writer * STRIPE + draw // 28 % (STRIPE - nbytes + 1)

    @rule(
        writer=RANK,
        reader=RANK,
        draw=DRAW,
        form=st.sampled_from(sorted(FORMS)),
        queue=QUEUE,
        index=st.integers(-NOTES, NOTES - 1),
    )
    @mine
    def put(self, writer, reader, draw, form, queue, index):
        writer, reader = writer % self.size, reader % self.size
        values, at = self.part(writer, draw)
        data = FORMS[form](values)
        whole = content(data).copy()
        self.may_write(writer, reader, at, len(whole))
        remote = self.acting(writer, reader)
        self.wrote(reader, at, whole)
        self.count(writer, puts=1, bytes_put=len(whole))
        kind = KINDS[draw % 4] if at < 1 << 15 else int
        if remote and index < 0:
            remote.put(data, kind(at), self.queues[queue])
        if index >= 0:
            value = self.gives(writer, reader, index)
            if remote:
                remote.put_notify(data, kind(self.note(writer, index)), value, at, self.queues[queue])
        if remote:
            if queue is None:
                values.view(np.uint8)[:] = 255
            else:
                self.held[queue].append((data, whole))

    @rule(writer=RANK, reader=RANK, draws=st.lists(DRAW, max_size=5), queue=QUEUE, notify=st.booleans())
    @mine
    def put_list(self, writer, reader, draws, queue, notify):
        writer, reader = writer % self.size, reader % self.size
        parts = [self.part(writer, draw, 3000) for draw in draws]
        for values, at in parts:
            self.may_write(writer, reader, at, values.nbytes)
        remote = self.acting(writer, reader)
        # Of those that overlap the first: they have no order.
        taken, free = np.zeros(self.there.shape[1], bool), []
        for values, at in parts:
            if not taken[at : at + values.nbytes].any():
                taken[at : at + values.nbytes] = True
                free.append((values, at))
                self.wrote(reader, at, content(values))
                self.count(writer, puts=1, bytes_put=values.nbytes)
        if remote and not notify:
            remote.put_list(iter(free), self.queues[queue])
        if notify:
            value = self.gives(writer, reader, 0)
            if remote:
                remote.put_list_notify(free, self.note(writer, 0), value, self.queues[queue])
        if remote and queue:
            self.held[queue] += [(values, content(values)) for values, _ in free]

    @rule(
        reader=RANK,
        owner=RANK,
        draws=st.lists(DRAW, max_size=4),
        way=st.sampled_from(("one by one", "list", "notified")),
        queue=QUEUE,
    )
    @mine
    def get(self, reader, owner, draws, way, queue):
        """A rank gets what it has put."""
        reader, owner = reader % self.size, owner % self.size
        self.flush(reader, owner)
        remote = self.acting(reader, owner)
        if queue and way != "notified":
            self.getting[reader].add(queue)
        parts = [self.part(reader, draw) for draw in draws]
        self.count(reader, gets=len(parts), bytes_got=sum(out.nbytes for out, _ in parts))
        self.count(reader, notifications=len(parts) if way == "notified" else 0)
        if not remote:
            return
        wanted = [self.there[owner, at : at + out.nbytes] for out, at in parts]
        for each, _ in parts:
            each.view(np.uint8)[:] = 99
        if way == "list":
            remote.get_list(parts, self.queues[queue])
        elif way == "one by one":
            for out, at in parts:
                remote.get(torch.from_numpy(out) if out.dtype == np.int64 else out, at, self.queues[queue])
        else:
            with self.segments.get_segment_buffer(0, len(parts) + 1, "inbox") as inbox:
                for number, (out, at) in enumerate(parts):
                    remote.get_notify(out, inbox, number, 5 + number, at)
                for _ in parts:
                    number = inbox.notify_waitsome()
                    assert inbox.notify_reset(number) == 5 + number
                    assert (content(parts[number][0]) == wanted[number]).all()
        if way != "notified" and queue:
            self.held[queue] += [(out, each.copy()) for (out, _), each in zip(parts, wanted, strict=True)]
        else:
            assert all((content(out) == each).all() for (out, _), each in zip(parts, wanted, strict=True))

    @rule(queue=st.sampled_from("ab"), wait=st.booleans())
    @mine
    def end_queue(self, queue, wait):
        """Posted puts have been read and gets are there: what was posted is still what it was."""
        if wait or self.queues[queue].test():
            self.queues[queue].wait()
            assert len(self.queues[queue]) == 0 and self.queues[queue].test()
            assert all((content(data) == wanted).all() for data, wanted in self.held[queue])
            for data, _ in self.held[queue]:
                if isinstance(data, np.ndarray):
                    data[...] = data.dtype.type(0) if data.dtype.names is None else 0
            self.held[queue].clear()

    def note(self, writer, index):
        return writer * NOTES + index

    def gives(self, writer, reader, index, last=False):
        """Value of the next notification; values of an index are remembered until the reader takes them."""
        pending = self.given.setdefault((writer, reader), {}).setdefault(index, [])
        # The same one again and again, unless the one before was not taken.
        value = (self.step, 1 << 31 | self.step, (1 << 32) - self.step)[self.step % 3] if pending else 5
        pending.append((value, self.step, last))
        self.count(writer, notifications=1)
        return value

    @rule(writer=RANK, reader=RANK, index=st.integers(0, NOTES - 1), last=st.booleans(), draw=DRAW)
    @mine
    def notify(self, writer, reader, index, last, draw):
        writer, reader = writer % self.size, reader % self.size
        remote = self.acting(writer, reader)
        value = self.gives(writer, reader, index, last)
        if remote:
            remote.notify(KINDS[draw % 4](self.note(writer, index)), np.uint32(value), last=last)

    @precondition(lambda self: any(self.given.values()))
    @rule(draw=DRAW, way=st.sampled_from(("wait", "some", "test")))
    @mine
    def take(self, draw, way):
        """Who sees a notification sees all that was put before it, and values of one index in their order.

        A last notification is seen after all that the same rank gave before it.
        """
        pairs = [(*pair, index) for pair, given in sorted(self.given.items()) for index in sorted(given)]
        writer, reader, index = pairs[draw % len(pairs)]
        given, at = self.given[writer, reader].pop(index), self.note(writer, index)
        ack = self.size * NOTES
        self.count(reader, notifications=writer != reader)
        self.taken[writer, reader] += 1
        number = self.taken[writer, reader]
        if self.acting(reader, writer):
            try:
                self.sees(writer, reader, at, given, way)
            finally:
                if writer != reader:
                    self.remotes[writer].notify(ack + reader, number)
        elif self.me == writer:
            # It would write over what the reader compares. The reader may have taken the next ones, too.
            while self.known[reader] < number and not self.problem:
                self.known[reader] = self.buffer.notify_wait(ack + reader)

    def sees(self, writer, reader, at, given, way):
        values, seen, buffer = [value for value, *_ in given], 0, self.buffer
        deadline = time.monotonic() + 15
        while seen < len(values):
            if way == "wait":
                value = buffer.notify_wait(at, senders=[writer])
            else:
                while way == "test" and buffer.notify_test(at, 1) is None and time.monotonic() < deadline:
                    os.sched_yield()
                assert buffer.notify_waitsome(at, np.int16(1)) == at
                here, value = buffer.notification(at), buffer.notify_reset(at)
                # A later one may have come in between, none is lost.
                assert here in values[seen : values.index(value, seen) + 1]
            seen = values.index(value, seen) + 1
            _, step, last = given[seen - 1]
            stripe = slice(writer * STRIPE, (writer + 1) * STRIPE)
            known = self.written[reader, stripe] <= step
            assert (buffer.array[stripe] == self.there[reader, stripe])[known].all()
            for index, others in self.given[writer, reader].items() if last else ():
                earlier = sum(before < step for _, before, _ in others)
                visible = buffer.notification(self.note(writer, index))
                assert not earlier or visible in [value for value, *_ in others[earlier - 1 :]]

    @rule(
        writer=RANK,
        owner=RANK,
        word=st.integers(0, WORDS - 1),
        value=st.integers(-(1 << 63), (1 << 63) - 1),
        op=st.sampled_from(("add", "one more", "swap", "store", "load", "equal", "unequal")),
    )
    @mine
    def atomic(self, writer, owner, word, value, op):
        writer, owner = writer % self.size, owner % self.size
        remote, at = self.acting(writer, owner), self.words_at + 8 * (writer * WORDS + word)
        model = self.there[owner, at : at + 8].view(np.int64)
        was, value = int(model[0]), int(value)
        calls = {
            "add": (lambda: remote.fetch_add(at, value), was + value),
            "one more": (lambda: remote.fetch_add(np.int64(at), True), was + 1),
            "swap": (lambda: remote.atomic_swap(at, value), value),
            "store": (lambda: remote.atomic_store(at, value), value),
            "load": (lambda: remote.atomic_load(at), was),
            "equal": (lambda: remote.compare_swap(at, was, value), value),
            "unequal": (lambda: remote.compare_swap(at, was ^ 1, value), was),
        }
        call, after = calls[op]
        model[0] = (after + (1 << 63)) % (1 << 64) - (1 << 63)
        if remote:
            assert call() == (None if op == "store" else was)
            assert remote.atomic_load(at) == model[0]

    @rule(writer=RANK, reader=RANK, wrong=st.sampled_from(sorted(REFUSED)))
    @mine
    def refused(self, writer, reader, wrong):
        """Nothing moves, and all goes on."""
        if remote := self.acting(writer % self.size, reader % self.size):
            with pytest.raises((ArgumentError, ShapeError)):
                REFUSED[wrong](remote)

    @rule(group=st.booleans(), renew=st.sampled_from((False, False, True)))
    def meet(self, group, renew):
        """After a flush all is there, however a rank learns of it."""
        self.meets(group)
        if renew:
            self.buffer.free()
            with pytest.raises(ClosedError, match="already freed"):
                self.buffer.notify_test()
            self.register()

    @mine
    def flush_all(self, group):
        if group:
            self.machine.group().flush()
        else:
            for remote in self.remotes.values():
                remote.flush()

    @mine
    def check_all(self):
        for name in "ab":
            self.end_queue(queue=name, wait=True)
        assert (self.buffer.array == self.there[self.me]).all()
        wanted = [0] * (self.size * (NOTES + 1))
        for (writer, reader), given in self.given.items():
            if reader == self.me:
                for index, values in given.items():
                    wanted[self.note(writer, index)] = values[-1][0]
        found = [self.buffer.notification(at) for at in range(len(wanted))]
        assert found == wanted
        assert self.buffer.notify_test() == next((at for at, value in enumerate(wanted) if value), None)
        now = self.counted()
        moved = {name: now[name] - self.before[name] for name in now}
        assert moved == {name: self.expected[name] for name in now}

    def meets(self, group):
        self.flush_all(group=group)
        self.agree()
        self.check_all()
        self.agree()
        self.flushed[...] = self.step
        self.getting.clear()

    def agree(self):
        problems = [problem for problem in self.comm.allgather(self.problem) if problem]
        if problems:
            self.problem = "told"
            raise AssertionError("\n".join(problems))

    def teardown(self):
        if self.problem != "told":
            self.meets(False)
        self.comm.Barrier()
        self.buffer.free()


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize(("transport", "progress"), WAYS)
def test_buffers_hold_what_the_model_says_and_nothing_is_left_behind(comm, transport, progress):
    with Machine(comm, segment_size="4MiB", timeout=15, transport=transport, progress=progress) as machine:
        before = machine.segments.stats()
        how = settings(
            max_examples=int(os.environ.get("STRESS_EXAMPLES", "15")),
            stateful_step_count=50,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        run_state_machine_as_test(functools.partial(Programs, machine, comm), settings=how)
        after = machine.segments.stats()
        assert (after.used, after.owners, after.largest_free) == (
            before.used,
            before.owners,
            before.largest_free,
        )

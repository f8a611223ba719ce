"""Random jobs that save, go back and are killed, among files of others; and damaged or hostile checkpoints.

A job is compared with a model of its folder: names and the value that each checkpoint holds. A kill is a
process that changes no name any more from one of its operations on. A damaged checkpoint is restored as it
was saved, or is an error of the library on all ranks, within bounds of time and memory, that has changed no
object.
"""

import errno
import json
import os
import random
import re
import resource
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

from distdl_rma import CheckpointError, Checkpoints, DistdlError, Partition, load_checkpoint, shard
from tests.fuzz.outcomes import folder_of_all

REFUSED: Counter[str] = Counter()
DATA, MANIFEST = "data.safetensors", "manifest.json"
COUNTED = re.compile(r"step-(0|[1-9]\d*)(\.old)?")
SECONDS, MOST_KIB = 30, 1 << 20


def check(P_world: Partition, comm, seed: int) -> None:
    """One job with its folder, or one damaged checkpoint, with all ranks of ``comm``."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    with folder_of_all(comm) as folder:
        (damaged if rng.random() < 0.5 else Jobs)(rng, comm, P_world, folder)


# --- Jobs and their folder


def mark_of(path):
    """The value that a checkpoint holds, by its manifest; None for what is none."""
    try:
        return json.loads((path / MANIFEST).read_text())["body"]["forms"]["mark"]["state"]
    except (OSError, ValueError):
        return None


def counted(names):
    """Names of complete checkpoints, newest first: by step, then the one that was not replaced."""
    found = [(int(name[1]), name[2] is None, name[0]) for name in map(COUNTED.fullmatch, names) if name]
    return [name for *_, name in sorted(found, reverse=True)]


def step_of(name):
    return int(COUNTED.fullmatch(name)[1])


def is_foreign(path, alone=False):
    """Whether a save may not touch this: no link, with files that are of no checkpoint."""
    if path.is_symlink() or not path.exists() or (mark_of(path) is not None and not alone):
        return False
    return not path.is_dir() or not {each.name for each in path.iterdir()} <= {DATA, MANIFEST}


@contextmanager
def dying(number, killed):
    """Within, the process changes no name any more from one of its operations on."""
    done = 0

    def within(real, changes=lambda *_: True):
        def call(path, *args, **options):
            nonlocal done
            if changes(*args):
                done += 1
                if done > number:
                    killed.append(real.__name__)
                    raise OSError(errno.EIO, "killed")
            return real(path, *args, **options)

        return call

    writes = within(Path.open, lambda mode="r", *_: "w" in mode)
    changed = {name: within(getattr(Path, name)) for name in ("rename", "unlink", "rmdir", "mkdir")}
    with mock.patch.multiple(Path, open=writes, **changed):
        yield


class Jobs:
    """Jobs, one after the other, on one folder; and what the folder must hold then."""

    def __init__(self, rng, comm, P_world, folder):
        self.rng, self.comm, self.P_world, self.number = rng, comm, P_world, 0
        self.folder, self.other = folder / "run", folder / "other"
        self.whole = torch.zeros(rng.randint(1, 40), 7)
        # Of files of others: their texts are all there.
        self.texts, self.said = set(), []
        if comm.rank == 0:
            self.folder.mkdir()
        comm.Barrier()
        with Checkpoints(self.other, keep=None, machine=P_world) as kept:
            for step in (3, 6):
                kept.save(self.state(-step), step)
        self.others = self.seen_other()
        for _ in range(rng.randint(1, 4)):
            self.job()

    def state(self, mark):
        columns = self.P_world.create_cartesian_topology_partition((1, self.P_world.size))
        cut = shard(columns, torch.full((3, 5), float(mark)))
        return {"mark": mark, "whole": torch.full_like(self.whole, mark), "cut": cut}

    def say(self, text):
        self.said.append(text)

    def fail_unless(self, holds, text):
        assert holds, "\n".join([*self.said, text, str(self.seen())])

    def seen(self):
        """Directories with a manifest, and what they hold; as rank 0 sees them, on all ranks."""
        found = None
        self.comm.Barrier()
        if self.comm.rank == 0:
            found = {path.name: mark_of(path) for path in sorted(self.folder.iterdir())}
            found = {name: mark for name, mark in found.items() if mark is not None and ".tmp" not in name}
        return self.comm.bcast(found)

    def on_first(self, function):
        """What a function returns on rank 0, on all ranks."""
        self.comm.Barrier()
        return self.comm.bcast(function() if self.comm.rank == 0 else None)

    def seen_other(self):
        return self.on_first(lambda: {p: p.read_bytes() for p in self.other.rglob("*") if p.is_file()})

    def job(self):
        self.keep, asynchronous = self.rng.choice([None, 1, 2, 3]), self.rng.random() < 0.3
        self.kept = Checkpoints(self.folder, keep=self.keep, asynchronous=asynchronous, machine=self.P_world)
        self.at, alive = None, True
        self.say(f"a job, keep={self.keep}, asynchronous={asynchronous}")
        for _ in range(self.rng.randint(1, 6)):
            if alive:
                kind = self.rng.choice(["save"] * 3 + ["restore", "foreign"] * 2 + ["kill"])
                alive = getattr(self, f"_{kind}")() is not False
        if alive:
            self.kept.close()
        self.fail_unless(self.seen_other() == self.others, "the other run has changed")

    # Operations of a job

    def _restore(self):
        before = self.seen()
        names = counted(before)
        chosen = self.rng.choice([None, *map(step_of, names)])
        name = next((name for name in names if chosen in (None, step_of(name))), None)
        self.say(f"restore step={chosen}")
        state = self.state(10**6)
        found = self.kept.restore(state, step=chosen)
        self.fail_unless(found == (step_of(name) if name else 0), f"restored {found} in place of {name}")
        if name:
            self.at = found
            mark, cut = before[name], state["cut"].full_tensor()
            same = state["mark"] == mark and state["whole"].eq(mark).all() and cut.eq(mark).all()
            self.fail_unless(same, f"{name} holds {state['mark']} in place of {mark}")

    def _next_step(self):
        return max(0, (self.at or 0) + self.rng.choice([0, 1, 1, 1, 2, 3, -2, 5]))

    def _save(self):
        self.number += 1
        step, before = self._next_step(), self.seen()
        self.say(f"save {step} at {self.at}: {before}")
        if self._in_the_way(step):
            self._refused(step, before)
            return
        wanted = self._wanted(before, step, self.number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.kept.save(self.state(self.number), step)
            self.kept.wait()
        self.at = step
        found = self.seen()
        self.fail_unless(found == wanted, f"wanted: {wanted}, got: {found}")
        self.fail_unless(not self._rests(), f"left: {self._rests()}")
        self._check_texts()

    def _kill(self):
        self.number += 1
        step, before, killed = self._next_step(), self.seen(), []
        if self._in_the_way(step):
            return True
        number = self.rng.randint(0, 12)
        self.say(f"save {step} at {self.at}, killed behind {number} changes: {before}")
        with dying(number if self.comm.rank == 0 else 10**6, killed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call in (lambda: self.kept.save(self.state(self.number), step), self.kept.wait):
                try:
                    call()
                except CheckpointError as error:
                    if "killed" not in str(error):
                        raise
            self.kept.close()
        found = self.seen()
        published = self.number in found.values()
        for name, mark in before.items():
            if mark not in found.values():
                # Steps of complete ones that are as new.
                newer = {step} | {step_of(each) for each in counted(before) if step_of(each) <= step}
                newer = {each for each in newer if COUNTED.fullmatch(name) and each > step_of(name)}
                old = COUNTED.fullmatch(name) and self.keep is not None and len(newer) >= self.keep
                other = name.endswith(".old") and name[:-4] in before
                replaced = COUNTED.fullmatch(name) and (step_of(name) == step or other)
                self.fail_unless((published and (old or replaced)) or replaced, f"lost {name}")
        newest = found[counted(found)[0]] if counted(found) else None
        self.fail_unless(newest == self.number if published else newest in (None, *before.values()), "newest")
        self._check_texts()
        return False

    def _refused(self, step, before):
        said = "no error"
        try:
            self.kept.save(self.state(self.number), step)
            self.kept.wait()
        except CheckpointError as error:
            said = str(error)
        self.fail_unless("is in the way" in said, said)
        REFUSED["in the way"] += 1
        self.fail_unless(self.seen() == before, f"wanted what was there: {before}")
        self._check_texts()

    def _foreign(self):
        step, kind = self.rng.randint(0, 9), self.rng.randint(0, 7)
        text = f"text {self.number} {len(self.texts)}"
        self.texts |= {text} if self.on_first(lambda: self._place(step, kind, text)) else set()

    def _place(self, step, kind, text):
        # Whether the text is in a file then.
        self.say(f"others put kind {kind} at {step}")
        own = sorted(path for path in self.folder.iterdir() if mark_of(path) is not None)
        own = [path for path in own if not path.is_symlink() and path.suffix in ("", ".retired")]
        file = {
            0: self.folder / f"step-{step}" / "weights.bin",
            1: self.folder / f"step-{step}.tmp" / "x",
            2: self.folder / f"step-{step}.retired" / "x",
            3: self.folder / "step-by-step.tmp" / f"{len(self.texts)}",
            4: self.folder / f"step-0{step}" / MANIFEST,
            5: own[step % len(own)] / f"notes-{len(self.texts)}.txt" if own else self.folder / text,
            6: self.folder / f"step-{step // 3 * 3}",
            7: self.folder / f"step-{step}",
        }[kind]
        if kind in (6, 7):
            target = self.other / file.name
            if not os.path.lexists(file) and (kind == 7 or target.exists()):
                file.symlink_to(target if kind == 6 else "nowhere")
            return False
        if kind != 5 and os.path.lexists(file if kind in (3, 4) else file.parent):
            return False
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return True

    # What must hold

    def _in_the_way(self, step):
        def found():
            path = self.folder / f"step-{step}"
            others = (path.with_name(path.name + suffix) for suffix in (".old", ".tmp"))
            return is_foreign(path) or any(is_foreign(other, alone=True) for other in others)

        return self.on_first(found)

    def _wanted(self, before, step, mark):
        beyond, after = step if self.at is None else min(self.at, step), dict(before)
        taken = self.on_first(lambda: [path.name for path in self.folder.iterdir()])
        for name in counted(before):
            if step_of(name) > beyond:
                number = step_of(name)
                names = (f"step-{number}.retired{f'-{n}' if n > 1 else ''}" for n in range(1, 999))
                free = next(each for each in names if each not in taken)
                taken.append(free)
                after[free] = after.pop(name)
        after[f"step-{step}"] = mark
        for name in counted(after):
            if name.endswith(".old") and name[:-4] in after:
                del after[name]
        others = [name for name in counted(after) if name != f"step-{step}"]
        for name in others[self.keep - 1 :] if self.keep is not None else ():
            del after[name]
        return after

    def _rests(self):
        """Names of what is half written or half deleted."""

        def found():
            paths = [path for path in self.folder.iterdir() if not path.is_symlink()]
            ours = [path for path in paths if COUNTED.fullmatch(path.name.removesuffix(".tmp"))]
            return [p.name for p in ours if not is_foreign(p) and (".tmp" in p.name or mark_of(p) is None)]

        return self.on_first(found)

    def _check_texts(self):
        def texts():
            files = (path for path in self.folder.rglob("*") if path.is_file() and path.name != DATA)
            return {path.read_text() for path in files if path.stat().st_size < 99}

        found = self.on_first(texts)
        self.fail_unless(self.texts <= found, f"files of others are lost: {self.texts - found}")


# --- Damaged and hostile checkpoints

VALUES = [
    None, -1, 0, 7, 1 << 40, 1 << 70, -(1 << 70), 1e308, 8.0, float("nan"), float("inf"), "../../x", "", "8",
    [], {}, True, [[[]]], [1], [[3], 1 << 40], {"dtype": "load"}, {"dtype": "float32"}, {"tensor": "nowhere"},
    {"a": 1}, {"tensor": "ema/0.weight"}, {"scalar": ["float32", "x"]}, {"scalar": ["float32", [1, 2]]},
    {"bytes": "###"}, {"a": 1, "b": 2}, "x" * 1000, {"complex": ["a", 1]}, {"tuple": 5}, {"dict": [[[1], 2]]},
    {"elements": ["|O", [1], {"tensor": "loose/value"}]}, {"masked": [1, 2, 3, 4]}, {"dict": []},
    {"array": 3},
    {"elements": ["<f8", [1 << 40], {"tensor": "loose/value"}]}, {"objects": [[1 << 40], [1]]},
    {"number": ["O", "AAAAAAAAAAA="]}, {"defaultdict": ["eval", []]}, {"set": [[]]}, {"Size": ["a"]},
    "module", "object", json.loads("[" * 900 + "]" * 900), {"Counter": [["a", "b"]]},
    {"number": ["<U9", "//////////8="]},
]  # fmt: skip
TEXTS = (
    "[]", "5", "null", '"x"', "{}", '{"body": {}}', '{"sha256": "x"}', '{"body": {}, "sha256": 5}', "NaN",
    "1" * 9999, "[" * 100_000, '{"a":' * 100_000, '{"body": {"version": 99}, "sha256": "x"}', "\x00" * 999,
    '{"body": {"version": 1e400}, "sha256": "x"}', '{"sha256": "", "body": [1]}',
)  # fmt: skip


def made(fill):
    torch.manual_seed(fill)
    model, ema = (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)) for _ in range(2))
    optimizer = torch.optim.Adam([*model.parameters(), loose := nn.Parameter(torch.rand(5))], lr=0.1 * fill)
    (model(torch.rand(2, 1, 5, 5)).square().mean() + loose.sum()).backward()
    optimizer.step()
    return {
        "model": model, "optimizer": optimizer, "ema": ema, "loose": loose, "best": 1.5 * fill,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
        "plain": {"t": torch.rand(3, 4), "l": [1, (2, {"a": 3})], "s": {1, "a"}, "n": np.float32(fill)},
        "big": np.arange(3, dtype=">i2") * fill,
        "arrays": [np.array(["a", None], object), np.ma.masked_less([1.0, 2], 2)],
        "draws": np.random.Generator(np.random.MT19937(fill)), "more": torch.Generator().manual_seed(fill),
    }  # fmt: skip


def text_of(state):
    """All values of a state."""

    def plain(x):
        if isinstance(x, torch.Tensor):
            return [str(x.dtype), list(x.shape), x.tolist()]
        if isinstance(x, dict):
            return [[plain(key), plain(value)] for key, value in x.items()]
        if isinstance(x, np.ndarray):
            return [x.dtype.str, repr(x.tolist())]
        if isinstance(x, (list, tuple)):
            return [type(x).__name__, *map(plain, x)]
        if isinstance(x, np.random.Generator):
            return plain(x.bit_generator.state)
        if isinstance(x, torch.Generator):
            return plain(x.get_state())
        if isinstance(x, set):
            return sorted(map(repr, x))
        return plain(x.state_dict()) if hasattr(x, "state_dict") else repr(x)

    # Torch makes generators of some hostile values: their places in memory differ.
    return re.sub(r" at 0x[0-9a-f]+", "", str(plain(state)))


def places(x, at=()):
    yield at
    for key, value in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield from places(value, (*at, key))


def damage(rng, step):
    """Damage one checkpoint; returns whether a restored state may differ from the one that was saved."""
    kind = rng.choice(["flip", "cut", "text", "odd", *["signed"] * 6])
    file = step / rng.choice([DATA, MANIFEST])
    if kind == "flip":
        raw = bytearray(file.read_bytes())
        for _ in range(rng.choice([1, 1, 1, 5])):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        file.write_bytes(raw)
    elif kind == "cut":
        sizes = [rng.randrange(file.stat().st_size), file.stat().st_size + 1, 2 << 30, 1 << 40]
        os.truncate(file, rng.choice(sizes))
    elif kind == "text":
        (step / MANIFEST).write_bytes(rng.choice(TEXTS).encode(rng.choice(["utf-8", "utf-8", "utf-16"])))
    elif kind == "odd":
        file.unlink()
        links = (partial(file.symlink_to, to) for to in ("/dev/zero", file, "/etc/passwd"))
        rng.choice([file.mkdir, partial(os.mkfifo, file), list, *links])()
    else:
        body, text = json.loads((step / MANIFEST).read_text())["body"], ""
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            try:
                edit(rng, body)
                text = json.dumps(body)
            except RecursionError:
                # Too deep to be written: that before stays.
                break
        (step / MANIFEST).write_text(f'{{"sha256": "{sha256(text.encode()).hexdigest()}", "body": {text}}}')
    return kind == "signed"


def edit(rng, body):
    """Another value, another key, one fewer, or two changed places, somewhere in a manifest."""
    # Most words are states of generators: fewer of these.
    found = [
        at for at in places(body) if at and (len(at) < 4 or "generators" not in at or rng.random() < 0.01)
    ]
    inside, other = body, body
    at, its = rng.choice(found), rng.choice(found)
    for key in at[:-1]:
        inside = inside[key]
    for key in its:
        other = other[key]
    kind = rng.random()
    if kind < 0.7:
        inside[at[-1]] = json.loads(json.dumps(rng.choice(VALUES)))
    elif kind < 0.8:
        inside.pop(at[-1])
    elif kind < 0.9 and isinstance(inside, dict):
        inside[rng.choice(["", "x", "state", "tensor"])] = json.loads(json.dumps(rng.choice(VALUES)))
    else:
        inside[at[-1]] = json.loads(json.dumps(other))


def damaged(rng, comm, P_world, folder):
    saved = made(1)
    with Checkpoints(folder / "run", machine=P_world) as kept:
        path = kept.save(saved, 20)
    comm.Barrier()
    may_differ = comm.bcast(damage(rng, path) if comm.rank == 0 else None)
    state, wanted = made(2), text_of(saved)
    before, begin = text_of(state), time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def by_all():
        with Checkpoints(folder / "run", machine=P_world) as kept:
            return kept.restore(state)

    said = ""
    for restore in (by_all, lambda: load_checkpoint(folder / "run", state)):
        try:
            step = restore()
            ended, found = "restored", text_of(state)
            differs = may_differ or found == (wanted if step else before)
            assert differs, f"another state is restored:\n{found}\n{wanted}"
        except DistdlError as error:
            ended, found, said = "an error", text_of(state), str(error)
            REFUSED[type(error).__name__] += 1
        assert ended == "restored" or found == before, f"changed before its error: {said}"
        every = comm.allgather((ended, found))
        assert all(each == every[0] for each in every), f"ranks differ: {[each for each, _ in every]}"
        before = found
    assert time.process_time() - begin < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MOST_KIB

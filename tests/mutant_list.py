"""Mutants that no operator of ``mutant_operators.py`` makes: careless edits of protocols and adjoints."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Mutant(NamedTuple):
    """One edit: its name, a file, the text that it replaces, and the new text.

    ``commands`` are the tests that must notice, those of the file's room if there are none: ``"plain"`` or a
    number of ranks, and options of pytest. ``at`` is where ``old`` begins, None if it is there once.
    """

    name: str
    file: str
    old: str
    new: str
    commands: tuple[tuple[str, ...], ...] = ()
    at: int | None = None

    @property
    def key(self) -> str:
        """Hexadecimal number of this edit, which other changes of the file leave as it is."""
        return hashlib.sha256(f"{self.file}\n{self.old}\n{self.new}".encode()).hexdigest()[:12]

    def applied_to(self, text: str) -> str:
        """The file with the edit, or ``ValueError`` if it does not fit there."""
        at = text.find(self.old) if self.at is None else self.at
        if (self.at is None and text.count(self.old) != 1) or not text.startswith(self.old, at):
            raise ValueError(f"mutant {self.name!r} fits {text.count(self.old)} places of {self.file}")
        return text[:at] + self.new + text[at + len(self.old) :]


def _plain(*files: str) -> tuple[tuple[str, ...]]:
    return (("plain", *(f"tests/{file}" for file in files)),)


def _on(ranks: int, *files: str) -> tuple[tuple[str, ...]]:
    return ((str(ranks), *(f"tests/{file}" for file in files)),)


_CHANNEL, _GIVEN_UP = _on(3, "segments/test_channel.py"), _on(3, "segments/test_channel_given_up.py")
_CONV = _on(3, "layers/partitioned/conv/test_conv.py")
_COPIES, _NUMBERS = _on(2, "layers/model/test_replica_check.py"), _on(2, "layers/model/test_numbers.py")

HAND_MADE = (
    Mutant(
        "windows read without dilation",
        "distdl_rma/geometry/halo.py",
        "(stop - 1) * self.stride - self.left + self.span",
        "(stop - 1) * self.stride - self.left + self.kernel",
        _plain("geometry/test_halo.py"),
    ),
    Mutant(
        "a slot is written again before it was read",
        "distdl_rma/segments/channel.py",
        "[lane.notification] < epoch - SLOTS:",
        "[lane.notification] < epoch - SLOTS - 1:",
        _CHANNEL,
    ),
    Mutant(
        "a receive takes what the epoch before left",
        "distdl_rma/segments/channel.py",
        "[lane.notification] < step:",
        "[lane.notification] < step - len(lane.ends):",
        _CHANNEL,
    ),
    Mutant(
        "memory is given back before a late put has come",
        "distdl_rma/segments/channel.py",
        "flag(lane.notification) >= lane.flag_after(self._finished) for",
        "flag(lane.notification) >= 0 for",
        _GIVEN_UP,
    ),
    Mutant(
        "slots are acknowledged before all of an epoch was handed out",
        "distdl_rma/segments/channel.py",
        "                begin = end + 1\n",
        "                begin = end + 1\n                lane.acknowledge(epoch)\n",
        _GIVEN_UP,
    ),
    Mutant(
        "a notification overtakes the put before it",
        "distdl_rma/segments/transport/links.py",
        "return self._arrived >= begun",
        "return True",
        _plain("segments/transport/test_links.py"),
    ),
    Mutant(
        "a rank goes on before all of its node have told it",
        "distdl_rma/segments/collectives/stepped_algorithm.py",
        "        for rank in ranks:\n            word = first",
        "        for rank in ranks[:1]:\n            word = first",
        _on(3, "segments/collectives/test_collective.py"),
    ),
    Mutant(
        "a notification is reset without being returned",
        "distdl_rma/segments/memory/buffer.py",
        "        word = words[index]\n        reset[index] = word\n",
        "        word = words[index]\n        reset[index] = word + 1\n",
        _on(2, "segments/memory/test_notifications.py"),
    ),
    Mutant(
        "what neighbours send back replaces the own gradient",
        "distdl_rma/layers/ops/core/movement.py",
        'add(target, part, out=target)\n            mark("wait")',
        'target[...] = part\n            mark("wait")',
        _CONV,
    ),
    Mutant(
        "a halo is sent back only where this rank needs its gradient",
        "distdl_rma/layers/ops/conv/convolution.py",
        "        if needs_halo:\n            mark",
        "        if needs_halo and needs_x:\n            mark",
        _CONV,
    ),
    Mutant(
        "the corners of a tile are read twice",
        "distdl_rma/layers/ops/conv/own_and_halo.py",
        "            rest = rest.replace(d, low, high)\n",
        "",
        _plain("layers/ops/conv/test_own_and_halo.py"),
    ),
    Mutant(
        "copies of a weight keep their own gradients",
        "distdl_rma/layers/partitioned/core/parameters.py",
        "return None, None, *ctx.owner.sum(ctx.ranks, gradients)",
        "return None, None, *gradients",
        _CONV,
    ),
    Mutant(
        "accumulated gradients are summed again",
        "distdl_rma/layers/sync/gradients.py",
        "            slot.base, parameter.grad = gradient.clone(), None\n",
        "            slot.base, parameter.grad = None, None\n",
        _on(3, "layers/sync/test_gradients.py", "layers/sync/test_accumulation.py"),
    ),
    Mutant(
        "of the tensor behind, bytes are compared from where the one before ended",
        "distdl_rma/layers/model/replica_check.py",
        "self._at, self._offset = self._at + 1, 0\n",
        "self._at += 1\n",
        _COPIES,
    ),
    Mutant(
        "where backwards began is not compared",
        "distdl_rma/layers/model/distribute.py",
        "[Backwards.of(self.machine, ranks), GradientCheck",
        "[GradientCheck",
        _NUMBERS,
    ),
    Mutant(
        "of inputs every call compares the same elements",
        "distdl_rma/layers/checks/model_calls.py",
        "[crc32(sample_of(x, at)) for x in inputs]",
        "[crc32(sample_of(x)) for x in inputs]",
        _COPIES,
    ),
    Mutant(
        "of several backwards the last one counts alone",
        "distdl_rma/layers/split/calls/loss_origin.py",
        "self._number = checksum(start, self._number)",
        "self._number = checksum(start)",
        _NUMBERS,
    ),
    Mutant(
        "a tensor of own data and halo is made again without the halo",
        "distdl_rma/layers/ops/conv/convolution.py",
        "operation.held(x, as_words(x) if x.is_cpu else x, held)",
        "operation.held(x, as_words(x) if x.is_cpu else x)",
        _on(3, "layers/ops/conv/test_convolution.py"),
    ),
    Mutant(
        "parts lie in the order of ranks, not of nodes",
        "distdl_rma/torch_backend/inter_node.py",
        "self._order = layout.my_node, tuple(chain.from_iterable(self._teams))",
        "self._order = layout.my_node, tuple(sorted(chain.from_iterable(self._teams)))",
        _on(4, "torch_backend/test_group.py"),
    ),
)

"""The mutants of ``mutants.py``: careless edits of geometry, protocol, adjoints and callbacks."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One careless edit: what it does, a file, what stands there exactly once, and what that becomes.

    ``command`` says which tests must notice: ``"plain"``, or a number of ranks, and options of pytest.
    """

    name: str
    file: str
    old: str
    new: str
    command: tuple[str, ...]

    def applied_to(self, text: str) -> str:
        """The file with the edit, or ``ValueError`` if it does not fit there exactly once."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"mutant {self.name!r} fits {text.count(self.old)} places of {self.file}")
        return text.replace(self.old, self.new)


def _plain(*files: str) -> tuple[str, ...]:
    return ("plain", *(f"tests/{file}" for file in files))


def _on(ranks: int, *files: str) -> tuple[str, ...]:
    return (str(ranks), *(f"tests/{file}" for file in files))


_INTERVALS, _HALO = _plain("geometry/test_intervals.py"), _plain("geometry/test_halo.py")
_EXCHANGE, _REACH = _plain("geometry/test_exchange.py"), _plain("geometry/test_movements.py")
_CHANNEL, _GIVEN_UP = _on(3, "segments/test_channel.py"), _on(3, "segments/test_channel_given_up.py")
_CONV = _on(3, "layers/conv/test_conv_general.py")
_COLLECTIVE = _on(3, "segments/collectives/test_collective.py")
_NORM, _STATISTICS = _on(3, "layers/norm/test_base.py"), _on(3, "ops/norm/test_statistics.py")
_SYNC = _on(3, "sync/test_gradients.py", "sync/test_accumulation.py")
_NOTIFY = _on(2, "segments/memory/test_notifications.py")

_GEOMETRY = [
    Mutant(
        "blocks are not balanced",
        "distdl_rma/geometry/intervals.py",
        "start + quotient + (part < longer)",
        "start + quotient + (part <= longer)",
        _INTERVALS,
    ),
    Mutant(
        "the last part that meets an interval is forgotten",
        "distdl_rma/geometry/intervals.py",
        "return range(first, max(first, last))",
        "return range(first, max(first, last - 1))",
        _INTERVALS,
    ),
    Mutant(
        "windows read without dilation",
        "distdl_rma/geometry/halo.py",
        "(stop - 1) * self.stride - self.left + self.span",
        "(stop - 1) * self.stride - self.left + self.kernel",
        _HALO,
    ),
    Mutant(
        "the last reader of an input is forgotten",
        "distdl_rma/geometry/halo.py",
        "(stop - 1 + self.left) // self.stride + 1",
        "(stop - 1 + self.left) // self.stride",
        _HALO,
    ),
    Mutant(
        "a window may begin behind the input",
        "distdl_rma/geometry/halo.py",
        "(count - 1) * self.stride >= extent + self.left",
        "(count - 1) * self.stride > extent + self.left",
        _HALO,
    ),
    Mutant(
        "the adjoint of the adjoint is the adjoint",
        "distdl_rma/geometry/exchange.py",
        "self.target, not self.transposed, self.images)",
        "self.target, True, self.images)",
        _EXCHANGE,
    ),
    Mutant(
        "sums count as complete",
        "distdl_rma/geometry/exchange.py",
        "return self.disjoint and sum(box.volume for box in self._filled) == self.need.volume",
        "return sum(box.volume for box in self._filled) == self.need.volume",
        _EXCHANGE,
    ),
    Mutant(
        "shapes that form no grid pass",
        "distdl_rma/geometry/decomposition.py",
        "elif lengths[d][place] != extent:",
        "elif lengths[d][place] < extent:",
        _plain("geometry/test_decomposition.py"),
    ),
]

_PROTOCOL = [
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
        "[lane.notification] < lane.flag_after(epoch, step):",
        "[lane.notification] < lane.flag_after(epoch - 1, step):",
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
        "a put that nobody reads is not waited for",
        "distdl_rma/segments/channel.py",
        "                lane.remote.flush(timeout)\n",
        "                pass\n",
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
        "a round writes to the slot of the epoch before",
        "distdl_rma/segments/collectives/all_push.py",
        "self.rows[(self.epoch + 1) & 1][self._me][...] = row",
        "self.rows[self.epoch & 1][self._me][...] = row",
        _NORM,
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
        _COLLECTIVE,
    ),
    Mutant(
        "a notification is reset without being returned",
        "distdl_rma/segments/memory/buffer.py",
        "        word = words[index]\n        reset[index] = word\n",
        "        word = words[index]\n        reset[index] = word + 1\n",
        _NOTIFY,
    ),
    Mutant(
        "freed neighbours do not join",
        "distdl_rma/segments/transport/heap.py",
        "if at > 0 and sum(self._gaps[at - 1]) == offset:",
        "if at > 1 and sum(self._gaps[at - 1]) == offset:",
        _plain("segments/transport/test_heap.py"),
    ),
    Mutant(
        "short types are not summed in a longer one",
        "distdl_rma/ops/core/movement.py",
        "self._wide = dtype if exchange.disjoint else sum_dtype(dtype)",
        "self._wide = dtype",
        _on(3, "layers/moves/test_base.py", "layers/moves/test_broadcast_reduce.py"),
    ),
]

_ADJOINTS = [
    Mutant(
        "what neighbours send back replaces the own gradient",
        "distdl_rma/ops/conv/convolution.py",
        "total[piece.box.slices(channel.exchange.need)].add_(as_tensor",
        "total[piece.box.slices(channel.exchange.need)].copy_(as_tensor",
        _CONV,
    ),
    Mutant(
        "the last owner wins where owners overlap",
        "distdl_rma/ops/core/movement.py",
        "if fresh or self._disjoint:",
        "if fresh or not self._disjoint:",
        _on(3, "ops/core/test_movement.py", "layers/moves/test_broadcast_reduce.py"),
    ),
    Mutant(
        "a strip adds nothing to the gradient of the weight",
        "distdl_rma/ops/conv/convolution.py",
        "mine[strip.weight].add_(taps)",
        "mine[strip.weight].add_(0 * taps)",
        _CONV,
    ),
    Mutant(
        "a halo is sent back only where this rank needs its gradient",
        "distdl_rma/ops/conv/convolution.py",
        "d_bias = 0, None, None, None\n        if ctx.needs_halo:",
        "d_bias = 0, None, None, None\n        if ctx.needs_halo and needs_x:",
        _on(3, "layers/conv/test_conv.py", "layers/conv/test_conv_general.py"),
    ),
    Mutant(
        "the corners of a tile are read twice",
        "distdl_rma/ops/conv/own_and_halo.py",
        "            rest = rest.replace(d, low, high)\n",
        "",
        _plain("ops/conv/test_own_and_halo.py"),
    ),
    Mutant(
        "copies of a weight keep their own gradients",
        "distdl_rma/layers/core/parameters.py",
        "return None, None, *ctx.owner.sum(ctx.ranks, gradients)",
        "return None, None, *gradients",
        _CONV,
    ),
    Mutant(
        "the backward of a norm does not add up over the ranks",
        "distdl_rma/ops/norm/statistics.py",
        "        if self._alone:\n            return lambda: pair\n",
        "        if True:\n            return lambda: pair\n",
        _NORM,
    ),
    Mutant(
        "variances of ranks are merged without what lies between their means",
        "distdl_rma/ops/norm/statistics.py",
        "        delta *= self._counts\n",
        "        delta *= 0\n",
        _STATISTICS,
    ),
    Mutant(
        "variances of few ranks are merged without what lies between their means",
        "distdl_rma/ops/norm/statistics.py",
        "            delta *= spread\n",
        "            delta *= 0\n",
        _STATISTICS,
    ),
    Mutant(
        "the gradient of a mean is not scaled",
        "distdl_rma/layers/loss/base.py",
        "return gradient.to(ctx.dtype) * ctx.scale, None, None, None, None",
        "return gradient.to(ctx.dtype), None, None, None, None",
        _on(3, "layers/loss/test_base.py"),
    ),
]

_CALLBACKS = [
    Mutant(
        "a callback of the user is not asked",
        "distdl_rma/layers/core/arguments.py",
        "        setattr(module, name, callback)\n",
        "        pass\n",
        _on(3, "interface/test_callbacks.py"),
    ),
    Mutant(
        "ranks that sum may say different things",
        "distdl_rma/sync/claim_check.py",
        "            elif list_of[rank] != ranks:\n",
        "            elif list_of[rank] != list_of[rank]:\n",
        _plain("sync/test_claim_check.py"),
    ),
    Mutant(
        "a size that the user states wrongly passes",
        "distdl_rma/sync/claim_check.py",
        "    if nbytes != held:\n",
        "    if nbytes < held:\n",
        _plain("sync/test_claim_check.py"),
    ),
    Mutant(
        "a gradient that did not come counts as the last one",
        "distdl_rma/sync/bucket.py",
        "                places[slot.number].zero_()\n",
        "                pass\n",
        _SYNC,
    ),
    Mutant(
        "accumulated gradients are summed again",
        "distdl_rma/sync/gradients.py",
        "            slot.base, parameter.grad = gradient.clone(), None\n",
        "            slot.base, parameter.grad = None, None\n",
        _SYNC,
    ),
    Mutant(
        "a rank without a copy may be summed with",
        "distdl_rma/layers/core/parameters.py",
        "if alien or len(set(ranks))",
        "if len(set(ranks))",
        _on(3, "interface/test_callbacks.py", "layers/test_from_global.py"),
    ),
]

_COPIES, _JOINED = (
    _on(2, "model/test_replicas.py"),
    _on(3, "ops/conv/test_joined_tile.py", "layers/conv/test_conv_general.py"),
)
_NUMBERS, _LED = _on(2, "model/test_numbers.py"), _on(4, "process_group/test_hierarchical.py")

_ALIKE = [
    Mutant(
        "what one rank alone writes to is seen once its turn has come",
        "distdl_rma/model/replicas.py",
        "if self._fruitless < _FRUITLESS:",
        "if self._fruitless > _FRUITLESS:",
        _COPIES,
    ),
    Mutant(
        "of the tensor behind, bytes are compared from where the one before ended",
        "distdl_rma/model/replicas.py",
        "self._at, self._offset = self._at + 1, 0\n",
        "self._at += 1\n",
        _COPIES,
    ),
    Mutant(
        "where backwards began is not compared",
        "distdl_rma/model/distribute.py",
        "[Backwards.of(self.machine, ranks), GradientCheck",
        "[GradientCheck",
        _NUMBERS,
    ),
    Mutant(
        "of inputs every call compares the same elements",
        "distdl_rma/checks/calls.py",
        "[crc32(sample_of(x, at)) for x in inputs]",
        "[crc32(sample_of(x)) for x in inputs]",
        _COPIES,
    ),
    Mutant(
        "arrays of one shape are said alike",
        "distdl_rma/checks/arguments.py",
        "number = 0 if argument.dtype.hasobject else crc32(argument.tobytes())",
        "number = 0",
        _plain("checks/test_arguments.py"),
    ),
    Mutant(
        "other calls sample the same elements",
        "distdl_rma/checks/arguments.py",
        "flat[at % stride :: stride]",
        "flat[::stride]",
        _plain("checks/test_arguments.py"),
    ),
    Mutant(
        "-1 is said as -2 is",
        "distdl_rma/split/calls/loss_origin.py",
        "argument if argument != -1 else _MINUS_ONE",
        "argument",
        _plain("split/calls/test_loss_origin.py"),
    ),
    Mutant(
        "of several backwards the last one counts alone",
        "distdl_rma/split/calls/loss_origin.py",
        "self._number = checksum(start, self._number)",
        "self._number = checksum(start)",
        _NUMBERS,
    ),
]

_PARTS = [
    Mutant(
        "zeros beyond the domain are not written",
        "distdl_rma/ops/conv/own_and_halo.py",
        "            block[zeros] = 0\n",
        "            pass\n",
        _JOINED,
    ),
    Mutant(
        "what comes back replaces the own gradient of a joined tile",
        "distdl_rma/ops/conv/joined_tile.py",
        "own[place].add_(as_tensor",
        "own[place].copy_(as_tensor",
        _JOINED,
    ),
    Mutant(
        "a root that leads no node gets no result",
        "distdl_rma/process_group/hierarchical.py",
        "if root is None or (of_root == self._team and self._teams[self._team][0] != root):",
        "if root is None:",
        _LED,
    ),
    Mutant(
        "parts lie in the order of ranks, not of nodes",
        "distdl_rma/process_group/hierarchical.py",
        "self._order = tuple(chain.from_iterable(self._teams))",
        "self._order = tuple(sorted(chain.from_iterable(self._teams)))",
        _LED,
    ),
]

MUTANTS: tuple[Mutant, ...] = (*_GEOMETRY, *_PROTOCOL, *_ADJOINTS, *_CALLBACKS, *_ALIKE, *_PARTS)

"""Checks that all ranks and the users' callbacks agree on shared parameters, before memory is taken.

Each rank states for each group: its name, the ranks that it sums over, those that share its statistics, what
it finds wrong with answers of its user, and shape, dtype and name of each parameter. Every rank gets the
statements of all, and looks for contradictions in the same order (``problems``). So all of them raise the
same text, and none has taken memory or changed a module.

    rank 0: 'head' over [0, 1], weight (8, 4)      rank 1: 'head' over [1], weight (8, 4)
      -> "'head' (head.weight): get_ranks_synch_weights() gave [0, 1] on rank 0 but [1] on rank 1"

Without this check such a job would hang in its first backward: rank 0 would wait for a gradient of rank 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch

from distdl_rma.errors import ConfigurationError, ProtocolError
from distdl_rma.geometry.partition import alike
from distdl_rma.layers.checks.generators import have_drifted
from distdl_rma.layers.partitioned.core.callbacks import plain_answer, wrong_answer, wrong_ranks
from distdl_rma.layers.partitioned.core.refusals import attributed
from distdl_rma.layers.partitioned.norm import DistributedNorm, answer_of_user, shared_among
from distdl_rma.layers.sync.gradient_groups import GradientGroup
from distdl_rma.segments.consensus import gather_words
from distdl_rma.segments.machine import Machine

# A group for JSON, see ``statement``.
Words = dict[str, Any]
Ranks = tuple[int, ...]

_NORM = "get_ranks_synch_norm"
_SIZES = "get_sizeof_norm", "get_sizeof_tensor", "get_sizeof_input_tensor", "get_sizeof_output_tensor"
_HOW = "give the ranks to sum over, or each rank its own [rank] if they are to differ"


def agree(
    machine: Machine,
    statements: Sequence[Words],
    options: Mapping[str, object],
    refusal: str,
    title: str,
    generator: Sequence[int] | None = None,
    who: str = "GradientSync",
) -> bool:
    """Compare the ranks' statements of groups, and their options; collective over the machine, blocking.

    ``refusal`` is another error of this rank, empty if there is none. ``title`` and ``who`` are for messages.
    ``generator`` is the seed and state of this rank's random numbers, if they matter. Returns whether
    generators with one seed are in different states. Problems raise ``ConfigurationError``, with the same
    text on all ranks.
    """
    mine = {
        "refusal": refusal,
        "options": {key: repr(value) for key, value in options.items()},
        "groups": statements,
        "generator": generator,
    }
    gathered = gather_words(machine.segments, mine, title)
    with attributed(who, ConfigurationError):
        for rank, words in gathered.items():
            if words["refusal"]:
                raise ConfigurationError(f"on rank {rank}: {words['refusal']}")
        for key in options:
            given = {rank: words["options"][key] for rank, words in gathered.items()}
            alike(given, f"{key} is {{1}} on rank {{0}} but {{3}} on rank {{2}}", ConfigurationError)
        for problem in problems({rank: words["groups"] for rank, words in gathered.items()}):
            raise ConfigurationError(problem)
    return have_drifted(words["generator"] for words in gathered.values() if words["generator"])


def statement(group: GradientGroup, rank: int) -> Words:
    """What a rank sends to the others about a group, and what is wrong with its own answers."""
    module: Any = group.module
    given = {} if module is None else vars(module)
    answer = answer_of_user({name: call for name, call in given.items() if name == _NORM}, rank)
    possible = [] if group.layer is None else plain_answer(type(group.layer).get_ranks_synch_norm(module))
    wrong = filter(None, (*_of_ranks(group, rank), *_of_sizes(group, rank, given), answer.problem))
    parameters = {e.name: [*_form(e.parameter), e.parameter.requires_grad] for e in group.entries}
    return {
        "name": group.name,
        # None stands for all ranks, the usual case, to keep the message short.
        "ranks": None if group.ranks == group.everyone else group.ranks,
        "placed": bool(group.holders),
        "sharing": None if answer.ranks is None else [answer.ranks, possible],
        "complaint": next(wrong, ""),
        "new": True,
        "parameters": parameters | {name: [*_form(buffer), None] for name, buffer in group.buffers},
    }


def _of_ranks(group: GradientGroup, rank: int) -> Iterator[str]:
    # What is wrong with the ranks to sum over, as far as this rank knows.
    if group.complaint:
        yield f"on rank {rank}, {group.complaint}"
    for other, entry in group.shared:
        if other.ranks != group.ranks:
            yield (
                f"on rank {rank}, {entry.name!r} is shared with {other.name!r} and summed over"
                f" {list(other.ranks)} there but over {list(group.ranks)} here"
            )
    if group.ranks:
        yield wrong_ranks(group.ranks, rank, group.holders or group.everyone)
    elif len(group.holders) > 1:
        holding = f"but its weights are held by {list(group.holders)} and would drift apart"
        yield f"get_ranks_synch_weights() gave [] on rank {rank}, {holding}; {_HOW}"


def _of_sizes(group: GradientGroup, rank: int, given: Mapping[str, Any]) -> Iterator[str]:
    # What is wrong with sizes that the user says, as far as the true ones are known.
    name, layer = "get_sizeof_gradients", group.layer
    if hasattr(group.module, name):
        yield wrong_answer(name, getattr(group.module, name), group.nbytes, rank)
    for name in [name for name in _SIZES if name in given]:
        # A plain module has no statistics. Sizes of its inputs are unknown.
        true: Any = 0 if layer is None and name == "get_sizeof_norm" else None
        with suppress(ProtocolError):
            true = true if layer is None else plain_answer(getattr(type(layer), name)(layer))
        # A norm may know the size of its statistics only after the first input.
        if true is not None and not (true == 0 and isinstance(layer, DistributedNorm)):
            yield wrong_answer(name, given[name], true, rank)


def _form(tensor: torch.Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def problems(statements: Mapping[int, Sequence[Words]]) -> Iterator[str]:
    """Contradictions in the statements of the ranks, in the same order on all ranks.

    First what a rank itself finds wrong, then what is wrong between ranks: for each parameter its list of
    ranks and its form, for each list of ranks the order of its parameters, for each norm the ranks that share
    statistics.
    """
    everyone = tuple(statements)
    # For each parameter: which ranks state which list. For each list: the parameters of each rank, in order.
    lists_of: dict[str, dict[Ranks, list[int]]] = defaultdict(lambda: defaultdict(list))
    orders: dict[Ranks, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    groups: dict[tuple[str, int], Words] = {}
    norms: dict[str, dict[int, list[list[int]]]] = defaultdict(dict)
    for rank, theirs in statements.items():
        for group in theirs:
            ranks = everyone if group["ranks"] is None else tuple(group["ranks"])
            if group["complaint"]:
                yield f"{group['name']!r}: {group['complaint']}"
            if group["sharing"] is not None:
                norms[group["name"]][rank] = group["sharing"]
            for parameter in group["parameters"]:
                if (parameter, rank) in groups:
                    yield f"two modules on rank {rank} have a parameter {parameter!r}: give them other names"
                lists_of[parameter][ranks].append(rank)
                orders[ranks][rank].append(parameter)
                groups[parameter, rank] = group
    for parameter, lists in lists_of.items():
        yield from _of_parameter(parameter, lists, groups)
    for ranks, names in orders.items():
        yield from _of_order(ranks, names)
    for name, answers in norms.items():
        possible = {other: ours for _, ours in answers.values() for other in ours}
        possible |= {rank: ours or [rank] for rank, (_, ours) in answers.items()}
        with attributed(repr(name), ConfigurationError):
            shared_among(possible, {rank: theirs for rank, (theirs, _) in answers.items()})


def _of_parameter(
    parameter: str, lists: Mapping[Ranks, Sequence[int]], groups: Mapping[tuple[str, int], Words]
) -> Iterator[str]:
    # Problems of one parameter: all ranks in a list must state the same list and form.
    list_of = {rank: ranks for ranks, stating in lists.items() for rank in stating}
    for ranks, (source, *_) in lists.items():
        first = groups[parameter, source]
        name = f"{first['name']!r} ({parameter})"
        # The lists of this library's layers were checked against their holders already.
        if not ranks and len(list_of) > 1 and not first["placed"]:
            holding = f"ranks {sorted(list_of)} hold it and would drift apart"
            yield f"{name}: no callback covers it, but {holding}; {_HOW}"
        for rank in ranks:
            if rank not in list_of:
                yield (
                    f"{name}: is to be summed over ranks {list(ranks)}, but rank {rank} does not hold it;"
                    " register it on the ranks that do, with get_ranks_synch_weights"
                )
            elif list_of[rank] != ranks:
                theirs = f"{list(list_of[rank])} on rank {rank}"
                yield f"{name}: get_ranks_synch_weights() gave {list(ranks)} on rank {source} but {theirs}"
            elif (here := _text(first, parameter)) != (there := _text(groups[parameter, rank], parameter)):
                yield f"{name}: is {here} on rank {source} but {there} on rank {rank}"


def _of_order(ranks: Ranks, names: Mapping[int, Sequence[str]]) -> Iterator[str]:
    # Gradients in a bucket lie one behind the other, in the order of the modules.
    for first, rank in pairwise(rank for rank in ranks if rank in names):
        for mine, theirs in zip(names[first], names[rank], strict=False):
            if mine != theirs:
                how = "build and register modules in the same order"
                yield f"{mine!r} on rank {first} comes where {theirs!r} does on rank {rank}: {how}"
                break


def _text(group: Words, parameter: str) -> str:
    shape, dtype, learns = group["parameters"][parameter]
    words = f"{tuple(shape)} {dtype}{', frozen' if learns is False else ''}"
    return words if group["new"] else f"{words}, registered earlier"

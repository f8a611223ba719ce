"""Checks that all ranks and the users' callbacks agree on shared parameters, before memory is taken.

Each rank states for each group: its name, the ranks that it sums over, who holds copies, the bytes of its
gradients, answers of the user's callbacks beside the true ones, and shape, dtype and name of each parameter.
Every rank gets the statements of all, and looks for contradictions in the same order (``problems``). So all
of them raise the same text, and none has taken memory or changed a module.

    rank 0: 'head' over [0, 1], weight (8, 4)      rank 1: 'head' over [1], weight (8, 4)
      -> "'head' (head.weight): get_ranks_synch_weights() gave [0, 1] on rank 0 but [1] on rank 1"

Without this check such a job would hang in its first backward: rank 0 would wait for a gradient of rank 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import index as as_int
from typing import Any, cast

import torch

from distdl_rma.errors import ConfigurationError, ProtocolError
from distdl_rma.layers.checks.generators import have_drifted
from distdl_rma.layers.partitioned.core.callbacks import Callbacks, plain_answer
from distdl_rma.layers.partitioned.norm import DistributedNorm
from distdl_rma.layers.sync.gradient_groups import GradientGroup
from distdl_rma.segments.consensus import gather_words
from distdl_rma.segments.machine import Machine

# A group for JSON, see ``statement``.
Words = dict[str, Any]
Ranks = tuple[int, ...]

_NORM = "get_ranks_synch_norm"
_COMPARED = ("get_ranks_synch_weights", "get_sizeof_gradients")
_OTHERS = [name for name in Callbacks.__annotations__ if name not in _COMPARED]
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
    first, expected = next(iter(gathered.items()))
    for rank, words in gathered.items():
        if words["refusal"]:
            raise ConfigurationError(f"{who}: on rank {rank}: {words['refusal']}")
        for key, value in expected["options"].items():
            if (other := words["options"][key]) != value:
                raise ConfigurationError(
                    f"{who}: {key} is {value} on rank {first} but {other} on rank {rank}"
                )
    for problem in problems({rank: words["groups"] for rank, words in gathered.items()}):
        raise ConfigurationError(f"{who}: {problem}")
    return have_drifted(words["generator"] for words in gathered.values() if words["generator"])


def statement(group: GradientGroup) -> Words:
    """What a rank sends to the others about a group."""
    complaint, nbytes, module = group.complaint, group.nbytes, cast(Any, group.module)
    for other, entry in group.shared:
        if other.ranks != group.ranks:
            complaint = complaint or (
                f"{entry.name!r} is shared with {other.name!r} and summed over {list(other.ranks)} there"
                f" but over {list(group.ranks)} here"
            )
    # For each of the user's other callbacks: its result, and the true value, if this rank knows that.
    stated, answers, given = nbytes, dict[str, Any](), {} if module is None else vars(module)
    name = "get_sizeof_gradients"
    try:
        if hasattr(module, name):
            stated = as_int(module.get_sizeof_gradients())
        for name in [other for other in _OTHERS if other in given]:
            truth = _known(group, name)
            if truth is not None:
                answers[name] = [plain_answer(given[name]()), truth]
    except Exception as error:  # noqa: BLE001 - the user's function; all ranks raise it
        wrong = f"{name}() raised, or returned neither a number nor ranks: {error!r}"
        stated, answers, complaint = 0, {}, complaint or wrong
    parameters = {e.name: [*_form(e.parameter), e.parameter.requires_grad] for e in group.entries}
    return {
        "name": group.name,
        # None stands for all ranks, the usual case, to keep the message short.
        "ranks": None if group.ranks == group.everyone else group.ranks,
        "holders": None if group.holders == group.everyone else group.holders,
        "nbytes": [stated, nbytes],
        "answers": answers,
        "complaint": complaint,
        "new": True,
        "parameters": parameters | {name: [*_form(buffer), None] for name, buffer in group.buffers},
    }


def _form(tensor: torch.Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _known(group: GradientGroup, name: str) -> int | list[int] | None:
    layer = group.layer
    if layer is None:
        # A plain module has no statistics. Sizes of its inputs are unknown.
        return [] if name == _NORM else 0 if name == "get_sizeof_norm" else None
    try:
        known = plain_answer(getattr(type(layer), name)(layer))
    except ProtocolError:
        return None
    # A norm may know the size of its statistics only after the first input.
    return None if known == 0 and isinstance(layer, DistributedNorm) else known


def problems(statements: Mapping[int, Sequence[Words]]) -> Iterator[str]:
    """Contradictions in the statements of the ranks, in the same order on all ranks.

    First what is wrong with one rank's statement, then what is wrong between ranks: for each parameter its
    list of ranks and its form, for each list of ranks the order of its parameters, for each norm the ranks
    that share statistics.
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
            for problem in (*_of_ranks(rank, group, ranks, everyone), *_of_sizes(rank, group)):
                yield f"{group['name']!r}: {problem}"
            if _NORM in group["answers"]:
                norms[group["name"]][rank] = group["answers"][_NORM]
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
        yield from _of_statistics(name, answers)


def _of_ranks(rank: int, group: Words, ranks: Ranks, everyone: Ranks) -> Iterator[str]:
    # Problems of one rank's list that need no other rank's statement.
    if group["complaint"]:
        yield f"on rank {rank}, {group['complaint']}"
    gave = f"get_ranks_synch_weights() gave {list(ranks)} on rank {rank}"
    for other in ranks:
        if other not in everyone:
            yield f"{gave}; rank {other} is not in M = {everyone}"
    if len(set(ranks)) != len(ranks):
        yield f"{gave}; a rank is listed more than once"
    if ranks and rank not in ranks:
        yield f"{gave}; the rank itself is missing"
    holders = everyone if group["holders"] is None else tuple(group["holders"])
    if holders and not set(ranks) <= set(holders):
        yield f"{gave}; copies of this rank's weights are on {list(holders)}"
    if not ranks and len(holders) > 1:
        yield f"{gave}, but its weights are held by {list(holders)} and would drift apart; {_HOW}"


def _of_sizes(rank: int, group: Words) -> Iterator[str]:
    # Problems of one rank's sizes and statistics.
    nbytes, held = group["nbytes"]
    if nbytes != held:
        yield f"get_sizeof_gradients() gave {nbytes} bytes on rank {rank}, its gradients are {held} bytes"
    for name, (theirs, ours) in group["answers"].items():
        if name != _NORM:
            if theirs != ours:
                yield f"{name}() gave {theirs} on rank {rank}, it is {ours} bytes"
        elif not isinstance(theirs, list) or (
            theirs and not (len(set(theirs)) == len(theirs) and {rank} <= set(theirs) <= {*ours, rank})
        ):
            yield f"{name}() gave {theirs} on rank {rank}, the ranks that share its statistics are {ours}"


def _of_statistics(name: str, answers: Mapping[int, Sequence[Sequence[int]]]) -> Iterator[str]:
    # Ranks that share statistics name each other. One without a statement names all that can share them.
    for rank, (theirs, ours) in answers.items():
        mine = set(theirs or [rank])
        for other in ours:
            named = answers[other][0] or [other] if other in answers else ours
            if set(named) != mine and not mine.isdisjoint(named):
                yield (
                    f"{name!r}: {_NORM}() gave {list(theirs)} on rank {rank} but {list(named)} on rank"
                    f" {other}: ranks that share statistics all name each other, and nobody else"
                )


def _of_parameter(
    parameter: str, lists: Mapping[Ranks, Sequence[int]], groups: Mapping[tuple[str, int], Words]
) -> Iterator[str]:
    # Problems of one parameter: all ranks in a list must state the same list and form.
    list_of = {rank: ranks for ranks, stating in lists.items() for rank in stating}
    for ranks, (source, *_) in lists.items():
        first = groups[parameter, source]
        name = f"{first['name']!r} ({parameter})"
        # The lists of this library's layers were checked against their holders already.
        of_library = first["holders"] is None or first["holders"]
        if not ranks and len(list_of) > 1 and not of_library:
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
            else:
                here, there = _text(first, parameter), _text(groups[parameter, rank], parameter)
                if here != there:
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

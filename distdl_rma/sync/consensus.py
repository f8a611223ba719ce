"""What the ranks say of their parameters, compared before anything is built on it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from distdl_rma.errors import ConfigurationError
from distdl_rma.machine import Machine
from distdl_rma.segments.collectives.gather_bytes import gather_bytes
from distdl_rma.sync.claims import Claim

Words = dict[str, Any]


def check(
    machine: Machine,
    covers: Sequence[Claim],
    options: Mapping[str, object],
    refusal: str,
    name: str,
    generator: Sequence[int] | None = None,
) -> bool:
    """Have all ranks compare what their modules say; collective over the machine, blocking.

    Parameters
    ----------
    machine
        The machine.
    covers
        What this rank's modules say.
    options
        What is to be the same on all ranks, by name.
    refusal
        What is wrong on this rank otherwise; empty if nothing is.
    name
        For messages, alike on all ranks.
    generator
        Seed and state of this rank's generator of random numbers, if it matters.

    Returns
    -------
    bool
        Whether generators with one seed are in different states.

    Raises
    ------
    ConfigurationError
        On all ranks with the same words, if something does not fit together.
    """
    mine = {
        "refusal": refusal,
        "options": {key: repr(value) for key, value in options.items()},
        "covers": [cover.words() for cover in covers],
        "generator": generator,
    }
    told = gather_bytes(machine.segments, json.dumps(mine).encode(), name)
    said: dict[int, Words] = {}
    for words, ranks in told.items():
        said |= dict.fromkeys(ranks, json.loads(words))
    first = machine.ranks[0]
    for rank in machine.ranks:
        if said[rank]["refusal"]:
            raise ConfigurationError(f"GradientSync: on rank {rank}: {said[rank]['refusal']}")
        for key, value in said[first]["options"].items():
            if said[rank]["options"][key] != value:
                raise ConfigurationError(
                    f"GradientSync: {key} is {value} on rank {first} but {said[rank]['options'][key]} on"
                    f" rank {rank}"
                )
    for problem in problems({rank: said[rank]["covers"] for rank in machine.ranks}):
        raise ConfigurationError(f"GradientSync: {problem}")
    generators = {tuple(said[rank]["generator"]) for rank in machine.ranks if said[rank]["generator"]}
    return len(generators) > 1 and len({seed for seed, _ in generators}) == 1


def problems(said: Mapping[int, Sequence[Words]]) -> Iterator[str]:
    """What does not fit together, in the same order on all ranks.

    Parameters
    ----------
    said
        Per rank of the machine the words of its covers.
    """
    everyone = tuple(said)
    # Who says what of each parameter, and which parameters a rank sums over which ranks, in its order.
    claims: dict[str, dict[tuple[int, ...], list[int]]] = {}
    covers: dict[tuple[str, int], Words] = {}
    orders: dict[tuple[int, ...], dict[int, list[str]]] = {}
    norms: dict[str, dict[int, list[list[int]]]] = {}
    for rank, theirs in said.items():
        for cover in theirs:
            ranks = everyone if cover["ranks"] is None else tuple(cover["ranks"])
            for problem in (*_of_ranks(rank, cover, ranks, everyone), *_of_sizes(rank, cover)):
                yield f"{cover['name']!r}: {problem}"
            if _NORM in cover["answers"]:
                norms.setdefault(cover["name"], {})[rank] = cover["answers"][_NORM]
            for parameter in cover["parameters"]:
                if (parameter, rank) in covers:
                    yield f"two modules on rank {rank} have a parameter {parameter!r}: give them other names"
                claims.setdefault(parameter, {}).setdefault(ranks, []).append(rank)
                orders.setdefault(ranks, {}).setdefault(rank, []).append(parameter)
                covers[parameter, rank] = cover
    for parameter, lists in claims.items():
        yield from _together(parameter, lists, covers)
    for ranks, names in orders.items():
        yield from _in_order(ranks, names)
    for name, answers in norms.items():
        yield from _of_statistics(name, answers)


def _of_ranks(rank: int, cover: Words, ranks: tuple[int, ...], everyone: tuple[int, ...]) -> Iterator[str]:
    # What one rank says of its ranks, without looking at the others.
    if cover["complaint"]:
        yield f"on rank {rank}, {cover['complaint']}"
    said = f"get_ranks_synch_weights() gave {list(ranks)} on rank {rank}"
    for other in ranks:
        if other not in everyone:
            yield f"{said}; rank {other} is not in M = {everyone}"
    if len(set(ranks)) != len(ranks):
        yield f"{said}; a rank is listed more than once"
    if ranks and rank not in ranks:
        yield f"{said}; the rank itself is missing"
    holders = everyone if cover["holders"] is None else tuple(cover["holders"])
    if holders and not set(ranks) <= set(holders):
        yield f"{said}; copies of this rank's weights are on {list(holders)}"
    if not ranks and len(holders) > 1:
        yield f"{said}, but its weights are held by {list(holders)} and would drift apart; {_HOW}"


def _of_sizes(rank: int, cover: Words) -> Iterator[str]:
    # What one rank says of its sizes and statistics.
    nbytes, held = cover["nbytes"]
    if nbytes != held:
        yield f"get_sizeof_gradients() gave {nbytes} bytes on rank {rank}, its gradients are {held} bytes"
    for name, (theirs, ours) in cover["answers"].items():
        if name != _NORM:
            if theirs != ours:
                yield f"{name}() gave {theirs} on rank {rank}, it is {ours}"
        elif not isinstance(theirs, list) or (theirs and not _fits(theirs, rank, {*ours, rank})):
            yield f"{name}() gave {theirs} on rank {rank}, the ranks that share its statistics are {ours}"


def _fits(ranks: Sequence[int], rank: int, among: Collection[int]) -> bool:
    return len(set(ranks)) == len(ranks) and rank in ranks and set(ranks) <= set(among)


def _of_statistics(name: str, answers: Mapping[int, Sequence[Sequence[int]]]) -> Iterator[str]:
    # Ranks that share statistics all name each other; where nobody says anything, all that can share them.
    for rank, (theirs, ours) in answers.items():
        mine = set(theirs or [rank])
        for other in ours:
            said = answers[other][0] or [other] if other in answers else ours
            if set(said) != mine and not mine.isdisjoint(said):
                yield (
                    f"{name!r}: {_NORM}() gave {list(theirs)} on rank {rank} but {list(said)} on rank"
                    f" {other}: ranks that share statistics all name each other, and nobody else"
                )


_NORM = "get_ranks_synch_norm"
_HOW = "give the ranks to sum over, or each rank its own [rank] if they are to differ"


def _together(
    parameter: str, lists: Mapping[tuple[int, ...], Sequence[int]], covers: Mapping[tuple[str, int], Words]
) -> Iterator[str]:
    # What ranks say of one parameter: those that one of them lists must say the same.
    who_says = {rank: ranks for ranks, sayers in lists.items() for rank in sayers}
    for ranks, sayers in lists.items():
        first = covers[parameter, sayers[0]]
        name = f"{first['name']!r} ({parameter})"
        # Without a list each layer of this library has been asked about its copies already.
        if not ranks and len(who_says) > 1 and not _of_library(first):
            yield (
                f"{name}: no callback covers it, but ranks {sorted(who_says)} hold it and would drift"
                f" apart; {_HOW}"
            )
        for rank in ranks:
            if rank not in who_says:
                yield (
                    f"{name}: is to be summed over ranks {list(ranks)}, but rank {rank} does not hold it;"
                    " register it on the ranks that do, with get_ranks_synch_weights"
                )
            elif who_says[rank] != ranks:
                yield (
                    f"{name}: get_ranks_synch_weights() gave {list(ranks)} on rank {sayers[0]} but"
                    f" {list(who_says[rank])} on rank {rank}"
                )
            else:
                here, there = _text(first, parameter), _text(covers[parameter, rank], parameter)
                if here != there:
                    yield f"{name}: is {here} on rank {sayers[0]} but {there} on rank {rank}"


def _in_order(ranks: tuple[int, ...], names: Mapping[int, Sequence[str]]) -> Iterator[str]:
    # Gradients that travel together lie one behind the other, in the order of the modules.
    sayers = [rank for rank in ranks if rank in names]
    for first, rank in pairwise(sayers):
        for mine, theirs in zip(names[first], names[rank], strict=False):
            if mine != theirs:
                yield (
                    f"{mine!r} on rank {first} comes where {theirs!r} does on rank {rank}: build and register"
                    " modules in the same order"
                )
                break


def _of_library(cover: Words) -> bool:
    return bool(cover["holders"] is None or cover["holders"])


def _text(cover: Words, parameter: str) -> str:
    shape, dtype, learns = cover["parameters"][parameter]
    words = f"{tuple(shape)} {dtype}{', frozen' if learns is False else ''}"
    return words if cover["new"] else f"{words}, registered earlier"

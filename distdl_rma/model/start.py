"""Warnings about how the job was started."""

from __future__ import annotations

import warnings

import torch

from distdl_rma.machine import Machine, single_rank_problem


def warn_of_start(machine: Machine) -> None:
    """Warn of a job of one rank without a launcher, and of more threads than cores; local.

    Only the machine's first rank warns, once, for its node.
    """
    if machine.rank != machine.ranks[0] or machine.kept.setdefault("start", False):
        return
    machine.kept["start"] = True
    for problem in (single_rank_problem(), _of_threads(machine)):
        if problem:
            warnings.warn(f"distribute: {problem}", RuntimeWarning, stacklevel=3)


def _of_threads(machine: Machine) -> str:
    segment, threads = machine.segments.segment, torch.get_num_threads()
    ranks, wanted = len(segment.node_ranks), max(1, segment.cores // len(segment.node_ranks))
    if threads <= wanted:
        return ""
    return (
        f"{ranks} rank{'s' if ranks > 1 else ''} of {threads} threads on {segment.cores} cores stand in each"
        f" other's way; set OMP_NUM_THREADS={wanted} before Python starts, or torch.set_num_threads({wanted})"
    )

"""The result of an examination, as text for people and as JSON.

The keys of the JSON are public: programs of administrators read them. The text is for a person alone, leaves
out what is empty, and may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from distdl_rma.doctor.facts import Job, RankFacts, counted, least, sized
from distdl_rma.doctor.findings import Finding
from distdl_rma.geometry.partition import by_key, spans
from distdl_rma.trace import in_columns

_UNKNOWN = "-"
_SIZES = "shm_free_bytes", "shm_total_bytes", "memory_limit_bytes"
# A matrix of more ranks is not read.
_MATRIX_RANKS = 16


def as_json(job: Job, found: Sequence[Finding]) -> dict[str, Any]:
    """Facts and findings under the keys that ``docs/clusters.md`` lists.

    All keys are there in any case, with empty values where a step failed, so that programs need no special
    cases. Versions and thread level are those of the first rank: where ranks differ, a finding says so.
    """
    first = job.ranks[0] if job.ranks else None
    return {
        "ok": not any(finding.level == "error" for finding in found),
        "versions": dict(first.versions) if first else {},
        "launcher": first.launcher.name if first else "",
        "thread_level": first.thread_level if first else "",
        "size": first.size if first else 0,
        "nodes": job.nodes,
        "segment_bytes": job.segment_bytes,
        "hosts": [*_rows(job)],
        "cards": [{"rank": facts.rank, **asdict(facts.cards), "own": facts.cards.own} for facts in job.ranks],
        "transports": [job.transports.get(facts.rank, "?" * facts.size) for facts in job.ranks],
        "convolution": [asdict(each) for each in job.compared],
        "findings": [asdict(finding) for finding in found],
    }


def as_text(job: Job, found: Sequence[Finding]) -> str:
    """The report that a person reads."""
    facts = as_json(job, found)
    head = f"{counted(facts['size'], 'rank')} on {counted(len(facts['nodes']) or len(job.hosts), 'node')}"
    parts = {
        "distdl_rma doctor": [f"{head}; launcher: {facts['launcher'] or 'unknown'}"],
        "versions": in_columns([*facts["versions"].items(), ("thread level", facts["thread_level"])]),
        "nodes": _hosts(facts),
        "cards": _cards(facts["cards"]),
        "transports": [*_transports(facts["transports"])],
        "split convolution against torch's on the whole input": in_columns(
            [
                (x.name, "equal to rounding" if x.equal else f"differs by {x.error:.1e} of {x.scale:.1e}")
                for x in job.compared
            ]
        ),
        "findings": [line for each in found for line in (f"{each.level}: {each.text}", f"  {each.remedy}")]
        or ["none: this job works"],
    }
    return "\n".join("\n  ".join([title, *lines]) + "\n" for title, lines in parts.items() if lines)


def _rows(job: Job) -> Iterator[dict[str, Any]]:
    # A row for ranks of a host that see the same values.
    def seen(facts: RankFacts) -> tuple[Any, ...]:
        return facts.host, len(facts.cores), facts.threads, facts.shm_total, facts.memory_limit

    for (host, _, threads, total, limit), ranks in by_key(job.ranks, seen).items():
        yield {
            "host": host,
            "ranks": [facts.rank for facts in ranks],
            "cores": len({core for facts in ranks for core in facts.cores}),
            "threads_per_rank": threads,
            "shm_free_bytes": least(facts.shm_free for facts in ranks),
            "shm_total_bytes": total,
            "memory_limit_bytes": limit,
        }


def _hosts(facts: dict[str, Any]) -> list[str]:
    rows = [("host", "ranks", "cores", "threads per rank", "/dev/shm free", "of", "segments", "memory limit")]
    segment = facts["segment_bytes"]
    for row in facts["hosts"]:
        free, total, limit = (_UNKNOWN if row[size] is None else sized(row[size]) for size in _SIZES)
        segments = f"{len(row['ranks'])} x {sized(segment)}" if segment else _UNKNOWN
        counts = str(row["cores"]), str(row["threads_per_rank"])
        rows.append((row["host"], spans(row["ranks"]), *counts, free, total, segments, limit))
    return in_columns(rows)


def _cards(cards: Sequence[dict[str, Any]]) -> list[str]:
    # A row for each rank; nothing for a job without cards.
    heads = ("rank", "sees", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "card")
    rows = [[str(value) or _UNKNOWN for value in card.values()] for card in cards]
    return in_columns([heads, *rows]) if any(card["count"] for card in cards) else []


def _transports(letters: Sequence[str]) -> Iterator[str]:
    # How each rank reaches each other one: as a matrix, or as counts if nobody would read the matrix.
    if len(letters) < 2 or set("".join(letters)) == {"?"}:
        return
    if len(letters) > _MATRIX_RANKS:
        every = "".join(letters)
        yield f"shared memory of the node: {counted(every.count('s') // 2, 'pair')}"
        yield f"puts of MPI between nodes: {counted(every.count('r') // 2, 'pair')}"
        return
    numbers = [*map(str, range(len(letters)))]
    yield from in_columns(
        [("", *numbers), *((number, *row) for number, row in zip(numbers, letters, strict=True))]
    )
    yield "s: shared memory of the node, r: puts of MPI between nodes"

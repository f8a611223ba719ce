"""The result of an examination, as text for people and as JSON.

The keys of the JSON are public: programs of administrators read them. The text is for a person alone, leaves
out what is empty, and may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from distdl_rma.doctor.facts import Job, RankFacts, counted, least
from distdl_rma.doctor.findings import Finding
from distdl_rma.geometry.partition import by_key, spans
from distdl_rma.trace import in_columns, size_text

# Letters of transports.
_WAYS = {"s": "shared memory of the node", "r": "puts of MPI between nodes"}


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
        "cards": [{"rank": facts.rank, **facts.cards} for facts in job.ranks],
        "transports": [job.transports.get(facts.rank, "?" * facts.size) for facts in job.ranks],
        "convolution": [asdict(each) for each in job.compared],
        "findings": [asdict(finding) for finding in found],
    }


def as_text(job: Job, found: Sequence[Finding]) -> str:
    """The report that a person reads."""
    facts = as_json(job, found)
    head = f"{counted(facts['size'], 'rank')} on {counted(len(facts['nodes']) or len(job.hosts), 'node')}"
    segments, pairs = f"segments of {size_text(job.segment_bytes)}", "".join(facts["transports"])
    some_cards = any(card["count"] for card in facts["cards"])
    parts = {
        "distdl_rma doctor": [f"{head}; launcher: {facts['launcher'] or 'unknown'}; {segments}"],
        "versions": in_columns([*facts["versions"].items(), ("thread level", facts["thread_level"])]),
        "nodes": _table(facts["hosts"]),
        "cards": _table(facts["cards"]) if some_cards else [],
        "transports": [
            f"{way}: {counted(pairs.count(letter) // 2, 'pair')}"
            for letter, way in _WAYS.items()
            if letter in pairs and "?" not in pairs
        ],
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


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    # The keys, then the values of each row.
    heads = [name.removesuffix("_bytes").replace("_", " ") for name in rows[0]] if rows else []
    return in_columns([heads, *([_cell(*each) for each in row.items()] for row in rows)])


def _cell(name: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if name.endswith("_bytes"):
        return size_text(value)
    return spans(value) if isinstance(value, list) else str(value)

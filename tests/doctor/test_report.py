"""The result as text."""

from distdl_rma.doctor.facts import Job
from distdl_rma.doctor.findings import Finding
from distdl_rma.doctor.report import as_json, as_text
from tests.doctor.cases import job, rank, with_cards


def lines(job, title):
    section = as_text(job, []).split(f"\n{title}\n")[1].split("\n\n")[0]
    return [line.strip() for line in section.splitlines()]


def test_ranks_of_a_host_with_the_same_values_are_one_row():
    mixed = job(4)
    mixed.ranks[3] = rank(3, 4, threads=1)
    _, *rows = lines(mixed, "nodes")
    assert [row.split()[:4] for row in rows] == [["node1", "0-2", "8", "2"], ["node1", "3", "8", "1"]]
    assert rows[0].split()[4:] == ["30.0", "GiB", "32.0", "GiB", "64.0", "GiB"]
    assert "; segments of 4.0 GiB" in as_text(mixed, [])
    mixed.ranks[2] = rank(2, 4, shm_free=0)
    assert [row["shm_free_bytes"] for row in as_json(mixed, [])["hosts"]] == [0, 30 << 30]


def test_transports_are_numbers_of_pairs():
    assert lines(job(2), "transports") == ["shared memory of the node: 1 pair"]
    many = job(32)
    many.transports |= {
        rank: letters[:16] + "r" * 16 for rank, letters in many.transports.items() if rank < 16
    }
    many.transports |= {
        rank: "r" * 16 + letters[16:] for rank, letters in many.transports.items() if rank >= 16
    }
    assert lines(many, "transports") == [
        "shared memory of the node: 240 pairs",
        "puts of MPI between nodes: 256 pairs",
    ]


def test_cards_are_a_row_for_each_rank_and_nothing_without_them():
    assert "cards" not in as_text(job(), []) and as_json(job(), [])["cards"][1]["count"] == 0
    cards = with_cards(({"CUDA_VISIBLE_DEVICES": "5,6"}, 2), ({"LOCAL_RANK": "2"}, 1))
    assert [line.split() for line in lines(cards, "cards")[1:]] == [
        ["0", "2", "0", "5,6", "5"],
        ["1", "1", "2", "-", "-"],
    ]


def test_a_finding_is_two_lines_and_none_is_one():
    text = as_text(job(), [Finding("error", "what is wrong", "what to do")])
    assert text.endswith("findings\n  error: what is wrong\n    what to do\n")
    assert as_text(job(), []).endswith("findings\n  none: this job works\n")


def test_what_is_not_known_is_left_out():
    assert as_json(Job(), [])["ok"] and "transports" not in as_text(Job(), [])

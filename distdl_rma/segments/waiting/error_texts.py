"""Texts of errors that concern several ranks: what timed out, what failed, and how the machine is left.

The parts of a text, and who writes them::

    rank 0 called step() at train.py:12, but rank 1 called load() at train.py:9; every rank has to do ...
    rank 0 waited 60 s for rank 1 to send in 'enc1.conv' (epoch 7, last seen 6);     the wait's reason
    rank 1 waits since 59.8 s for rank 0 to connect 'load';                          headers: the chain
    did every rank call the same layers?                                             the reason's hint
    The machine can be used further.                                                 its state, the end

The first line is added last, from the names in the others: an operation of a split tensor is called after the
function of the user's program, its file and line. It stands there only if ranks are in different functions.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import TypeVar

from distdl_rma.errors import ExchangeTimeout, MismatchError, PeerFailedError, SegmentError
from distdl_rma.segments.waiting.header import PeerHeaders, WaitReason, numbered

# How long a rank of another node may take to answer before it counts as silent.
ANSWER_SECONDS = 1.0
_LONGEST_CHAIN = 16


def timeout_message(headers: PeerHeaders, rank: int, reason: WaitReason, seconds: float) -> str:
    """Message for a wait of a rank that reached its deadline after some seconds: for whom, and what they do.

    Ranks of other nodes are asked only now, where nobody is in a hurry any more, and have a second in all to
    answer. The chain ends where a rank waits for nobody: that one is late, and the user should look there.
    """
    # A wait of zero seconds only tests once, so it asks no rank.
    clauses = chain(headers, rank, reason, min(seconds, ANSWER_SECONDS)) if seconds else []
    hint = [reason.hint] if reason.hint else []
    return "; ".join([f"rank {rank} waited {in_seconds(seconds)} {reason}", *clauses, *hint])


def chain(headers: PeerHeaders, rank: int, reason: WaitReason, seconds: float) -> list[str]:
    """States of the ranks that one waits for, of those that they wait for, and so on, as clauses.

    Waits at most ``seconds`` for the answers of ranks on other nodes.
    """
    deadline = time.monotonic() + seconds
    named, pending = {rank}, list(reason.ranks)
    clauses: list[str] = []
    while pending and len(clauses) < _LONGEST_CHAIN:
        peer = pending.pop(0)
        if peer in named:
            continue
        named.add(peer)
        record = headers.read(peer, deadline)
        if record is None:
            clauses.append(f"rank {peer} is {_silent(headers, peer, seconds)}")
        elif headers.process_has_ended(peer, record):
            clauses.append(f"rank {peer} is silent: its process {record.process} has ended")
        else:
            silent = headers.unchanged(peer, record)
            also = f", and has said nothing for {in_seconds(silent)}" if silent > ANSWER_SECONDS else ""
            clauses.append(f"rank {peer} {record.doing}{also}")
            if record.is_waiting:
                pending += record.waits_for
    return clauses


def _silent(headers: PeerHeaders, peer: int, seconds: float) -> str:
    # An answer comes behind the transfers between two ranks. Who puts to this rank is not known.
    if headers.is_near(peer):
        return "silent: its header could not be read"
    why = f"no answer within {in_seconds(seconds)}"
    if own := headers.segment.link(peer).moving:
        return f"busy: {why}, behind {own} bytes that are under way"
    others = headers.segment.moving
    return f"busy or silent: {why}, while {others} bytes are under way" if others else f"silent: {why}"


_E = TypeVar("_E", bound=BaseException)
# Last sentences of errors that concern several ranks, and the classes of these errors.
USABLE = "The machine can be used further."
LOST = (
    "The machine is lost: start the job again, or close it on all ranks by Machine.on().close() and call"
    " again (with a distributed model: model.distributed.machine.close(), model.distributed.close(),"
    " distribute())."
)
# A rank in a text, and what it is in; a function of a user's program, with file, line and column.
_RANK_IN = re.compile(r"rank (\d+) (?:waited|waits since|connects|is in|sends)\b[^']*'([^']*)'")
_CALL = re.compile(r"(\w+) \((\S+:\d+):\d+\)")
_RANKS = re.compile(r"ranks? (\d+(?:, \d+)*)")
_NEEDED = "; every rank has to"
# What shows that a rank does not come to the function that another rank waits in.
_ELSEWHERE = re.compile("they wait for each other| connects | it left, closing| waits for nobody")
# The last function of a rank that computes: it may be the one that another rank waits in.
_LAST = re.compile(r"rank (\d+) waits for nobody: [^']*'([^']*)'")
OF_SEVERAL_RANKS = ExchangeTimeout, PeerFailedError, MismatchError, SegmentError


def append_state(error: _E, state: str) -> _E:
    """Return the error; if it concerns several ranks, its text now ends with the state of the machine.

    A later state replaces an earlier one: an error may pass a call that could settle it, and then one that
    could not.
    """
    if state and isinstance(error, OF_SEVERAL_RANKS) and error.args:
        text = _without_state(str(error.args[0]))
        whole = f"{callers_in(text)}{text}{'' if text.endswith(('.', '?', '!')) else '.'} {state}"
        error.args = (whole, *error.args[1:])
    return error


def callers_in(text: str) -> str:
    """First line for a text about ranks in different functions of a program; empty if they are not.

    "Different" is read from the text alone: a function is named for a rank by the reason of its wait, or by
    the last operation that it began. Ranks that wait in one function, for each other, called the same.
    """
    calls: dict[str, set[int]] = {}
    for rank, name in _RANK_IN.findall(text) if _ELSEWHERE.search(text) else ():
        if found := _CALL.search(name):
            way = "went backward through" if "adjoint" in name or "gradient" in name else "called"
            calls.setdefault(f"{way} {found[1]}() at {found[2]}", set()).add(int(rank))
    for rank, name in _LAST.findall(text):
        if found := _CALL.search(name):
            calls.get(f"called {found[1]}() at {found[2]}", set()).add(int(rank))
    told = {int(rank) for some in _RANKS.findall(text) for rank in some.split(",")}
    if len(calls) == 1 and told <= set().union(*calls.values()):
        return ""
    way = " alone" if len(calls) == 1 else ""
    each = [f"{numbered(tuple(sorted(ranks)))}{way} {call}" for call, ranks in calls.items()]
    both = " do both, in the same order" if each[1:] else ""
    return f"{', but '.join(each)}{_NEEDED}{both}\n" if each else ""


def ends_with_state(error: BaseException) -> bool:
    """Whether the text of an error ends with the state of the machine."""
    return bool(error.args) and str(error.args[0]).endswith((USABLE, LOST))


def _without_state(text: str) -> str:
    text = text.removesuffix(USABLE).removesuffix(LOST).rstrip()
    first, _, rest = text.partition("\n")
    return rest if _NEEDED in first else text


def cause_of(error: BaseException) -> str:
    """Error as one line, for the notice of a failure."""
    with suppress(Exception):
        first = _without_state(str(error).strip()).splitlines()
        return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
    return type(error).__name__


def in_seconds(seconds: float) -> str:
    """Time for a message: in tenths of a second, below one second to two digits."""
    if seconds < 1:
        return f"{float(f'{seconds:.2g}'):g} s"
    return f"{seconds:.1f}".removesuffix(".0") + " s"

"""Break the package on purpose, a place at a time, and see the tests notice: ``python -m tests.mutants``.

A mutant is one change of one file: ``mutant_operators.py`` makes a sample, ``mutant_list.py`` has others by
hand. Each is applied to a copy of the tree, where tests of its room must fail or hang; without it they pass.
A mutant lives where no test holds a line, or where the change has no effect.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.mutant_list import HAND_MADE, Mutant
from tests.mutant_operators import commands_for, sample
from tests.run_mpi import completed, end_on_signal

ROOT = Path(__file__).parents[1]
# What tests may take without a mutant; with one, beyond three times as long; and each test.
LIMIT_SECONDS, MORE_SECONDS, TEST_SECONDS = 1800, 60, 100
ALONE = "no mutant"


class Verdict(NamedTuple):
    """What tests said of a tree: whether one failed, the last words, and the seconds that they took."""

    failed: bool
    words: str
    seconds: float


class Results(dict[str, Verdict]):
    """What tests said of mutants, by their keys, and of the tree alone, by the tests; kept in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(exist_ok=True)
        for line in file.read_text().splitlines() if file.exists() else ():
            _, key, *verdict = json.loads(line)
            self[key] = Verdict(*verdict)

    def keep(self, name: str, key: str, verdict: Verdict) -> None:
        self[key] = verdict
        what = ("passes", "FAILS") if name == ALONE else ("LIVES", "killed")
        print(f"{what[verdict.failed]:6} {verdict.seconds:6.1f} s  {name}: {verdict.words}", flush=True)
        # What fails without a mutant may pass the next time.
        if name != ALONE or not verdict.failed:
            with self.file.open("a") as file:
                print(json.dumps([name, key, *verdict]), file=file)


def main(arguments: Sequence[str]) -> int:
    """Run mutants that have no result, or those named; return 0 if the tests killed all hand-made ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a file or name: run these again")
    parser.add_argument("--each", type=int, default=1, metavar="N", help="mutants made of a file")
    parser.add_argument("--share", type=share, default=(1, 1), metavar="I/N", help="the I-th of N shares")
    options = parser.parse_args(arguments)
    part, parts = options.share
    mutants = [one for one in (*HAND_MADE, *sample(options.each)) if int(one.key, 16) % parts == part - 1]
    if options.names:
        mutants = [one for one in mutants if any(name in f"{one.file} {one.name}" for name in options.names)]
        if not mutants:
            parser.error(f"no mutant is called {' or '.join(options.names)}")
    results = Results(ROOT / "mutants-output" / "results.jsonl")
    with copied_tree() as tree:
        for mutant in mutants:
            if options.names or mutant.key not in results:
                run(tree, mutant, results)
    print(*report(mutants, results), sep="\n")
    killed = {key for key, verdict in results.items() if verdict.failed}
    return 0 if all(one.key in killed for one in mutants if one in HAND_MADE) else 1


def share(text: str) -> tuple[int, int]:
    """Read ``3/10``, the third of ten shares."""
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(text)
    return part, parts


def run(tree: Path, mutant: Mutant, results: Results) -> None:
    """Run the tests of a mutant until some fail; there is no result where they fail without it."""
    file = tree / mutant.file
    before = file.read_text()
    verdict = Verdict(False, "there are no tests", 0.0)
    for command in mutant.commands or commands_for(mutant.file):
        tests = " ".join(command)
        if tests not in results:
            results.keep(ALONE, tests, judge(tree, command, LIMIT_SECONDS))
        if results[tests].failed:
            return
        file.write_text(mutant.applied_to(before))
        try:
            verdict = judge(tree, command, MORE_SECONDS + 3 * results[tests].seconds)
        finally:
            file.write_text(before)
        if verdict.failed:
            break
    results.keep(mutant.name, mutant.key, verdict)


def judge(tree: Path, command: tuple[str, ...], limit: float) -> Verdict:
    """Run tests on a tree: ``("plain", *pytest options)`` or ``(ranks, *pytest options)``."""
    ranks, *options = command
    if ranks == "plain":
        call = ["-m", "pytest", "-m", "not mpi", "-p", "no:cacheprovider"]
    else:
        call = [str(tree / "tests" / "run_mpi.py"), "--ranks", ranks, "--"]
    call += ["-x", "-q", f"--timeout={TEST_SECONDS}", *options]
    begin = time.monotonic()
    try:
        done = completed([sys.executable, *call], limit, tree, PYTHONPATH=str(tree))
    except TimeoutError:
        return Verdict(True, f"not over after {limit:.0f} s", time.monotonic() - begin)
    said = done.stdout + done.stderr
    words = re.findall(r"^(?:FAILED|ERROR) .*", said, re.MULTILINE) or said.split("\n")[-2:]
    # 5, of pytest itself or on all ranks: none of the tests runs so.
    failed = done.returncode not in {0, 5} and not said.rstrip().endswith("exit status 5")
    return Verdict(failed, words[0][:120], round(time.monotonic() - begin, 1))


def report(mutants: Iterable[Mutant], results: Mapping[str, Verdict]) -> Iterator[str]:
    """Lines of the mutants that live, and a table by folder."""
    judged = [one for one in mutants if one.key in results]
    lived = [one for one in judged if not results[one.key].failed]
    for one in lived:
        yield f"\n{one.file}: {one.name}\n- {one.old.strip()}\n+ {one.new.strip()}"
    yield f"\n{'folder':16}{'mutants':>8}{'killed':>8}{'lived':>8}{'score':>8}"
    tops = [Path(one.file).parts[1] for one in judged]
    for top in [*sorted(set(tops)), "all"]:
        count = tops.count(top) if top != "all" else len(judged)
        living = sum(top in {"all", Path(one.file).parts[1]} for one in lived)
        yield f"{top:16}{count:8}{count - living:8}{living:8}{1 - living / max(count, 1):8.0%}"


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Copy of what the working tree has, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        yield tree


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_on_signal)
    raise SystemExit(main(sys.argv[1:]))

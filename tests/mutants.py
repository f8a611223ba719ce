"""Break the library on purpose, a line at a time, and see the tests notice: ``python -m tests.mutants``.

Each mutant is one change of one file that a careless edit could make. It is applied to a copy of the tree,
where the tests named beside it, which ``make test`` runs too, must fail; without it they pass. A mutant
that lives means that nothing holds that line. ``test_mutants.py`` checks that each still fits its file.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutant_list import MUTANTS, Mutant
from tests.run_mpi import completed

ROOT = Path(__file__).parents[1]
# What a hanging mutant may take; a test that waits for a rank fails long before.
LIMIT_SECONDS = 240


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a tree: whether they failed, the last words, and the seconds that it took."""

    failed: bool
    words: str
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Run the mutants named, all without a name; return 0 when the tests killed every one of them."""
    parser = argparse.ArgumentParser(usage="%(prog)s [NAME ...]", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; all if there is none")
    names = parser.parse_args(arguments).names
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    with copied_tree() as tree:
        sound = set(of_sound(tree, chosen))
        lives = [mutant.name for mutant in chosen if mutant.command in sound and not killed(tree, mutant)]
    unsound = [mutant.name for mutant in chosen if mutant.command not in sound]
    for name in unsound:
        print(f"mutants: {name}: its tests fail without it too")
    print(f"mutants: {len(chosen) - len(lives) - len(unsound)} of {len(chosen)} killed", *lives)
    return 1 if lives or unsound else 0


def of_sound(tree: Path, mutants: Iterable[Mutant]) -> Iterator[tuple[str, ...]]:
    """Commands that pass on the tree as it is: nothing else can tell what a mutant does."""
    for command in dict.fromkeys(mutant.command for mutant in mutants):
        verdict = judge(tree, command)
        say("FAILS" if verdict.failed else "passes", " ".join(command), verdict)
        if not verdict.failed:
            yield command


def killed(tree: Path, mutant: Mutant) -> bool:
    """Whether the tests fail with a mutant in the tree, which is taken out again."""
    file = tree / mutant.file
    before = file.read_text()
    file.write_text(mutant.applied_to(before))
    try:
        verdict = judge(tree, mutant.command)
    finally:
        file.write_text(before)
    say("killed" if verdict.failed else "LIVES", mutant.name, verdict)
    return verdict.failed


def judge(tree: Path, command: tuple[str, ...]) -> Verdict:
    """Run tests on a tree: ``("plain", *pytest options)`` or ``(ranks, *pytest options)``."""
    ranks, *options = command
    if ranks == "plain":
        call = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "not mpi",
            "-p",
            "no:cacheprovider",
            "-x",
            "-q",
            *options,
        ]
    else:
        call = [
            sys.executable,
            str(tree / "tests" / "run_mpi.py"),
            "--ranks",
            ranks,
            "--",
            "-x",
            "-q",
            *options,
        ]
    begin = time.monotonic()
    try:
        done = completed(call, LIMIT_SECONDS, tree, PYTHONPATH=str(tree))
    except TimeoutError:
        return Verdict(True, f"not over after {LIMIT_SECONDS} s", time.monotonic() - begin)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return Verdict(done.returncode != 0, lines[-1] if lines else done.stderr[-200:], time.monotonic() - begin)


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


def say(what: str, which: str, verdict: Verdict) -> None:
    """Print a line about a run."""
    print(f"{what:7} {verdict.seconds:6.1f} s  {which}: {verdict.words.strip()[:90]}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Tracebacks of all threads, on request."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = """
import sys, threading, time
from tests.tracebacks import write_when_asked

def deep(n):
    return n and deep(n - 1)

def turn_for_ever():
    while True:
        deep(900)

write_when_asked(sys.stderr)
threading.Thread(target=turn_for_ever, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


def test_threads_that_go_on_meanwhile_are_in_them_and_do_no_harm(tmp_path):
    said = tmp_path / "said"
    with (
        said.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        ) as process,
    ):
        process.stdout.readline()
        for _ in range(300):
            process.send_signal(signal.SIGUSR1)
            time.sleep(2e-3)
        process.stdin.close()
        assert process.wait(60) == 0
    text = said.read_text()
    assert "in turn_for_ever" in text and "in <module>" in text

"""Two hosts on one machine: ``tests/two_hosts.py [--rate 1gbit] [--delay MS] [-n RANKS] -- COMMAND ...``.

Ranks that share a machine never use a network. So two network namespaces stand in for two hosts, each with
an address, a host name and shared memory of its own, and a cable between them whose bandwidth can be limited
and whose frames can be delayed.
The launcher of the MPI at hand starts ranks in both; what crossed the cable is counted and reported. With
``-n RANKS`` it takes the place of a launcher: ``run_mpi.py --mpiexec ".venv/bin/python tests/two_hosts.py"``.
Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

if not __package__:
    # A script is shown its own folder only.
    sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.run_mpi import default_mpiexec, end_on_signal, environment

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "eth0"
PREFIX = "rma"
NAMESPACES = Path("/run/netns")
# Ranks find here how many of them each host has, the first host first: "2,1".
RANKS_VARIABLE = "TWO_HOSTS_RANKS"
# With packets of the usual 1500 bytes the kernel would spend more time on the cable than the ranks compute.
PACKET_BYTES = 65000
SECONDS_TO_PLUG_IN = 10
SECONDS_TO_END = 5

# Ranks of both hosts see the same processes, so that UCX would find ways around the cable. Open MPI's own
# choice where it finds TCP only is ob1.
OVER_THE_CABLE = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": CABLE,
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": CABLE,
    "PRTE_MCA_prte_if_include": CABLE,
    "PMIX_MCA_ptl_tcp_if_include": CABLE,
}

# Stands in for ssh: drops options, takes an address, and has a shell on that host run the rest.
REMOTE_SHELL = """#!/bin/sh
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
case "$1" in
{cases}
*) echo "two_hosts: no host has the address $1" >&2; exit 1 ;;
esac
shift
exec ip netns exec "$host" unshare --uts --mount sh -c "{set_up} || exit 1; $*"
"""
SET_UP = "hostname {host} && mount -t tmpfs -o size=50% shm /dev/shm"


class TwoHosts:
    """Two hosts and the cable between them, from ``with`` to its end.

    Parameters
    ----------
    rate
        Bandwidth of the cable in either direction as ``tc`` spells it, ``"1gbit"``; None for no limit.
    delay
        Seconds that every frame is under way for, in either direction.
    mpiexec
        The launcher with its options, of MPICH or Open MPI.

    Raises
    ------
    RuntimeError
        If this machine does not allow it; ``obstacle()`` says so beforehand.
    """

    def __init__(
        self, rate: str | None = None, mpiexec: Sequence[str] | None = None, delay: float = 0.0
    ) -> None:
        self.rate, self.delay = rate, delay
        self.names = tuple(f"{PREFIX}{os.getpid()}-{side}" for side in "ab")
        self._mpiexec = list(mpiexec or shlex.split(default_mpiexec()))
        self._folder = Path()
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        problem = obstacle()
        if problem:
            raise RuntimeError(problem)
        remove_forgotten_hosts()
        with contextlib.ExitStack() as resources:
            folder = tempfile.TemporaryDirectory(prefix="two-hosts-")
            self._folder = Path(resources.enter_context(folder))
            for name in self.names:
                resources.callback(remove_host, name)
                ip("netns", "add", name)
            if self.delay:
                self._delay_frames(resources)
            self._lay_cable()
            self._write_remote_shell()
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def _lay_cable(self) -> None:
        here, there = self.names
        if not self.delay:
            peer = ("peer", "name", CABLE, "netns", there)
            ip("link", "add", "name", CABLE, "netns", here, "type", "veth", *peer)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", CABLE, "mtu", str(PACKET_BYTES), "up")
            if self.rate:
                limit = ("tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms")
                call("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", *limit)
        # The kernel takes up to a second to see that both ends are plugged in.
        deadline = time.monotonic() + SECONDS_TO_PLUG_IN
        # Of a TAP device it does not know.
        up = "UNKNOWN" if self.delay else "UP"
        while any(self._look_at_cable(name)["operstate"] != up for name in self.names):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cable between {here} and {there} does not come up")
            time.sleep(0.02)

    def _delay_frames(self, resources: contextlib.ExitStack) -> None:
        command = [sys.executable, str(Path(__file__).with_name("delayed_cable.py")), *self.names]
        carrier = subprocess.Popen([*command, CABLE, str(self.delay)], stdout=subprocess.PIPE, text=True)
        resources.enter_context(carrier)
        resources.callback(carrier.kill)
        if carrier.stdout is None or not carrier.stdout.readline():
            raise RuntimeError("the cable that delays frames could not be plugged in")

    @staticmethod
    def _look_at_cable(host: str) -> dict[str, Any]:
        seen: list[dict[str, Any]] = json.loads(ip("-n", host, "-json", "-statistics", "link", "show", CABLE))
        return seen[0]

    def _write_remote_shell(self) -> None:
        hosts = zip(ADDRESSES, self.names, strict=True)
        cases = "\n".join(f"{address}) host={name} ;;" for address, name in hosts)
        self._remote_shell.write_text(REMOTE_SHELL.format(cases=cases, set_up=SET_UP.format(host="$host")))
        self._remote_shell.chmod(0o700)

    @property
    def _remote_shell(self) -> Path:
        return self._folder / "remote-shell"

    def crossed(self) -> tuple[int, int]:
        """Bytes that each host has sent over the cable so far, packet headers included."""
        first, second = (self._look_at_cable(name)["stats64"]["tx"]["bytes"] for name in self.names)
        return first, second

    def run(self, ranks: Sequence[int], command: Sequence[str], seconds: float | None = None) -> int:
        """Run a command as so many ranks on each host; return the launcher's exit status.

        Blocking. Raises ``subprocess.TimeoutExpired`` after so many seconds; the ranks are ended then.
        """
        launcher = subprocess.Popen(
            self._launch(ranks, command),
            stdin=subprocess.DEVNULL,
            env=environment(**OVER_THE_CABLE | os.environ, **{RANKS_VARIABLE: ",".join(map(str, ranks))}),
        )
        with launcher:
            try:
                return launcher.wait(seconds)
            finally:
                end(launcher)
                for name in self.names:
                    kill_processes(name)

    def _launch(self, ranks: Sequence[int], command: Sequence[str]) -> list[str]:
        hosts = [(address, n) for address, n in zip(ADDRESSES, ranks, strict=True) if n]
        file = self._folder / "hosts"
        options: tuple[str, ...]
        if "Open MPI" in call(*self._mpiexec, "--version"):
            file.write_text("".join(f"{address}\n" * n for address, n in hosts))
            options = ("--prtemca", "plm_ssh_agent", str(self._remote_shell), "--hostfile", str(file))
            options += ("--map-by", "seq:OVERSUBSCRIBE")
        else:
            file.write_text("".join(f"{address}:{n}\n" for address, n in hosts))
            options = ("-launcher", "ssh", "-launcher-exec", str(self._remote_shell), "-f", str(file))
            options += ("-localhost", ADDRESSES[0])
        inner = shlex.join([*self._mpiexec, *options, "-n", str(sum(ranks)), *command])
        return [str(self._remote_shell), ADDRESSES[0], f"exec {inner}"]


def obstacle() -> str | None:
    """Say why this machine cannot play two hosts, None if it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"there is no {', '.join(missing)} (Debian: apt-get install iproute2 util-linux hostname)"
    if shutil.which(shlex.split(default_mpiexec())[0]) is None:
        return "there is no mpiexec"
    trial = ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "name", CABLE, "type", "veth"]
    tried = subprocess.run(trial, capture_output=True, text=True, check=False)
    return f"no namespaces and cables here: {tried.stderr.strip()}" if tried.returncode else None


def call(*command: str) -> str:
    """Run a tool and return what it wrote; RuntimeError with its words if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def ip(*arguments: str) -> str:
    """Run iproute2's ``ip``."""
    return call("ip", *arguments)


def kill_processes(host: str) -> None:
    """End what still runs on a host; the launcher had its chance to do so."""
    for pid in ip("netns", "pids", host).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def remove_host(name: str) -> None:
    """Remove a host with its processes and its end of the cable, if it is there."""
    if (NAMESPACES / name).exists():
        kill_processes(name)
        ip("netns", "delete", name)


def remove_forgotten_hosts() -> None:
    """Remove the hosts of earlier runs that were killed: the process in their name is no more."""
    for path in NAMESPACES.glob(f"{PREFIX}*-[ab]"):
        pid = path.name.removeprefix(PREFIX)[:-2]
        if pid.isdigit() and not Path("/proc", pid).exists():
            remove_host(path.name)


def end(launcher: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end with its ranks, and kill it if it does not."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            launcher.kill()


def main(arguments: Sequence[str]) -> int:
    """Run a command on two hosts; return its exit status, or 1 where too little crossed between them."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--rate RATE] [--delay MS] [--least-bytes N] [--ranks-per-host N | -n RANKS]"
        " [--] COMMAND ...",
        description="Run a command as ranks on two hosts within this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="say whether this machine can do it, and stop")
    parser.add_argument("--rate", help="limit of the bandwidth in each direction, as 1gbit")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds that a frame is under way for")
    parser.add_argument("--least-bytes", type=int, default=1, help="fail where less crossed the cable")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--ranks-per-host", type=int, default=1)
    number.add_argument("-n", type=int, dest="ranks", help="ranks of both hosts; the first has the odd one")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command

    problem = obstacle()
    if problem or options.check:
        print(f"two_hosts: {f'skipped: {problem}' if problem else 'possible here'}", flush=True)
        return 1 if problem else 0
    if not command:
        parser.error("COMMAND is missing")
    ranks = (options.ranks + 1) // 2 if options.ranks else options.ranks_per_host
    share = (ranks, options.ranks - ranks if options.ranks else ranks)
    if min(share) < 1:
        parser.error("each host needs a rank")
    with TwoHosts(options.rate, delay=options.delay / 1e3) as hosts:
        begin = time.monotonic()
        status = hosts.run(share, command)
        there, back = hosts.crossed()
        seconds = time.monotonic() - begin
    print(f"two_hosts: {there:,} bytes there and {back:,} back in {seconds:.1f} s", flush=True)
    if min(there, back) < options.least_bytes:
        print(f"two_hosts: {options.least_bytes:,} bytes were to cross each way", flush=True)
        return status or 1
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_on_signal)
    raise SystemExit(main(sys.argv[1:]))

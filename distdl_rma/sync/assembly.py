"""Buckets put together on all ranks, or on none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from distdl_rma import errors
from distdl_rma.errors import ConfigurationError
from distdl_rma.machine import Machine
from distdl_rma.segments.collectives.gather_bytes import gather_bytes
from distdl_rma.sync.bucket import Bucket, BucketKind, SlotGroup, bucketed


class Assembly:
    """Makes the buckets of one synchronisation.

    Parameters
    ----------
    machine
        The machine.
    bucket_nbytes
        Gradients travel together up to this many bytes.
    """

    def __init__(self, machine: Machine, bucket_nbytes: int) -> None:
        self._machine, self._bucket_nbytes = machine, bucket_nbytes
        # Buckets are counted per kind: what is alike on their ranks.
        self._numbers: Counter[BucketKind] = Counter()
        self._made = 0

    def make(self, rows: Sequence[Sequence[SlotGroup]]) -> list[Bucket]:
        """Buckets of all groups that travel, row by row, with their memory; collective, blocking.

        Nothing is taken from the layers yet, and the ranks of a bucket have not met in it.

        Raises
        ------
        DistdlError
            On all ranks with the same words, if some rank cannot make its own; nothing has changed then.
        """
        self._made += 1
        numbers, made, failure = self._numbers.copy(), list[Bucket](), list[str]()
        try:
            for groups in rows:
                for members in bucketed(groups, self._bucket_nbytes):
                    made.append(self._bucket(members))
        except Exception as error:  # noqa: BLE001 - all ranks hear of it
            failure = [type(error).__name__, str(error)]
            _discard(made)
        words = json.dumps(failure).encode()
        told = gather_bytes(self._machine.segments, words, f"GradientSync (memory {self._made})")
        for said, ranks in told.items():
            if json.loads(said):
                kind, text = json.loads(said)
                if not failure:
                    _discard(made)
                self._numbers = numbers
                known = vars(errors).get(kind, ConfigurationError)
                raise known(f"GradientSync: on rank {ranks[0]}: {text}")
        return made

    def _bucket(self, members: Sequence[SlotGroup]) -> Bucket:
        kind = members[0].kind
        number = self._numbers[kind]
        self._numbers[kind] += 1
        return Bucket(self._machine, f"gradients {number}", members)


def _discard(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.allreduce.close()

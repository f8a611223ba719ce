"""What exists once is shared by copies, or refuses to be copied."""

import copy

import pytest

from distdl_rma import Machine, UnsupportedError

pytestmark = pytest.mark.mpi


def test_a_machine_and_its_groups_are_shared_by_copies(P_world):
    machine = Machine.of(P_world)
    assert copy.deepcopy(machine) is copy.copy(machine) is machine
    assert copy.deepcopy(P_world) == P_world
    assert copy.deepcopy(P_world).home is machine
    group = machine.group(name="mine")
    assert copy.deepcopy([group])[0] is group
    group.close()


def test_what_lies_in_the_segment_is_not_copied(P_world):
    with pytest.raises(UnsupportedError, match="what lies in the segment neither"):
        copy.deepcopy(Machine.of(P_world).segments.get_segment_buffer(8))

"""Looks at requests of MPI: as many tests as there may be fragments."""

from distdl_rma.segments.collectives.engine.stepped_algorithm import complete, looks


class Fragments:
    """A request that each test takes a fragment further."""

    def __init__(self, number):
        self.left = number

    def Test(self):  # noqa: N802
        self.left -= 1
        return self.left <= 0


def test_a_look_takes_as_many_tests_as_there_may_be_fragments():
    assert [len(looks(nbytes)) for nbytes in (0, 8, 64 << 10, 1 << 20, 1 << 40)] == [1, 1, 2, 17, 128]


def test_a_look_ends_with_the_last_fragment_and_another_goes_on():
    request = Fragments(20)
    assert not complete(request, looks(1 << 20))
    assert request.left == 3
    assert complete(request, looks(1 << 20))
    assert request.left == 0

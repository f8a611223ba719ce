"""Functions are kept, the objects that methods belong to are not."""

import weakref

import pytest

from distdl_rma.ops.weak_method import weakly_bound


class Owner:
    def double(self, x):
        return 2 * x


def test_a_method_does_not_keep_its_object():
    owner = Owner()
    kept, seen = weakly_bound(owner.double), weakref.ref(owner)
    assert kept()(3) == 6
    del owner
    assert seen() is None
    with pytest.raises(ReferenceError, match=r"Owner\.double belonged to an object that is gone"):
        kept()


def test_a_function_is_kept():
    kept = weakly_bound(lambda x: x + 1)
    assert kept()(3) == 4

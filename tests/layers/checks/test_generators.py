"""Whether generators of random numbers that were seeded alike have drifted apart."""

import torch

from distdl_rma.layers.checks.generators import generator_state, have_drifted, random_draw


def test_generators_with_one_seed_and_different_states_have_drifted():
    torch.manual_seed(3)
    before, draw = generator_state(), random_draw(torch.get_rng_state())
    torch.rand(1)
    after = generator_state()
    assert have_drifted([before, after]) and not have_drifted([before, before]) and not have_drifted([])
    assert draw.word != random_draw(torch.get_rng_state()).word and "in state " in draw.described
    torch.manual_seed(4)
    assert not have_drifted([after, generator_state()])

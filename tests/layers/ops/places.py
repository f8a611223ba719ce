"""Places in the segment in which gradients are computed."""

from functools import partial


def segment_of(machine):
    """Addresses of this rank's segment."""
    memory = machine.segments.segment.memory
    return range(memory.ctypes.data, memory.ctypes.data + memory.nbytes)


def watch(placed):
    """Addresses of the places that a layer is offered from now on, by name; None where it is offered none."""
    taken = {key: [] for key in placed.taken_over}

    def noted(key, offer):
        place = offer()
        # Of a place that is held here the gradient would be copied.
        taken[key].append(None if place is None else place.data_ptr())
        return place

    for key, (parameter, offer) in list(placed.taken_over.items()):
        placed.take_over(key, parameter, partial(noted, key, offer))
    return taken

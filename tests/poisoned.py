"""Memory that a kernel forgets to write is NaN, not luck.

A module of its own, as torch.compile looks functions up by their module's name, and there is more than one conftest.
"""

import torch
import torch._dynamo  # now: its tables hold torch's functions as they are at its import, and it traces no others


def poisoned(make):
    def empty(*args, **kwargs):
        out = make(*args, **kwargs)
        with torch.no_grad():  # a leaf may be asked for
            return out.fill_(float("nan")) if out.is_floating_point() else out

    return empty

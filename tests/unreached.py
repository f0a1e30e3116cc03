"""A function through which no gradient passes, as through a later detach()."""

import torch


class Unreached(torch.autograd.Function):
    """The identity, which returns no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return None

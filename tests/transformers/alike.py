"""Compare training steps: only the order of fp32 sums may differ.

Another order of a sum equals the first order with its weights moved by a rounding or a few. How far that moves a step
depends on the model: 5 roundings of the gradient in Gemma 3, 400 in Bailing's hybrid. So the plain model itself is
asked: it takes its step twice more with every weight moved by one rounding, up or down at random.

    moved = |gradients with moved weights - gradients| / |gradients|,  of all parameters together, the larger of both
    a gradient may differ by  8 moved |gradient| + eps |all gradients|,  in the norm of its parameter
    the logits by             8 moved |logits|,  with `moved` of the logits
    the loss by               8 eps (|loss| + |gradient * weight|),  the first order of what moved weights do to it

The term of all gradients is for gradients that are zero in exact arithmetic, as that of a bias of keys, which softmax
does not see: their sums leave noise of the size of what cancels.

Measured with PyTorch's kernels for AVX-512, for AVX2 and for neither, and 1, 2 and 4 threads: over the 308 classes of
docs/models.md, patched and plain differ by at most 0.13 of that in a gradient and 0.20 in the loss, and by 0.20 in a
gradient that cancels; five models with every sum of every linear layer backwards by at most 0.35. So no CPU comes near
1, and a scale of 1.001 in one parameter's gradient is 2 to 20 (test_alike.py plants it, and others).
"""

import contextlib
import dataclasses

import torch

EPS = torch.finfo(torch.float32).eps
ROOM = 8
SEEDS = 0, 1
MOVED_AT_MOST = 1e-3  # beyond, a model is too ill-conditioned for mistakes to show; T5, the worst, has 1e-4


@dataclasses.dataclass
class Step:
    """What a model returned and learned: outputs, and one gradient or None of each parameter."""

    outputs: object
    gradients: list


def step(model, run):
    """The training step `run(model)`, of whose gradients the model keeps none."""
    outputs = run(model)
    outputs.loss.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    return Step(outputs, gradients)


@contextlib.contextmanager
def moved_weights(model, seed=0):
    """Every floating-point weight moved by one rounding, up or down at random, and put back."""
    generator = torch.Generator().manual_seed(seed)
    weights = [p.detach() for p in model.parameters() if p.is_floating_point()]
    kept = [w.clone() for w in weights]
    for w in weights:
        w *= 1 + EPS * (torch.randint(0, 2, w.shape, generator=generator) * 2 - 1).to(w)
    try:
        yield
    finally:
        for w, before in zip(weights, kept):
            w.copy_(before)


class Reference:
    """A plain model's training step and the room that another order of sums needs.

    Args:
        model: the plain model, in fp32 and without gradients.
        run: calls it; the same call twice gives the same outputs, with a `loss`.
    """

    def __init__(self, model, run):
        self.step, moved = step(model, run), []
        for seed in SEEDS:
            with moved_weights(model, seed):
                moved.append(step(model, run))
        self.names = [name for name, _ in model.named_parameters()]
        self.size = _norm(self.step.gradients)
        self.moved = max(_distance(m.gradients, self.step.gradients) for m in moved) / self.size if self.size else 0.0
        assert self.moved < MOVED_AT_MOST, f"a rounding of the weights moves the gradient by {self.moved:.1e} of it"
        by_weights = [p.detach() * g for p, g in zip(model.parameters(), self.step.gradients) if g is not None]
        self.room_of_loss = ROOM * EPS * (_norm([self.step.outputs.loss]) + _norm(by_weights))
        self.moved_outputs = [m.outputs for m in moved]
        self.shares_of_plain = ""

    def widen(self, factor, found):
        """Allow `factor` times the difference of `found`, a `Step` of a plain model that runs in another way."""
        loss, (gradients, name) = self.loss(found.outputs.loss), self.gradients(found.gradients)
        self.shares_of_plain = f"; plain: {loss:.3g}, {gradients:.3g} ({name})"
        self.room_of_loss *= max(1, factor * loss)
        self.moved *= max(1, factor * gradients)

    def loss(self, found):
        """The difference of a loss as a share of what is allowed."""
        return _share(found - self.step.outputs.loss, self.room_of_loss)

    def logits(self, found):
        """Return the difference of logits as a share of the limit; infinite if finiteness differs."""
        expected, finite = self.step.outputs.logits, self.step.outputs.logits.isfinite()
        if not torch.equal(finite, found.isfinite()):
            return float("inf")
        moved = max(_norm([(outputs.logits - expected)[finite]]) for outputs in self.moved_outputs)
        return _share((found - expected)[finite], ROOM * moved + EPS * _norm([expected[finite]]))

    def gradients(self, found):
        """(The worst parameter's difference as a share of what is allowed, its name)."""
        worst = 0.0, ""
        for name, g, f in zip(self.names, self.step.gradients, found, strict=True):
            if (g is None) != (f is None):
                return float("inf"), name
            if g is not None:
                room = ROOM * self.moved * _norm([g]) + EPS * self.size
                worst = max(worst, (_share(f - g, room), name))
        return worst

    def assert_same(self, found):
        """Hold the `Step` of another model to this one's."""
        share = self.loss(found.outputs.loss)
        beside = self.shares_of_plain
        expected = self.step.outputs.loss
        assert share <= 1, f"loss {found.outputs.loss} instead of {expected}: {share:.3g} of its room{beside}"
        share, name = self.gradients(found.gradients)
        assert share <= 1, f"gradient of {name}: its difference is {share:.3g} of its room{beside}"


def _share(difference, room):
    found = _norm([difference])
    return found / room if found <= room * 1e30 else float("inf")  # of no room, or not a number


def _distance(found, expected):
    return _norm([f - e for f, e in zip(found, expected) if e is not None])


def _norm(tensors):
    """The norm of several tensors together, of which some may be None."""
    return sum(t.detach().double().square().sum().item() for t in tensors if t is not None) ** 0.5

"""Cases of divergences between the distributions of a student and a teacher."""

from math import inf, nan

import torch

from liger_hw.testing.case import OpCases, Shape
from liger_hw.testing.inputs import put
from liger_lab.models import SMALL_AND_MEDIUM, TOKENS

SMALL = ((12, 130), (5, 517), (0, 8), (20, 9))
REDUCTIONS = ("sum", "mean", "batchmean", "none")


def jsds(new):
    for rows, vocabulary in SMALL:
        q, p = new.log_probs(rows, vocabulary), new.log_probs(rows, vocabulary, grad=False)
        for beta in (0.0, 0.1, 0.5, 1.0):
            yield (q, p), {"beta": beta}
        yield (q, p), {"labels": new.targets(rows, vocabulary)}
    yield (new.log_probs(2, 20000), new.log_probs(2, 20000, grad=False)), {}
    yield (q, p), {"labels": torch.full((20,), -100, device=new.device)}
    for beta in (0.0, 0.1, 0.5, 1.0):
        for labels in ([-100, 0, 0, 0], [0, -100, 0, 0], None):  # NaN counts in the teacher, in the student, in both
            options = {} if labels is None else {"labels": torch.tensor(labels, device=new.device)}
            yield impossible(new), {"beta": beta} | options


def impossible(new):
    """Make log-probabilities that exclude 30 classes, with a NaN in a row of each model."""
    student, teacher = new.log_probs(4, 130), new.log_probs(4, 130, grad=False)
    excluded = (..., slice(100, None)), -inf
    return put(student, excluded, ((0, 7), nan)), put(teacher, excluded, ((1, 7), nan))


def kl_divs(new):
    for rows, vocabulary in SMALL:
        q, p = new.log_probs(rows, vocabulary), new.log_probs(rows, vocabulary, grad=False)
        for reduction in REDUCTIONS:
            yield (q, p.exp()), {"reduction": reduction}
        yield (q, p), {"log_target": True, "reduction": "batchmean"}
    yield (new.log_probs(2, 20000), new.log_probs(2, 20000, grad=False)), {"log_target": True}
    yield impossible(new), {"log_target": True, "reduction": "none"}


def tvds(new):
    for rows, vocabulary in SMALL:
        q, p = (new.log_probs(rows, vocabulary, grad=False).exp() for _ in range(2))
        q.requires_grad_()
        for reduction in REDUCTIONS:
            yield (q, p), {"reduction": reduction}
        yield (q, p), {"labels": new.targets(rows, vocabulary)}


def cross_entropies_with_tvd(new):
    for rows, vocabulary in (*SMALL, (3, 64), (2, 4200)):
        student, teacher = new.randn(rows, vocabulary), new.randn(rows, vocabulary, grad=False)
        yield (student, teacher, new.targets(rows, vocabulary)), {}
    yield (student, new.randn(2, 4200, dtype=torch.float32, grad=False), new.targets(2, 4200)), {}
    yield (student[:, 3:], teacher[:, 1:-2], new.targets(2, 4197, -1)), {"ignore_index": -1}


def wide_cross_entropies_with_tvd(new):
    for vocabulary in (128256, 50257):
        yield (new.randn(2, vocabulary), new.randn(2, vocabulary, grad=False), new.targets(2, vocabulary)), {}


def logits_and_labels(rows, vocabulary):
    return Shape(
        f"{rows}x{vocabulary}",
        lambda new: (
            new.large(rows, vocabulary), new.large(rows, vocabulary, grad=False), new.large_targets(rows, vocabulary)
        ),
    )  # fmt: skip


def wide(*options):
    """Make the wide cases; their values are arbitrary, because the compile matrix runs no kernel."""

    def cases(new):
        for vocabulary in (128256, 50257):
            for option in options:
                yield (new.randn(2, vocabulary), new.randn(2, vocabulary, grad=False)), option

    return cases


def wide_jsds(new):
    return wide(*({"beta": beta, "labels": new.targets(2, 9)} for beta in (0.0, 0.5, 1.0)))(new)


def shapes(student_probabilities, teacher_probabilities):
    """Make the shapes of an op that takes probabilities or their logarithms."""

    def shape(rows, vocabulary):
        def tensors(new):
            student, teacher = (new.large(rows, vocabulary, grad=False).log_softmax(-1) for _ in range(2))
            student = student.exp() if student_probabilities else student
            return student.requires_grad_(), teacher.exp() if teacher_probabilities else teacher

        return Shape(f"{rows}x{vocabulary}", tensors)

    return [shape(TOKENS // 2, model.vocabulary) for model in SMALL_AND_MEDIUM]


CASES = {
    "jsd": OpCases(jsds, wide_jsds, shapes(False, False)),
    "kl_div": OpCases(kl_divs, wide({}, {"log_target": True}), shapes(False, True)),
    "cross_entropy_tvd": OpCases(
        cross_entropies_with_tvd, wide_cross_entropies_with_tvd,
        [logits_and_labels(TOKENS // 2, model.vocabulary) for model in SMALL_AND_MEDIUM],
        [logits_and_labels(256, 32000)],
    ),
    "tvd": OpCases(tvds, wide({}), shapes(True, True)),
}  # fmt: skip

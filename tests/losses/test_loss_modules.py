import copy
import pickle

import pytest
import torch
from test_preference import case

from liger_hw import (
    DistillationLoss,
    MultiTokenLoss,
    OfflineDistillationLoss,
    PolicyLoss,
    PreferenceLoss,
    UnpairedPreferenceLoss,
    losses,
)
from liger_hw.losses.distillation import SOFT_LOSSES
from liger_hw.losses.policy import OBJECTIVES
from liger_hw.losses.preference import preference_loss, unpaired_preference_loss
from liger_hw.losses.preference_formulas import PAIR_LOSSES, UNPAIRED_LOSSES

MODULES = {
    PreferenceLoss: [{"loss_type": name} for name in PAIR_LOSSES] + [{"loss_type": "simpo", "gamma": 1.0}],
    UnpairedPreferenceLoss: [{"loss_type": name} for name in UNPAIRED_LOSSES] + [{"kl": 0.1}],
    PolicyLoss: [{"loss_type": name} for name in OBJECTIVES] + [{"delta": 1.5, "return_entropy": True}],
    DistillationLoss: [{"soft_loss": name} for name in SOFT_LOSSES],
    OfflineDistillationLoss: [{"rest": False, "temperature": 2.0}],
    MultiTokenLoss: [{"shifts": (1, 2)}],
}


@pytest.mark.parametrize("module", MODULES)
def test_options(module):
    for options in MODULES[module]:
        assert all(f"{name}={value!r}" in repr(module(**options)) for name, value in options.items())
    with pytest.raises(ValueError, match="^unknown option 'gama'.* Options of"):
        module(gama=1)


def test_an_option_set_later_holds():
    (x, w, b), ref, labels = case()
    later, loss = PreferenceLoss(), PreferenceLoss(loss_type="ipo", beta=0.3)
    assert not hasattr(later, "beta")
    before = copy.copy(later)
    later.loss_type, later.beta = "ipo", 0.3
    assert repr(before) == repr(PreferenceLoss())
    later.note = "no option"
    assert repr(later) == repr(loss) and later.beta == 0.3 and later.note == "no option"
    for module in (later, copy.deepcopy(later), pickle.loads(pickle.dumps(later))):
        results = [of(x, w, labels, b, ref_x=ref[0], ref_weight=ref[1]) for of in (module, loss)]
        assert all(torch.equal(found, expected) for found, expected in zip(*results))


@pytest.mark.parametrize("registered", [False, True])
def test_a_tensor_set_later_is_an_option(registered):
    (x, w, b), *_, labels = case()
    loss, bias = PreferenceLoss(loss_type="simpo", bias=torch.zeros_like(b)), b.detach()
    loss.bias = torch.nn.Parameter(bias) if registered else bias
    if registered:
        loss.register_buffer("beta", torch.tensor(0.1))
    loss.beta = torch.tensor(0.7)
    assert torch.equal(loss.bias, bias) and loss.beta == 0.7
    assert [*loss.state_dict()] == (["bias", "beta"] if registered else [])
    assert torch.equal(loss(x, w, labels)[0], PreferenceLoss(loss_type="simpo", bias=bias, beta=0.7)(x, w, labels)[0])
    if registered:
        loss(x, w, labels)[0].backward()
        assert loss.bias.grad.norm() > 0
    del loss.bias, loss.beta
    assert torch.equal(loss(x, w, labels)[0], PreferenceLoss(loss_type="simpo")(x, w, labels)[0])


class WithAttributes(PreferenceLoss):
    beta, loss_type = 0.7, property(lambda self: "simpo")


def test_attributes_of_a_subclass_are_options():
    (x, w, b), *_, labels = case()
    b = b.detach()
    loss = WithAttributes(bias=b)
    assert torch.equal(loss(x, w, labels)[0], PreferenceLoss(loss_type="simpo", bias=b, beta=0.7)(x, w, labels)[0])
    for given in (loss, WithAttributes(bias=b, beta=0.5)):
        given.beta = 0.3
        expected = PreferenceLoss(loss_type="simpo", bias=b, beta=0.3)(x, w, labels)[0]
        assert given.beta == 0.3 and torch.equal(given(x, w, labels)[0], expected)
    assert WithAttributes(beta=0.5).beta == 0.5


class Halved(torch.nn.Module):
    def forward(self, bias):
        return bias / 2


def test_a_parametrized_option():
    (x, w, b), *_, labels = case()
    loss = PreferenceLoss(loss_type="simpo")
    loss.bias = torch.nn.Parameter(b.detach())
    torch.nn.utils.parametrize.register_parametrization(loss, "bias", Halved())
    expected = PreferenceLoss(loss_type="simpo", bias=b.detach() / 2)(x, w, labels)[0]
    assert torch.equal(loss(x, w, labels)[0], expected)


def test_a_buffer_without_a_value_is_no_option():
    (x, w, _), *_, labels = case()
    loss = PreferenceLoss(loss_type="simpo")
    loss.register_buffer("softcap", None)
    assert torch.equal(loss(x, w, labels)[0], PreferenceLoss(loss_type="simpo")(x, w, labels)[0])
    loss.softcap = torch.tensor(2.0)
    assert [*loss.state_dict()] == ["softcap"]
    assert torch.equal(loss(x, w, labels)[0], PreferenceLoss(loss_type="simpo", softcap=2.0)(x, w, labels)[0])


def test_a_parameter_takes_the_place_of_an_option():
    class Learning(PreferenceLoss):
        def __init__(self, bias):
            super().__init__(loss_type="simpo", bias=torch.zeros_like(bias))
            self.bias = torch.nn.Parameter(bias)

    (x, w, b), *_, labels = case()
    expected = PreferenceLoss(loss_type="simpo", bias=b.detach())(x, w, labels)[0]
    assert torch.equal(Learning(b.detach())(x, w, labels)[0], expected)


def test_a_subclass_may_learn_a_number():
    class Learning(PreferenceLoss):
        def __init__(self):
            super().__init__(beta=0.1)
            self.temperature = torch.nn.Parameter(torch.ones(()))

        def forward(self, *tensors, **more):
            return super().forward(*tensors, beta=0.3, **more)

    (x, w, b), ref, labels = case()
    loss = Learning()
    loss.register_buffer("ref_bias", torch.zeros(1))
    assert [*loss.state_dict()] == ["temperature", "ref_bias"]
    found, expected = (
        of(x, w, labels, b, ref_x=ref[0], ref_weight=ref[1])[0] for of in (loss, PreferenceLoss(beta=0.3))
    )
    assert torch.equal(found, expected)


def test_it_is_the_function():
    (x, w, b), ref, labels = case()
    module = PreferenceLoss(loss_type="ipo", beta=0.3, average_log_prob=True)
    found = module(x, w, labels, b, ref_x=ref[0], ref_weight=ref[1])
    expected = preference_loss(x, w, labels, b, "ipo", 0.3, average_log_prob=True, ref_x=ref[0], ref_weight=ref[1])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_the_page_lists_every_loss():
    """Each loss type has a line of docs/losses.md with the papers of its docstring."""
    import re
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    lines = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    functions = PAIR_LOSSES | UNPAIRED_LOSSES
    assert set(functions) | set(OBJECTIVES) | set(SOFT_LOSSES) <= set(lines)
    for name, function in functions.items():
        for paper in re.findall(r"arXiv:[0-9.]+[0-9](?: eq. [0-9.]*[0-9])?", function.__doc__):
            assert paper in lines[name], f"{name}: {paper}"
    for name in SOFT_LOSSES[:-1]:
        (paper,) = re.findall(r"arXiv:[0-9.]+[0-9](?: eq. [0-9.]*[0-9])?", lines[name])
        assert paper.split()[0].removeprefix("arXiv:") in losses.distillation.distillation_loss.__doc__


@pytest.mark.parametrize(
    "function, formulas", [(preference_loss, PAIR_LOSSES), (unpaired_preference_loss, UNPAIRED_LOSSES)]
)
def test_the_docstring_names_what_a_loss_type_takes(function, formulas):
    """The docstring names each loss type with a smoothing, an option, or a loss of the whole batch."""
    documentation = " ".join(function.__doc__.split())
    for name, formula in formulas.items():
        if formula.smooths or formula.whole_batch:
            assert f'"{name}"' in documentation
        for option in formula.options:
            assert f'`{option}` of "{name}"' in documentation

"""Random programs of `programs.py`, in a run of the tests; `run.py` runs thousands, with progress."""

import os

import pytest

pytest.importorskip("hypothesis")
import programs  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

EXAMPLES = int(os.environ.get("LIGER_HW_FUZZ", "25"))
ACTION = st.tuples(st.integers(0, len(programs.ACTIONS) - 1), st.integers(0, 63))


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES == 25, suppress_health_check=list(HealthCheck),
    print_blob=True,
)  # fmt: skip
@given(family=st.sampled_from(sorted(programs.FAMILIES)), program=st.lists(ACTION, min_size=3, max_size=14))
def test_a_patched_model_is_the_plain_one_whatever_is_done(family, program):
    programs.run(family, program)


@pytest.mark.parametrize("family", sorted(programs.FAMILIES))
def test_a_small_mistake_is_a_difference(family, monkeypatch):
    def mistaken(side, choice):
        programs.forward(side, 10)
        if side.kind == "patched":
            side.out.logits.register_hook(lambda grad: grad * 1.0001)
        side.out.loss.backward()

    monkeypatch.setattr(programs, "ACTIONS", (mistaken,))
    with pytest.raises(programs.Difference, match="grad of"):
        programs.run(family, [(0, 0)])


@pytest.mark.parametrize(
    "last",
    [
        (("kept_by_hook", 47), ("written_before_backward", 43), ("step", 22), ("training_step", 12)),
        (("written_before_backward", 19), ("own_loss", 33), ("step", 63), ("second_order", 55)),
    ],
    ids=["fused", "foreach"],
)
def test_a_judge_that_keeps_copies_has_the_weights_of_now(last):
    """torch's context of copies takes an older one after a write that it does not count."""
    names = [action.__name__ for action in programs.ACTIONS]
    assert programs.run("phi", [(names.index(name), choice) for name, choice in last]) is None


@pytest.mark.parametrize(
    "family, last",
    [
        ("llama tied", [("written_before_backward", 27), ("cast", 20), ("written_before_backward", 34)]),
        ("gemma2", [("written_before_backward", 25), ("around", 23), ("backward", 42)]),
    ],
)
def test_an_error_that_a_plain_model_with_copies_has_not_is_unjudged(family, last):
    names = [action.__name__ for action in programs.ACTIONS]
    error = programs.run(family, [(names.index(name), choice) for name, choice in last])
    assert isinstance(error, programs.Unjudged)


def test_torchs_error_of_a_freed_graph_is_no_refusal(monkeypatch):
    def freed(side, choice):
        programs.forward(side, 10)
        side.out.loss.backward(retain_graph=side.kind != "patched")
        side.out.loss.backward()

    monkeypatch.setattr(programs, "ACTIONS", (freed,))
    with pytest.raises(programs.Difference, match="a second time"):
        programs.run("llama", [(0, 0)])

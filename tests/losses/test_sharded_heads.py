"""Losses of tokens' log-probabilities whose vocabulary ranks share, against those of the whole head."""

import pytest
import torch
import torch.distributed as dist
from ranks import device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import liger_hw
from liger_hw.losses.engine import logits_loss

VOCABULARY, HIDDEN, ANSWERS, LENGTH = 37, 8, 4, 5


def losses(x, weight, bias, ref_weight, tokens):
    """Yield a name, and a loss with what is logged beside it, of each loss that such a head serves."""
    advantages, old = torch.tensor([1.0, -1.0, 0.5, 2.0]).to(x.device), torch.full(tokens.shape, -3.5).to(x.device)
    reference = {"ref_x": x.detach().flip(0), "ref_weight": ref_weight}
    gspo = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
    for options in ({"entropy_coef": 0.1}, gspo, {"counted_rows": 18}, gspo | {"counted_rows": 19}):
        mask = tokens != -100
        yield "policy", liger_hw.policy_loss(x, weight, tokens, advantages, mask, bias, old, **reference, **options)
    kinds = ("sigmoid", reference | {"alpha": 0.3}), ("simpo", {"counted_rows": 18}), ("aot", reference)
    for loss_type, more in kinds:
        yield loss_type, liger_hw.preference_loss(x, weight, tokens, bias, loss_type, softcap=5.0, **more)
    yield "means of logits", liger_hw.preference_loss(x, weight, tokens, bias, logit_scale=0.7)
    yield "kto", liger_hw.unpaired_preference_loss(x, weight, tokens, advantages > 0, bias, **reference)
    yield "multi-token", liger_hw.multi_token_loss(torch.stack((x, x.flip(0))), weight, tokens, bias=bias)
    rows = x.reshape(-1, HIDDEN), weight, tokens.reshape(-1)
    yield "token", liger_hw.token_loss(lambda log_probs, entropy: (log_probs * entropy,), *rows, with_entropy=True)


def compare(dtype):
    torch.manual_seed(0)
    x, weight, bias, ref_weight = (
        torch.randn(shape, device=device(), dtype=dtype)
        for shape in [(ANSWERS, LENGTH, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,), (VOCABULARY, HIDDEN)]
    )
    tokens = torch.randint(VOCABULARY, (ANSWERS, LENGTH), device=device())
    tokens[0, 3:] = -100
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))

    def run(shards):
        leaves = [x.clone().requires_grad_()]
        leaves += [
            (distribute_tensor(t, mesh, [Shard(0)]) if shards else t.clone()).requires_grad_() for t in (weight, bias)
        ]
        of_reference = distribute_tensor(ref_weight, mesh, [Shard(0)]) if shards else ref_weight
        for name, output in losses(*leaves, of_reference, tokens):
            output = [t for t in output if t is not None]
            used = leaves[:2] if name == "token" else leaves
            grads = torch.autograd.grad(output[0], used)
            yield name, [*output, *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)]

    for (name, expected), (_, found) in zip(run(False), run(True), strict=True):
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            tolerance = (
                {"rtol": 2e-2, "atol": 2e-2}
                if dtype == torch.bfloat16 and a.numel() > 99
                else {"rtol": 1e-4, "atol": 1e-5}
            )
            torch.testing.assert_close(a, b, **tolerance, msg=lambda text, of=(name, i): f"{of}: {text}")


def refuse():
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    x, labels = torch.randn(3, HIDDEN, device=device()), torch.arange(3, device=device())
    weight = torch.randn(VOCABULARY, HIDDEN, device=device())
    part = distribute_tensor(weight, mesh, [Shard(0)])
    for call in (
        lambda: liger_hw.distillation_loss(x, part, x, weight, labels),
        lambda: liger_hw.distillation_loss(x, weight, x, part, labels),
        lambda: liger_hw.offline_distillation_loss(x, part, x[:, :2], labels[:2].expand(3, 2)),
        lambda: logits_loss(lambda logits: logits.sum(), x, part),
    ):
        with pytest.raises(ValueError, match="^head: got a DTensor.*policy_loss"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_of_tokens(dtype, ranks):
    ranks(2, compare, dtype)


def test_losses_of_whole_logits_are_refused(ranks):
    ranks(2, refuse)

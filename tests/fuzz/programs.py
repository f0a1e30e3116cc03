"""Random programs on a plain and a patched tiny model, side by side: whatever is done, both must show the same.

A program is a list of actions, each what a training script might do: forwards in any grad mode and under autocast,
reads and writes of logits, hooks, losses of its own, optimizer steps, checkpointing, copies, saves, threads. After each
action every observable is compared. The patched model may refuse with an error that says what to do; then the program
ends, as the two have gone different ways.

Numbers are compared by the rule of `liger_hw/testing/parity.py`, without a tolerance set by hand. The plain model also
runs the program in float64. The patched model's difference from that may be at most twice the sum of two: the plain
model's own difference, and one rounding. `_difference` says it exactly.
"""

import contextlib
import copy
import io
import itertools
import math
import pickle
import sys
import threading
import traceback
from pathlib import Path
from unittest import mock

import numpy
import torch
from torch.utils.dlpack import from_dlpack
from transformers.loss import loss_utils

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "transformers"))
import tiny  # noqa: E402

import liger_hw  # noqa: E402
from liger_hw.losses.distillation import SOFT_LOSSES  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
SMALL |= {"num_key_value_heads": 1}
FAMILIES = {
    "llama": {"attention_dropout": 0.1},
    "gemma2": {},
    "phi": {},
    "granite": {},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "llama tied": {"tie_word_embeddings": True},
}
# not torch's own "a second time", which says that a graph was freed where the plain model's was not
REFUSALS = ("skip_logits=False", "a second backward", "for a second one", "use_backend('reference')", "in_place=False")
# torch's error for a tensor that was written between forward and backward: the patched model may have kept a copy
MODIFIED = "modified by an inplace operation"
# errors of the plain model, which a plain model that keeps copies has not
WITHOUT_COPIES = (MODIFIED, "outside of the 'allow_mutation_on_saved_tensors'")
FP32_EPS = torch.finfo(torch.float32).eps
DRAWS = 4  # float64 models that judge a difference, at most
_templates = {}


class Difference(AssertionError):
    """The patched model showed another number, or another kind of outcome."""


class Unjudged(Exception):
    """The float64 model, or the plain one with copies, ends with an error, so that nothing says what is right.

    Examples: after weights changed under activation checkpointing, its router chooses other experts in the
    recomputation; `allow_mutation_on_saved_tensors` refuses tensors of inference mode.
    """


def _model(family, kind):
    """Return a copy of a family's "plain", "patched" or "exact" model."""
    if family not in _templates:
        plain = tiny.model(family.split()[0], **SMALL | FAMILIES[family])
        patched, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
        liger_hw.patch(patched)
        exact.set_experts_implementation("eager")  # grouped_mm has no float64
        _move(exact, 0)
        _templates[family] = {"plain": plain, "patched": patched, "exact": exact}
    return copy.deepcopy(_templates[family][kind])


def _move(model, seed):
    """Move every weight by one rounding of fp32, in which transformers computes softmax and loss in float64 too."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for p in model.parameters():
            p *= 1 + FP32_EPS * torch.randint(0, 2, p.shape).mul(2).sub(1)


class Side:
    """One of the three models, with what the program holds of it.

    Args:
        family: of models.
        kind: "plain", "patched" or "exact": the plain model in float64, where autocast and casts have no effect.
        overflows: for "exact", whether each step with a loss scale overflowed in the plain model.
        copies: whether torch copies each saved tensor that is written, so that a backward has those of its forward.
        draw: for "exact", which random roundings move its weights.
    """

    def __init__(self, family, kind, overflows=(), copies=False, draw=0):
        self.model, self.kind, self.overflows = _model(family, kind), kind, list(overflows)
        self.exact, self.eps, self.copies, self.draw = kind == "exact", FP32_EPS, copies, draw
        if draw:
            _move(self.model, draw)
        self.out, self.value, self.optimizer, self.handles, self.seen = None, None, None, [], []
        self.written = self.written_without_grad = False  # whether some logits were written to

    def autocast(self, dtype):
        self.rounds_to(dtype or torch.float32)
        return torch.autocast("cpu", dtype, enabled=dtype is not None and not self.exact)

    def rounds_to(self, dtype):
        """Keep the coarsest rounding of the program, as `eps`."""
        self.eps = max(self.eps, torch.finfo(dtype).eps)

    def count_write(self):
        """Give written parameters a new version, by which the context that copies saved tensors knows them.

        In it torch counts no write by foreach, fused or `.data`: it would then take the copy from before the write.
        """
        if self.copies:
            torch.autograd.graph.increment_version(list(self.model.parameters()))

    def forget_forward(self):
        """Drop the outputs after a write that torch does not notice.

        A later backward of the plain model would mix new weights with hidden states of old ones, and compute the
        gradient of no forward. The patched model computes the gradients of its head in the forward.
        """
        self.count_write()
        self.out = self.value = None

    def unhook(self):
        while self.handles:
            self.handles.pop().remove()

    def observed(self):
        """Return copies of everything that a program can see, by name."""
        seen = {f"grad of {name}": p.grad for name, p in self.model.named_parameters()}
        seen |= {f"parameter {name}": p.detach() for name, p in self.model.named_parameters()}
        seen |= {"random state": torch.get_rng_state(), "training": self.model.training}
        seen |= {"seen by hooks": tuple(self.seen), "value": self.value, "eps": self.eps}
        if self.out is not None:
            seen["loss"] = self.out.loss
            if self.kind != "patched":  # reading the patched model's logits would compute them
                seen["logits"] = self.out.logits
        return {name: Seen(value) if isinstance(value, torch.Tensor) else value for name, value in seen.items()}


class Seen:
    """A tensor's values at one time, and whether it required a gradient."""

    def __init__(self, tensor):
        self.values, self.requires_grad = tensor.detach().clone(), tensor.requires_grad

    def __repr__(self):
        return repr(self.values)


# Actions: (side, choice) -> None. `choice` is an integer that picks a variant. ---------------------------------------


def _tokens(choice):
    inputs = tiny.tokens(2, 5 + choice % 3, seed=choice % 5)
    if choice % 7 == 0:
        del inputs["labels"]
    elif choice % 7 == 1:
        inputs["labels"][:] = -100
        inputs["labels"][0, 2] = 5
    elif choice % 7 == 2:
        inputs["num_items_in_batch"] = torch.tensor(9)
    elif choice % 7 == 3:
        inputs["shift_labels"] = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    elif choice % 28 == 4:
        inputs["labels"][:] = -100
    return inputs


GRAD_MODES = (
    contextlib.nullcontext,
    contextlib.nullcontext,
    contextlib.nullcontext,
    torch.no_grad,
    torch.inference_mode,
)
AUTOCASTS = (None, None, None, torch.bfloat16)


def forward(side, choice):
    mode, dtype = GRAD_MODES[choice % len(GRAD_MODES)], AUTOCASTS[choice // 5 % len(AUTOCASTS)]
    torch.manual_seed(choice)
    with mode(), side.autocast(dtype):
        side.out = side.model(**_tokens(choice), use_cache=False)


READS = (  # all continuous: an index of the largest, or a shape, may change with a rounding
    lambda x: x.sum(), lambda x: x[:, -1], lambda x: x.softmax(-1), lambda x: x.float() / 3,
    lambda x: x.gather(-1, x.argmax(-1, True)),
    lambda x: x.detach().clone(), lambda x: x[..., :7].logsumexp(-1), lambda x: x.view(-1, x.shape[-1])[1:],
    lambda x: torch.tensor(x.tolist()), lambda x: x.mean().item() * torch.ones(()), lambda x: x.topk(2).values,
    lambda x: torch.nn.functional.cross_entropy(x.reshape(-1, x.shape[-1]), torch.zeros(x.shape[:-1].numel()).long()),
    lambda x: x.clone(), lambda x: x * 2.0, lambda x: torch.cat([x, x]), lambda x: x[x > 0].sum(),
)  # fmt: skip


def read(side, choice):
    mode = GRAD_MODES[choice // 16 % 4]
    if side.out is not None:
        with mode():
            side.value = READS[choice % len(READS)](side.out.logits)


WRITES = (
    lambda x: x.mul_(0.5), lambda x: x[:, 0].zero_(), lambda x: x.__setitem__((Ellipsis, 3), -5.0),
    lambda x: x.div_(2.0), lambda x: x.masked_fill_(x > 1, 1.0), lambda x: x.view(-1).add_(1.0),
)  # fmt: skip


def write(side, choice):
    with torch.no_grad() if choice // 6 % 3 == 0 else contextlib.nullcontext():
        if side.out is not None:
            WRITES[choice % len(WRITES)](side.out.logits)
            side.written = True
            side.written_without_grad |= not torch.is_grad_enabled()


def backward(side, choice):
    if side.out is None:
        return
    losses = []
    if choice % 4 != 1 and side.out.loss is not None:
        losses.append(side.out.loss.sum())
    if choice % 4 in (1, 2):
        losses.append((side.out.logits.float() ** 2).mean())
    if choice % 4 == 3 and side.value is not None and side.value.requires_grad:
        losses.append(side.value.sum())
    if losses:
        (sum(losses) * (64.0 if choice // 4 % 3 == 0 else 1.0)).backward(retain_graph=choice // 12 % 4 == 0)


def gradient_of_logits(side, choice):
    if side.written_without_grad:
        return  # logits of a head with a bias are a view, which such a write takes out of torch's graph
    if side.out is not None and side.out.loss is not None:
        side.value = torch.autograd.grad(side.out.loss, side.out.logits, retain_graph=True)[0]


def backward_to_logits(side, choice):
    """A backward that ends at the logits, then one from them or from the loss to the weights."""
    if side.out is None or side.out.loss is None or not side.out.loss.requires_grad or side.written:
        return
    loss, logits = side.out.loss, side.out.logits
    # torch frees the number of a product that the backward passes
    retain = side.model.config.model_type in ("gemma2", "granite") or choice % 2 == 0
    (loss if choice // 2 % 2 else logits.square().mean()).backward(inputs=[logits], retain_graph=retain)
    side.value = logits.grad
    if choice // 4 % 2:
        logits.backward(logits.grad)
    else:
        loss.backward()


def copy_then_write(side, choice):
    """A copy of the logits in another dtype, then a write to the logits through one that shares their memory."""
    if side.out is None:
        return
    side.value = side.out.logits.to((torch.float64, torch.bfloat16)[choice % 2])
    side.rounds_to(torch.bfloat16 if choice % 2 else torch.float32)
    with torch.no_grad():
        (side.out.logits.detach(), side.out.logits.data)[choice // 2 % 2].mul_(0.5)
    side.written = side.written_without_grad = True


# AdamW's step is lr g / (|g| + eps): with torch's eps of 1e-8 the sign of a rounding would move a weight by lr
OPTIMIZERS = (
    lambda p: torch.optim.SGD(p, 0.05), lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-2),
    lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-2, fused=True),
    lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=True),
)  # fmt: skip


def step(side, choice):
    if side.optimizer is None:
        side.optimizer = OPTIMIZERS[choice % len(OPTIMIZERS)](side.model.parameters())
    if choice // 4 % 2:
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)
    side.optimizer.step()
    side.count_write()
    if side.optimizer.defaults.get("fused"):
        side.forget_forward()


def zero_grad(side, choice):
    side.model.zero_grad(set_to_none=bool(choice % 2))


def mode(side, choice):
    side.model.train(bool(choice % 3))


def _modules(model):
    layer = model.model.layers[0]
    return [
        m for m in (model.lm_head, model.get_input_embeddings(), getattr(layer, "mlp", layer), layer.self_attn, layer)
    ]


def hook(side, choice):
    module, seen = _modules(side.model)[choice % 5], side.seen

    def first(output):
        return output[0] if isinstance(output, tuple) else output

    def look(module, args, output):
        seen.append(("forward", getattr(first(output), "shape", None)))

    def look_back(module, into, of):
        seen.append(("backward", tuple(None if g is None else tuple(g.shape) for g in of)))

    def scale(module, args, output):
        return tuple([first(output) * 0.5, *output[1:]]) if isinstance(output, tuple) else output * 0.5

    def scale_in_place(module, args, output):
        first(output).mul_(0.5)

    def hook_tensor(module, args, output):
        if first(output).requires_grad:
            first(output).register_hook(lambda g: g * 2)

    def scale_gradients(module, into, of):
        return tuple(None if g is None else g * 0.5 for g in into)

    def scale_incoming(module, of):
        return tuple(None if g is None else g * 0.5 for g in of)

    def look_at_parameter(parameter):
        seen.append(("accumulated", tuple(parameter.grad.shape)))

    parameter = next(module.parameters())
    side.handles.append(
        (
            lambda: module.register_forward_hook(look),
            lambda: module.register_full_backward_hook(look_back),
            lambda: module.register_forward_hook(scale),
            lambda: module.register_forward_pre_hook(lambda module, args: None),
            lambda: module.register_forward_pre_hook(lambda module, args: tuple(a * 1 for a in args)),
            lambda: module.register_forward_hook(scale_in_place),
            lambda: module.register_forward_hook(hook_tensor),
            lambda: module.register_full_backward_hook(scale_gradients),
            lambda: module.register_full_backward_pre_hook(scale_incoming),
            lambda: parameter.register_hook(lambda g: g * 0.5),
            lambda: parameter.register_post_accumulate_grad_hook(look_at_parameter),
            lambda: torch.nn.modules.module.register_module_forward_hook(look),
        )[choice // 5 % 12]()
    )


def logits_hook(side, choice):
    if side.out is None or not side.out.logits.requires_grad or side.written:
        return  # torch 2.13 itself crashes at a hook on a view that was written to under no_grad
    if choice % 3 == 0:
        side.out.logits.retain_grad()
    elif choice % 3 == 1:
        side.out.logits.register_hook(lambda g: g * 2)
    else:
        seen = side.seen
        side.out.logits.register_hook(lambda g: seen.append(("logits", tuple(g.shape))))


def unhook(side, choice):
    side.unhook()


def checkpointing(side, choice):
    if choice % 3 == 0:
        side.model.gradient_checkpointing_disable()
    else:
        side.model.gradient_checkpointing_enable({"use_reentrant": choice % 3 == 1})


def copied(side, choice):
    side.model, side.handles = copy.deepcopy((side.model, side.handles))  # together, so the handles are the copy's
    side.out = side.value = side.optimizer = None


def saved(side, choice):
    file = io.BytesIO()
    torch.save(side.model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p in side.model.parameters():
            p.add_(1.0)
    side.model.load_state_dict(torch.load(file))


def in_a_thread(action, side, choice):
    failures = []

    def run():
        try:
            action(side, choice)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def threaded(side, choice):
    in_a_thread(forward, side, choice)


def freeze(side, choice):
    parts = [side.model.lm_head, side.model.model, side.model.model.layers[0]]
    parts[choice % 3].requires_grad_(bool(choice // 3 % 2))


def change_weights(side, choice):
    p = list(side.model.parameters())[choice % 3]
    if choice // 3 % 2:
        p.data = p.data + 0.1
    else:
        p.data.mul_(1.1)
        side.forget_forward()


def repatch(side, choice):
    if hasattr(type(side.model), "liger_match"):
        liger_hw.unpatch(side.model)
        liger_hw.patch(side.model)


def own_loss(side, choice):
    """As Trainer does with label smoothing or a loss function of the user's own: labels stay outside."""
    torch.manual_seed(choice)
    inputs = tiny.tokens(2, 6, seed=choice % 5)
    labels = inputs.pop("labels")
    side.out = side.model(**inputs, use_cache=False)
    logits = side.out.logits[:, :-1].reshape(-1, tiny.VOCABULARY)
    side.value = torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), label_smoothing=0.1)


def teacher(side, choice):
    """A distillation loss on the model's own logits, taken from a forward with labels."""
    side.out = side.model(**tiny.tokens(2, 6, seed=choice % 5), use_cache=False)
    with torch.no_grad():
        target = side.model(input_ids=tiny.tokens(2, 6, seed=choice % 5)["input_ids"], use_cache=False).logits
    student = side.out.logits.float().log_softmax(-1)
    side.value = torch.nn.functional.kl_div(student, target.float().softmax(-1), reduction="batchmean") + side.out.loss


SUMS = list(itertools.combinations(SOFT_LOSSES, 2))


def soft_losses(side, choice):
    """Two soft losses and a hard one, added: in chunks from a patched model, by whole logits from the others."""
    inputs = tiny.tokens(2, 6, seed=choice % 5)
    labels, head = inputs.pop("labels"), side.model.get_output_embeddings()
    side.out, hidden = None, side.model.base_model(**inputs, use_cache=False).last_hidden_state[:, :-1]
    options = {"soft_loss": dict(zip(SUMS[choice % len(SUMS)], (1.0, 0.5))), "temperature": 1.0 + choice // 10 % 2}
    options |= {"softcap": 5.0} if choice // 20 % 2 else {"teacher_logit_scale": 0.5}
    with liger_hw.use_backend(None if side.kind == "patched" else "reference"):
        side.value = liger_hw.distillation_loss(
            hidden, head.weight, hidden.detach().flip(0), head.weight, labels[:, 1:], bias=head.bias,
            chunk_memory=4000, **options,
        ).loss  # fmt: skip
    if side.value.requires_grad:
        side.value.backward()


def scaled_step(side, choice):
    """A step of mixed precision with a loss scale, as Trainer does with fp16 or bf16; some scales overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=(16.0, 2.0**14, 2.0**120)[choice % 3])
    optimizer = OPTIMIZERS[choice // 3 % 2](side.model.parameters())
    dtype = (torch.bfloat16, torch.float16)[choice // 6 % 2]
    torch.manual_seed(choice)
    with side.autocast(dtype):
        side.out = side.model(**tiny.tokens(2, 6, seed=choice % 5), use_cache=False)
    scaler.scale(side.out.loss).backward()
    if side.exact and side.overflows.pop(0):  # float64 does not overflow
        return side.model.zero_grad()
    if choice // 12 % 2:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    side.overflows.append(scaler.get_scale() < scale)
    if side.overflows[-1]:  # which values did is a matter of rounding, that no step was done is not
        side.model.zero_grad()


def read_under_autocast(side, choice):
    if side.out is not None:
        ones = torch.ones(side.out.logits.shape[-1], 2, dtype=torch.float64 if side.exact else torch.float32)
        with side.autocast(torch.bfloat16 if choice % 3 else None):
            side.value = side.out.logits @ ones


def threads(side, choice):
    """Forwards of one model in two threads at once; the second one's result is kept, its backward runs here."""
    side.unhook()  # which thread's hooks see their forward first is nobody's to say
    outputs, failures = [None, None], []

    def run(i):
        try:
            outputs[i] = side.model(**tiny.tokens(2, 5 + i, seed=choice % 5 + i), use_cache=False)
            if choice % 2:
                float(outputs[i].logits.sum())
        except Exception as error:
            failures.append(error)

    running = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    training = side.model.training
    side.model.eval()  # two threads would draw dropout from one generator in no order
    try:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        side.model.train(training)
    if failures:
        raise failures[0]
    side.value, side.out = outputs[0].loss.detach(), outputs[1]


def backward_elsewhere(side, choice):
    in_a_thread(backward, side, choice)


def pickled(side, choice):
    """The whole model through pickle or torch.save, or its logits."""
    if choice % 3 == 0:
        side.unhook()
        side.model, side.out, side.value, side.optimizer = pickle.loads(pickle.dumps(side.model)), None, None, None
    elif choice % 3 == 1:
        side.unhook()
        file = io.BytesIO()
        torch.save(side.model, file)
        file.seek(0)
        side.model, side.out, side.value, side.optimizer = torch.load(file, weights_only=False), None, None, None
    elif side.out is not None:
        side.value = pickle.loads(pickle.dumps(side.out.logits.detach()))


def cast(side, choice):
    """The model in another dtype, and back again in some of the programs."""
    dtype = (torch.bfloat16, torch.float32, torch.float64)[choice % 3]
    side.model, side.out, side.value, side.optimizer = side.model.to(dtype), None, None, None
    side.rounds_to(dtype)
    if side.exact:
        _move(side.model.double(), side.draw)


def clone_of_outputs(side, choice):
    if side.out is None:
        return
    if choice % 3 == 0:
        side.value = side.out.logits.clone()
    elif choice % 3 == 1:
        side.value = copy.copy(side.out).logits.float().mean()
    else:
        side.value = copy.deepcopy(side.out.logits.detach())


def _save_copies():
    """Do what `save_on_cpu` does on a GPU; on a CPU it keeps the tensors, and torch misses later writes to them."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)


def around(side, choice):
    """A forward and its backward within something that looks at the graph."""
    contexts = (
        _save_copies, torch.autograd.detect_anomaly, torch.autograd.set_multithreading_enabled,
        torch.autograd.graph.allow_mutation_on_saved_tensors,
    )  # fmt: skip
    torch.manual_seed(choice)
    kind = choice % 4
    nested = kind == 3 and side.copies  # which torch refuses
    with contextlib.nullcontext() if nested else contexts[kind](False) if kind == 2 else contexts[kind]():
        side.out = side.model(**tiny.tokens(2, 6, seed=choice % 5), use_cache=False)
        loss = side.out.loss if choice // 4 % 2 else side.out.loss + side.out.logits.float().logsumexp(-1).mean()
        if loss.requires_grad:
            loss.backward(retain_graph=True)


def outer_checkpoint(side, choice):
    """The whole model, or its loss, within torch's checkpoint."""
    inputs = tiny.tokens(2, 6, seed=choice % 5)

    def loss(one):
        outputs = side.model(**inputs, use_cache=False)
        return one * outputs.loss + (outputs.logits.float().mean() if choice % 2 else 0)

    torch.manual_seed(choice)
    one = torch.ones((), requires_grad=True)  # torch's reentrant kind needs an argument that requires a gradient
    side.value = torch.utils.checkpoint.checkpoint(loss, one, use_reentrant=bool(choice // 2 % 2))
    if side.value.requires_grad:
        side.value.backward()
    side.out = None


def functional(side, choice):
    """A forward with other weights, as meta-learning does."""
    weights = {name: p.detach() * 1.1 for name, p in side.model.named_parameters()}
    weights = {name: w.requires_grad_(choice % 2 == 0) for name, w in weights.items()}
    torch.manual_seed(choice)
    inputs = tiny.tokens(2, 6, seed=choice % 5) | {"use_cache": False}
    side.out = torch.func.functional_call(side.model, weights, (), inputs)
    if choice % 2 == 0:
        side.value = torch.autograd.grad(side.out.loss, list(weights.values())[0], retain_graph=True)[0]


def second_order(side, choice):
    """A gradient penalty: autograd through a gradient."""
    torch.manual_seed(choice)
    inputs = tiny.tokens(2, 6, seed=choice % 5)
    embeds = side.model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    if choice % 2:
        del inputs["labels"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # others have no second derivative
        side.out = side.model(inputs_embeds=embeds, **inputs, use_cache=False)
        loss = side.out.loss if choice % 2 == 0 else side.out.logits.float().logsumexp(-1).mean()
        (grad,) = torch.autograd.grad(loss, embeds, create_graph=True)
        side.value = grad.square().sum()
        side.value.backward()


def generate(side, choice):
    training = side.model.training
    ids = tiny.tokens(1, 5, seed=choice % 5)["input_ids"]
    # not sampled: two models that agree to 1e-6 may draw another token
    side.value = side.model.eval().generate(
        ids, max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True
    ).logits[0]  # fmt: skip
    side.model.train(training)


def evaluate(side, choice):
    training = side.model.training
    options = {"skip_logits": (None, True, False)[choice // 3 % 3]} if side.kind == "patched" else {}
    with GRAD_MODES[2 + choice % 3]():
        side.out = side.model.eval()(**_tokens(choice), **options, use_cache=False)
        side.value = torch.cat([side.out.logits.float()])
    side.model.train(training)


def compiled(side, choice):
    """Train a compiled model, rarely: it takes seconds."""
    if choice > 0 or not isinstance(side.model.training, bool) or not side.model.training:
        return
    torch._dynamo.reset()
    torch.manual_seed(choice)
    run = side.model if side.exact else torch.compile(side.model, backend="aot_eager")
    side.out, loss = None, run(**tiny.tokens(2, 6, seed=choice), use_cache=False).loss
    if loss.requires_grad:
        loss.backward()
    side.value = loss


def two_forwards(side, choice):
    """Gradient accumulation: two forwards, then their losses backward at once, in order or the other way round."""
    torch.manual_seed(choice)
    first, side.out = (side.model(**tiny.tokens(2, 5 + i, seed=choice % 5 + i), use_cache=False) for i in range(2))
    losses = [first.loss, side.out.loss] if choice % 2 else [side.out.loss, first.loss]
    if choice // 2 % 2:
        losses[1] = losses[1] + first.logits.float().mean()
    for loss in [sum(losses)] if choice // 4 % 2 else losses:
        if loss.requires_grad:
            loss.backward()
    side.value = first.logits[:, -1] if choice // 8 % 2 else None


def training_step(side, choice):
    """A whole step that reads the logits at one place of it."""
    torch.manual_seed(choice)

    def read_at(place):
        if choice % 5 == place:
            side.value = side.out.logits.float().softmax(-1).detach().sum(0)

    side.model.zero_grad()
    side.out = side.model(**tiny.tokens(2, 6, seed=choice % 3), use_cache=False)
    read_at(0)
    side.out.loss.backward()
    read_at(1)
    torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
    read_at(2)
    torch.optim.SGD(side.model.parameters(), 0.05).step()
    read_at(3)


def write_value(side, choice):
    """Write to what was read: some of it shares memory with the logits."""
    if isinstance(side.value, torch.Tensor) and side.value.is_floating_point():
        with torch.no_grad() if choice % 2 else contextlib.nullcontext():
            side.value.mul_(0.5)
        side.written = True
        side.written_without_grad |= bool(choice % 2)
        if side.out is not None and choice // 2 % 2:
            side.value = side.out.logits.float().mean(-1)


ACCESSES = (
    lambda x: torch.from_dlpack(x.detach()), lambda x: torch.from_numpy(x.detach().float().numpy()),
    lambda x: from_dlpack(torch._C._to_dlpack(x.detach())), lambda x: x.data * 2,
    lambda x: torch.empty(0, dtype=x.dtype).set_(x.detach()), lambda x: x.as_subclass(Mine).as_subclass(torch.Tensor),
    lambda x: torch.frombuffer(x.detach().double().numpy().data, dtype=torch.float64),
    lambda x: torch.tensor(x.data_ptr() == x.detach().data_ptr() == x.untyped_storage().data_ptr()),
    lambda x: torch.tensor(x._typed_storage().size()), lambda x: torch.nn.Parameter(x.detach()) * 2,
)  # fmt: skip


class Mine(torch.Tensor):
    """A program's own subclass."""


def access(side, choice):
    """Read the logits through their memory, or exchange it."""
    if side.out is None:
        return
    if choice // 16 % 3 == 0:
        side.out.logits.data = side.out.logits.data * 0.5
        side.written = True
    side.value = ACCESSES[choice % len(ACCESSES)](side.out.logits)


def written_before_backward(side, choice):
    """A step whose labels or divisor a program writes to between forward and backward."""
    torch.manual_seed(choice)
    inputs, items = tiny.tokens(2, 6, seed=choice % 5), torch.tensor(7.0)
    labels = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    options = {"shift_labels": labels, "num_items_in_batch": items, "use_cache": False}
    side.out = side.model(**inputs, **options)
    loss = side.out.loss + (side.out.logits.float().square().mean() if choice // 4 % 2 else 0)
    with torch.no_grad():
        (labels, items, inputs["labels"])[choice % 3].fill_(3)
    if loss.requires_grad:
        loss.backward()


def copied_by_hooks(side, choice):
    """A step whose saved tensors hooks copy, so that writes to weights before the backward change nothing."""
    torch.manual_seed(choice)
    with _save_copies():
        side.out = side.model(**tiny.tokens(2, 6, seed=choice % 5), use_cache=False)
        loss = side.out.logits.float().square().mean() if choice % 2 else 0
        loss = loss + side.out.loss if choice // 2 % 3 else side.out.loss
    with torch.no_grad():
        parameters = list(side.model.parameters())
        parameters[-1 - choice // 6 % len(parameters)].mul_(1.1)
    if loss.requires_grad:
        loss.backward()


def backward_within(side, choice):
    """A backward in another mode than its forward's."""
    dtypes = (None, torch.bfloat16, None)
    torch.manual_seed(choice)
    with side.autocast(dtypes[choice % 3]):
        side.out = side.model(**tiny.tokens(2, 6, seed=choice % 5), use_cache=False)
    loss = side.out.loss + (side.out.logits.float().square().mean() if choice // 3 % 2 else 0)
    with torch.no_grad() if choice // 6 % 2 else contextlib.nullcontext(), side.autocast(dtypes[1 + choice // 12 % 2]):
        if loss.requires_grad:
            loss.backward()


def kept_by_hook(side, choice):
    """A hook keeps the output of a projection, which the program reads after the backward."""
    layer, kept = side.model.model.layers[0], []
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    handle = linears[choice % len(linears)].register_forward_hook(lambda module, args, out: kept.append(out))
    torch.manual_seed(choice)
    side.out = side.model(**tiny.tokens(2, 6, seed=choice % 5), use_cache=False)
    handle.remove()
    loss = side.out.loss + (kept[0].float().square().mean() if choice // 8 % 2 else 0)
    if loss.requires_grad:
        loss.backward(retain_graph=choice // 16 % 2 == 0)
    side.value = kept[0].detach()


def monkey_patched(side, choice):
    """A training step while a program has replaced a function, or the forward of a class."""
    norm = type(side.model.model.layers[0].input_layernorm)
    place, name = (
        (getattr(norm, "liger_original", norm), "forward"), (torch.nn.Linear, "forward"),
        (loss_utils, "fixed_cross_entropy"), (torch.nn.functional, "cross_entropy"),
    )[choice % 4]  # fmt: skip
    own = getattr(place, name)
    torch.manual_seed(choice)
    with mock.patch.object(place, name, lambda *args, **kwargs: own(*args, **kwargs) * 0.5):
        side.out = side.model(**tiny.tokens(2, 6, seed=choice % 5), use_cache=False)
        if side.out.loss.requires_grad:
            side.out.loss.backward()
        side.value = side.out.logits.float().mean(-1)


def attributed(side, choice):
    """Gradients of the loss, or of logits of one position, for embeddings or parts of the parameters."""
    torch.manual_seed(choice)
    inputs = tiny.tokens(2, 6, seed=choice % 5)
    if choice % 2:
        inputs["inputs_embeds"] = side.model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    side.out = side.model(**inputs, use_cache=False)
    value = side.out.loss if choice // 2 % 2 else side.out.logits[:, -1].float().square().mean()
    leaf = inputs["inputs_embeds"] if choice % 2 else next(side.model.parameters())
    if not value.requires_grad or not leaf.requires_grad:
        return
    if choice // 4 % 2:
        value.backward(inputs=[leaf], retain_graph=True)
        side.value = leaf.grad
    else:
        (side.value,) = torch.autograd.grad(value, leaf, retain_graph=True, allow_unused=True)


NUMBERS = numpy.float32, numpy.float64, numpy.int32, torch.tensor


def numbers_of_other_types(side, choice):
    """A step whose divisor and ignored label come from a config or a schedule, as numbers of another type."""
    kind, inputs = NUMBERS[choice % len(NUMBERS)], tiny.tokens(2, 6, seed=choice % 5)
    options = {"ignore_index": numpy.int64(-100) if choice // 4 % 2 else torch.tensor(-100)}
    options["num_items_in_batch"] = kind(7)
    torch.manual_seed(choice)
    side.out = side.model(**inputs, **options, use_cache=False)
    if side.out.loss.requires_grad:
        side.out.loss.backward()


ACTIONS = (
    forward, forward, forward, read, read, write, backward, backward, gradient_of_logits, step, zero_grad, mode, hook,
    logits_hook, unhook, checkpointing, copied, saved, threaded, freeze, change_weights, repatch, own_loss, teacher,
    forward, backward, step, scaled_step, read_under_autocast, threads, backward_elsewhere, pickled, cast,
    clone_of_outputs, around, outer_checkpoint, functional, second_order, generate, evaluate, compiled,
    two_forwards, training_step, training_step, write_value, access, kept_by_hook, monkey_patched, soft_losses,
    written_before_backward, copied_by_hooks, backward_within, attributed, numbers_of_other_types,
    backward_to_logits, copy_then_write,
)  # fmt: skip


# Running --------------------------------------------------------------------------------------------------------------


def _shows(side, program):
    """Run `program` and return [(error or None, what the program sees)] of its actions, until the first error."""
    shown = []
    torch.manual_seed(0)
    with torch.autograd.graph.allow_mutation_on_saved_tensors() if side.copies else contextlib.nullcontext():
        for index, choice in program:
            try:
                ACTIONS[index % len(ACTIONS)](side, choice)
                shown.append((None, side.observed()))
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # in torch 2.11 a frame keeps checkpoint's hooks in place
                shown.append((error, None))
                break
    side.unhook()
    return shown


def _exact(family, overflows, program, draw):
    """Return what the float64 model shows, which the writes of `program` do not stop."""
    shown = _shows(Side(family, "exact", overflows, draw=draw), program)
    if MODIFIED in str(shown[-1][0]):  # as without autocast the weights themselves are saved
        shown = _shows(Side(family, "exact", overflows, copies=True, draw=draw), program)
    return shown


def run(family, program):
    """Run `program`, (index of an action, choice) pairs, on the models of a family.

    Returns:
        None, or the error that ended the program: one of the plain model, or with which the patched model refused, or
        `Unjudged`.

    Raises:
        Difference: the models differ in what they show.
    """
    plain, exact = Side(family, "plain"), []
    expected, shown = _shows(plain, program), _shows(Side(family, "patched"), program)
    last = len(expected) - 1
    if MODIFIED in str(expected[last][0]) and len(shown) > last and shown[last][0] is None:
        # the patched model may have kept a copy: compare with the plain model that keeps one too
        plain = Side(family, "plain", copies=True)
        expected = _shows(plain, program)
    for i, (error, seen) in enumerate(shown):
        names = ", ".join(f"{ACTIONS[index % len(ACTIONS)].__name__}({choice})" for index, choice in program[: i + 1])
        trace, (error_of_plain, seen_of_plain) = f"{family}: {names}", expected[i]
        if error_of_plain is not None:
            if error is None and plain.copies and "Inference tensors" in str(error_of_plain):
                return Unjudged(f"{trace}: {error_of_plain}")
            if error is None:
                raise Difference(f"{trace}: plain raises {type(error_of_plain).__name__}: {error_of_plain}")
            return error_of_plain
        if error is not None:
            if any(text in str(error) for text in REFUSALS):
                return error
            if plain.copies and any(text in str(error) for text in WITHOUT_COPIES):
                return Unjudged(f"{trace}: {error}")
            raise Difference(f"{trace}: {type(error).__name__}: {error}") from error
        for name in _unequal(seen, seen_of_plain):
            for draws in range(1, DRAWS + 1):
                if len(exact) < draws:
                    exact.append(_exact(family, plain.overflows, program, draw=draws - 1))
                error = exact[draws - 1][min(i, len(exact[draws - 1]) - 1)][0]
                if error is not None:
                    return Unjudged(f"{trace}: {error}")
                text = _difference(name, seen, expected[: i + 1], exact[:draws])
                if text is None:
                    break
            else:
                raise Difference(f"{trace}: {name}: {text}")
    return None


# Comparing ------------------------------------------------------------------------------------------------------------


def _unequal(seen, expected):
    """Return the names whose values are not bitwise equal."""
    names = expected.keys() | seen.keys()
    return [name for name in sorted(names - {"logits"}) if not _equal(seen.get(name), expected.get(name))]


def _equal(a, b):
    if not isinstance(a, Seen) or not isinstance(b, Seen):
        return a == b
    if a.requires_grad != b.requires_grad or a.values.dtype != b.values.dtype or a.values.shape != b.values.shape:
        return False
    return torch.allclose(a.values, b.values, rtol=0, atol=0, equal_nan=True)


# of finite values, of which there may be none after an overflow
MEASURES = {"largest": lambda t: t.norm(math.inf).item() if len(t) else 0.0, "norm": lambda t: t.norm().item()}


def _difference(name, seen, expected, exact):
    """Tell how the values of `name` differ, or return None if they differ no more than roundings may.

    With |t| for the largest element, and again for the norm,

        |patched - exact| <= 2 (max |plain - draw| + (moved + eps) |exact|) + eps_of_program |gradients|

    exact, draws: the first float64 model, and all of them. Their weights differ by one rounding, because one draw may
        be near the plain model by chance: eight gave errors of 1e-8 to 3e-7 for the gradient of a gradient penalty.
    moved: the largest `_moved` so far. A loss is one number, of which |plain - draw| can be small by chance, and
        parameters keep the errors of gradients that are gone.
    gradients: all of them, for a gradient only. In exact arithmetic some are zero, as that of a bias of keys or of a
        router that chooses one expert: roundings of what cancels are left, in the coarsest dtype of the program.

    So a gradient of the logits that is wrong by a factor of 1.00002 is found in fp32, and by 1.08 under bf16 autocast,
    in each of the families.

    Args:
        name: what is compared.
        seen: what the patched model shows after the last action.
        expected: pairs of an error and what the plain model shows, after each action.
        exact: the same of each float64 model, also of later actions.
    """
    plain, drawn = expected[-1][1], [shows[len(expected) - 1][1] for shows in exact]
    values, references = [seen.get(name), plain.get(name)], [shows.get(name) for shows in drawn]
    tensors = all(isinstance(value, Seen) for value in values + references)
    if not tensors or values[0].requires_grad != values[1].requires_grad:
        return f"{values[0]} instead of {values[1]}"
    (patched, own), references = (value.values for value in values), [value.values for value in references]
    if patched.dtype != own.dtype or patched.shape != own.shape or not patched.is_floating_point():
        return f"{patched} instead of {own}"
    finite = own.isfinite()
    if not torch.equal(finite, patched.isfinite()):
        return f"finite elsewhere: {patched} instead of {own}"
    eps = max(torch.finfo(patched.dtype).eps, FP32_EPS)
    patched, own, *references = (value[finite].double() for value in (patched, own, *references))
    moved = max(_moved(p, e) for shows in exact for (_, p), (_, e) in zip(expected, shows))
    gradients = [n for n in plain if n.startswith("grad of") and plain[n] is not None and drawn[0][n] is not None]
    for measure, size in MEASURES.items():
        own_error = max(size(own - reference) for reference in references)
        allowed = 2 * (own_error + (moved + eps) * size(references[0]))
        if name in gradients:
            allowed += plain["eps"] * size(torch.tensor([size(drawn[0][n].values) for n in gradients]))
        error = size(patched - references[0])
        if not error <= allowed:
            return f"error {error:.3g} by its {measure}, allowed {allowed:.3g}: {patched} instead of {own}"
    return None


def _moved(plain, exact):
    """Return |plain - exact| / |exact| by norm: the largest of the logits', all gradients' and all parameters'."""
    shares = [0.0]
    for group in ("logits", "grad of", "parameter"):
        distance = size = 0.0
        for name in plain:
            if name.startswith(group) and isinstance(plain[name], Seen) and isinstance(exact[name], Seen):
                reference = exact[name].values.nan_to_num()
                distance += (plain[name].values.nan_to_num() - reference).square().sum().item()
                size += reference.square().sum().item()
        shares.append((distance / size) ** 0.5 if size else 0.0)
    return max(shares)

"""Training steps of models under engines, and of the plain model on one device, which sees the batches of all ranks."""

import contextlib
import copy
import functools
from types import SimpleNamespace
from unittest import mock

import alike
import tiny
import torch
import torch.distributed as dist
from ranks import device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import liger_hw

RATE = 0.03
# budgets of `liger_hw.activations` on the device and on the host
PLANS = {"recompute": (0, 0), "mixed": (50_000, 0), "keep": (2**40, 0), "offload": (20_000, 2**28)}


# Batches: each function takes a rank and returns its batches. ---------------------------------------------------------


def unequal(rank):
    """Two batches, which differ in length and number of labels from another rank's."""
    lengths = 9 + 4 * rank, 12 - 3 * rank
    return [
        {name: x.to(device()) for name, x in tiny.tokens(2, length, seed=2 * rank + i).items()}
        for i, length in enumerate(lengths)
    ]


def labels_of_one_batch(rank):
    """Two batches, of which only one of rank 0 has labels."""
    first, second = unequal(rank)
    first["labels"] = torch.full_like(first["labels"], -100)
    if rank:
        second["labels"] = torch.full_like(second["labels"], -100)
    return [first, second]


def number_of_labels(of_rank):
    """The number of labels of all ranks, as a tensor."""
    labels = [inputs["labels"][:, 1:] for rank in range(dist.get_world_size()) for inputs in of_rank(rank)]
    return torch.stack([(x != -100).sum() for x in labels]).sum()


# Engines --------------------------------------------------------------------------------------------------------------


class Engine:
    """A model under an engine, with its optimizer."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)

    def backward(self, loss, last):
        """Accumulate gradients; exchange them between ranks in the last backward of a step."""
        with contextlib.nullcontext() if last else self.no_sync():
            loss.backward()

    def no_sync(self):
        return self.model.no_sync()

    def gradients(self):
        """Return the whole gradients of all parameters, or None where the engine shows none."""
        return [whole(p.grad) for p in self.model.parameters()]

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class FSDP1(Engine):
    def gradients(self):
        if not self.model._use_orig_params or self.model.cpu_offload.offload_params:
            return None  # torch gathers no gradients that it offloaded: NCCL refuses tensors of the host
        with FullyShardedDataParallel.summon_full_params(self.model, with_grads=True):
            return [p.grad.detach().to(device(), copy=True) for p in self.model.parameters()]


class FSDP2(Engine):
    @contextlib.contextmanager
    def no_sync(self):
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)


def whole(grad):
    if not isinstance(grad, DTensor):
        return grad
    local = grad.to_local().to(device())  # an engine may have moved it to the host
    like = {"shape": grad.shape, "stride": grad.stride()}
    return DTensor.from_local(local, grad.device_mesh, grad.placements, **like).full_tensor()


def ddp(model, autocast=False, **options):
    if autocast:  # as accelerate does
        model.forward = torch.autocast(device().type, torch.bfloat16)(model.forward)
    return Engine(DistributedDataParallel(model, **options))


def fsdp1(model, policy="layers", **options):
    """Wrap the whole model, and by `policy` each layer or the head."""
    classes = {"layers": type(model.model.layers[0]), "head": type(model.lm_head)}
    if policy is not None:
        options["auto_wrap_policy"] = ModuleWrapPolicy({classes[policy]})
    return FSDP1(FullyShardedDataParallel(model, **({"use_orig_params": True, "device_id": device()} | options)))


def fsdp2(model, unit=(), reshard=None, layers=True, **options):
    """Make each layer a unit, the modules named by `unit` another, and the rest the root."""
    options["mesh"] = init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in layers_of(model) if layers else ():
        fully_shard(layer, **options)
    modules = [model.get_submodule(name) for name in unit]
    if modules:
        fully_shard(modules, reshard_after_forward=reshard, **options)
    return FSDP2(fully_shard(model, reshard_after_forward=reshard, **options))


def layers_of(model):
    return next(m for m in model.modules() if hasattr(m, "layers")).layers


def accelerate_fsdp2(model, **options):
    """Shard by accelerate's function, which accelerate itself calls on no CPU."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=[type(layers_of(model)[0]).__name__], **options,
    )  # fmt: skip
    rounds = plugin.mixed_precision_policy is not None
    # without a mesh torch takes the GPUs, also where there are fewer of them than ranks
    mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="bf16" if rounds else "no", is_main_process=False,
        torch_device_mesh=mesh, parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
    )  # fmt: skip
    return FSDP2(fsdp2_prepare_model(accelerator, model))


# Steps ----------------------------------------------------------------------------------------------------------------


def losses(model, of_rank, num_items):
    """Yield the losses of a rank's batches; their sum, averaged over ranks as engines do, is the loss of the step."""
    for inputs in of_rank:
        if num_items is None:
            yield tiny.call(model, **inputs).loss / len(of_rank)
        else:
            yield tiny.call(model, **inputs, num_items_in_batch=num_items).loss * dist.get_world_size()


def step(engine, of_rank, num_items=None):
    """Accumulate the gradients of a rank's batches; return the loss of all ranks and the whole gradients."""
    total = torch.zeros((), device=device())
    for i, loss in enumerate(losses(engine.model, of_rank, num_items)):
        engine.backward(loss, i + 1 == len(of_rank))
        total += loss.detach()
    dist.all_reduce(total)
    return alike.Step(SimpleNamespace(loss=total / dist.get_world_size()), engine.gradients())


def prepare(model, engine, checkpointed=None, patch=True):
    if patch:
        liger_hw.patch(model)
    if checkpointed is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointed})
    return engine(model)


def learn_alike(
    engine, of_rank=unequal, alone=None, counted=False, evaluate=False, change=None, beside_plain=False, **options
):
    """Hold two steps of a patched model under an engine to those of the plain model.

    Args:
        engine: model -> `Engine`.
        of_rank: rank -> its batches.
        alone: rank -> batches of the plain model, if others than the engine's.
        counted: divide the sum of the losses by the number of labels of all ranks.
        evaluate: compute the loss without gradients between backward and optimizer step.
        change: a function of the plain model before the copy, which returns it.
        beside_plain: the patched model may differ three times as much as the plain model under the same engine (two
            H200s: 2.2 times).
        options: `checkpointed`, and the model's configuration.
    """
    checkpointed = options.pop("checkpointed", None)
    plain, rank, world = tiny.model(**options).to(device()), dist.get_rank(), dist.get_world_size()
    plain = plain if change is None else change(plain)
    alone = alone or of_rank
    num_items = number_of_labels(alone) if counted else None

    def run(model):
        return SimpleNamespace(loss=sum(sum(losses(model, alone(rank), num_items)) for rank in range(world)) / world)

    unpatched = prepare(copy.deepcopy(plain), engine, checkpointed, patch=False) if beside_plain else None
    engine = prepare(copy.deepcopy(plain), engine, checkpointed)
    for _ in range(2):
        reference = alike.Reference(plain, run)
        found = step(engine, of_rank(rank), num_items)
        if unpatched:
            reference.widen(3, step(unpatched, of_rank(rank), num_items))
            unpatched.step()
        if found.gradients is None:  # the second loss shows an error of the first gradients
            assert reference.loss(found.outputs.loss) <= 1
        else:
            reference.assert_same(found)
        if evaluate:
            with torch.no_grad():
                loss, expected = (sum(losses(model, of_rank(rank), num_items)) for model in (engine.model, plain))
            torch.testing.assert_close(loss, expected)
        engine.step()
        with torch.no_grad():
            for p, grad in zip(plain.parameters(), reference.step.gradients, strict=True):
                if grad is not None:
                    p -= RATE * grad


def learn_the_same_with_planned_activations(engine, budget, host_budget, communicates=False, steps=5):
    """Hold a model under an engine and a budget of `liger_hw.activations` to itself without, bit for bit.

    The budget is what layers may keep beyond their inputs; an accelerator adds the peak of recomputing every layer.
    Ranks whose batches differ plan in different passes, and must communicate alike all the same. Layers that
    communicate keep nothing.
    """
    model = tiny.model(num_hidden_layers=4).to(device())
    engines = [prepare(copy.deepcopy(model), engine) for _ in range(2)]
    on_cpu = device().type == "cpu"

    def with_recomputation(planned):
        peak = planned.measured.recomputing_peak() if planned.measured.timelines else 2**40
        return budget + peak + 1  # the peak is rounded, because lengths scale it

    planned = liger_hw.activations(engines[0].model, budget if on_cpu else 2**40, host_budget)
    with (
        mock.patch.object(type(planned), "_has_large_inputs", lambda self, hidden: host_budget > 0),
        mock.patch.object(type(planned), "_budget_bytes", with_recomputation),
        # on a busy GPU a plan may measure slower than recomputation, and would then keep nothing
        mock.patch.object(type(planned), "_reject_operations", lambda self: None),
    ):
        for _ in range(steps):
            found, expected = (step(each, unequal(dist.get_rank())) for each in engines)
            assert torch.equal(found.outputs.loss, expected.outputs.loss)
            assert all(map(torch.equal, found.gradients, expected.gradients))
            for each in engines:
                each.step()
    assert planned.plan is not None
    choices = [layer.choice for layer in planned.plan.layers]
    assert communicates == ("layers 0-3 communicate with other ranks" in str(planned.plan))
    if communicates:
        assert all(choice.actions == () for choice in choices)
    elif on_cpu:
        beyond_inputs = sum(layer.choice.nbytes - layer.record.input_bytes for layer in planned.plan.layers)
        assert beyond_inputs <= budget and (planned.plan.offloaded_bytes > 0) == (host_budget > 0)
        assert (budget + host_budget > 0) == any(choice.actions != () for choice in choices)
    else:  # the layers' backward may leave room that the loss needed
        assert planned.plan.peak_bytes <= planned.plan.budget
        keeps = any(choice.actions != () for choice in choices)
        assert keeps or budget + host_budget == 0, f"{planned.plan.budget} bytes: {planned.plan}"


def learn_alike_in_bf16(engine, precision, **config):
    """Hold a patched model with bf16 layers to fp32, with 5/4 of the room that the plain model takes there."""
    plain = tiny.model(**config).to(device())

    def learn(engine, patch):
        found = step(prepare(copy.deepcopy(plain), engine, patch=patch), unequal(dist.get_rank()))
        return found.outputs.loss, torch.cat([grad.float().flatten() for grad in found.gradients])

    exact = learn(engine, False)
    rounding = functools.partial(engine, **precision)
    rounded = learn(rounding, False)
    for of_plain, of_patched, expected in zip(rounded, learn(rounding, True), exact, strict=True):
        assert (of_patched - expected).norm() <= 1.25 * (of_plain - expected).norm() + 1e-3 * expected.norm()
    assert (rounded[1] - exact[1]).norm() > 2e-3 * exact[1].norm(), "the engine did not round"

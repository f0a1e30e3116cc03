"""Every private name of torch that the package uses, and functions that need one.

A new release of torch may break this file alone. Exceptions are `_parameters`, `_buffers` and `_modules` of
torch.nn.Module, which any file may read: they are as old as torch, and a patched module reads them in each forward.
"""

# ruff: noqa: F401, other files import these names from here
import functools
import inspect
import operator
import sys
from abc import _abc_init as init_abc  # as ABCMeta itself inits a class
from contextlib import contextmanager, nullcontext

import torch
from torch._C import DisableTorchFunctionSubclass as without_torch_function  # of tensor subclasses
from torch._C import TensorBase  # the methods of torch.Tensor in C++
from torch._C import _are_functorch_transforms_active as transforms_active  # of torch.func: grad, vmap, jvp
from torch._C import _is_tracing as is_tracing  # by torch.jit.trace
from torch._C import _len_torch_dispatch_stack as dispatch_modes  # how many are active
from torch._C import _len_torch_function_stack as function_modes
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode  # of ops that compilers trace
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.library import _impls as program_kernels  # names of the operations that Python registered kernels for
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn._reduction import legacy_get_string as legacy_reduction  # of size_average, reduce
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.nn.modules.module import _has_any_global_hook as has_global_module_hooks
from torch.overrides import _get_current_function_mode_stack as active_function_modes
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as active_dispatch_modes  # innermost last
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

PLAIN = (torch.Tensor, torch.nn.Parameter)
CALL = torch.nn.Module.__call__, torch.nn.Module._call_impl  # of every module, unless its class replaces one
OPERATION_TYPES = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops._OpNamespace)
# name of an op -> Triton kernels that compiled code launches for it; keys of the compiler's cache have their source
INLINED_KERNELS = getattr(torch._library.triton, "triton_ops_to_kernels", {})
LINEAR = torch._C._nn.linear  # `torch.nn.functional.linear`, which a program may replace
FORBID_MEMORY = getattr(torch._C, "_set_storage_access_error_msg", None)  # in builds with CUDA only


def constant_result(function):
    """Let torch.compile call `function` while it traces, and take the result as a constant.

    torch.compiler.assume_constant_result does the same, but imports the compiler: a second and more.
    """
    function._dynamo_marked_constant = True
    return function


def traced_as(function, traced):
    """Let torch.compile trace `traced` in place of `function`."""
    function._torchdynamo_inline = traced
    return function


@constant_result
def is_exporting():
    """Tell whether torch.export runs.

    torch.compile of torch 2.11 takes torch's own function as True.
    """
    return torch.compiler.is_exporting()


@torch._disable_dynamo  # which imports the compiler at a call, not now
def call_outside_graphs(function, *args, **kwargs):
    """Call a function outside of the graphs that torch.compile makes."""
    return function(*args, **kwargs)


def guarded_result(function, condition):
    """Let torch.compile take a result as constant while that of `condition` stays."""
    guards = {}  # result of the condition -> guard; one object is one check of code that asks for it several times

    @constant_result
    def traced():
        from torch._dynamo.guards import install_guard
        from torch._dynamo.source import GlobalStateSource

        holds = condition()
        if holds not in guards:
            parts = [f"condition() is {holds}"]
            guards[holds] = GlobalStateSource().make_guard(
                lambda builder, _: builder.add_python_lambda_leaf_guard_to_root(parts, parts, {"condition": condition})
            )
        install_guard(guards[holds])
        return function()

    return traced_as(function, traced)


def is_plain(*tensors) -> bool:
    """Tell whether no tensor is a subclass such as DTensor; None counts as plain."""
    for tensor in tensors:  # at each call of an op, and twice as fast as `all`
        if type(tensor) not in PLAIN and tensor is not None:
            return False
    return True


def has_memory(x) -> bool:
    """Tell whether `x` has memory of its own, as bitsandbytes' parameters and no DTensor."""
    return type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_dtensor(x) -> bool:
    """Tell whether `x` is a DTensor; a plain tensor imports nothing."""
    if is_plain(x):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def column_parallel_input(module):
    """Return the function that torch's `ColwiseParallel` applies to a module's input, or None.

    The function returns a DTensor that is whole on each rank. None, too, where the style leaves the output sharded.
    """
    pre_hooks, hooks = module._forward_pre_hooks, module._forward_hooks
    if len(pre_hooks) != 1 or len(hooks) != 1 or "forward" in module.__dict__:
        return None
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    (pre_hook,), (hook,) = pre_hooks.values(), hooks.values()
    before, after = (inspect.getclosurevars(h).nonlocals if inspect.isfunction(h) else {} for h in (pre_hook, hook))
    before, after = before.get("input_fn"), after.get("output_fn")
    fits = getattr(before, "func", None) is ColwiseParallel._prepare_input_fn
    fits = fits and getattr(after, "func", None) is ColwiseParallel._prepare_output_fn
    if not fits or after.args != ((Replicate(),), True):
        return None
    return lambda hidden: pre_hook(module, (hidden,))


def keep_unsharded(module) -> list:
    """Keep a module's FSDP2 unit whole after its forward; return the argument of `reshard_again`."""
    state = module._get_fsdp_state()
    # torch 2.11 has one group of parameters a unit
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    kept = [(group, group.post_forward_mesh_info) for group in groups if group is not None]
    kept = [(group, mesh) for group, mesh in kept if mesh is not None]
    for group, _ in kept:
        group.post_forward_mesh_info = None
    return kept


def reshard_again(kept) -> None:
    """Undo `keep_unsharded`, and shard the weights as FSDP2 does after a module's forward."""
    for group, mesh in kept:
        group.post_forward_mesh_info = mesh
        with group.use_training_state(type(group._training_state).FORWARD):  # which the mesh after a forward needs
            group.reshard()


def finish_collective(x) -> None:
    """Wait for the values of a DTensor, which torch may still receive from other ranks."""
    if not is_compiling() and hasattr(x._local_tensor, "wait"):
        x._local_tensor = x._local_tensor.wait()


def process_group(name: str):
    """Return the process group of that name."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def all_gathered(x, group: str):
    """Return `x` of every rank of the named process group: (ranks, ...)."""
    group = process_group(group)
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    former_name = getattr(torch.distributed, "all_gather_into_tensor", None)  # deprecated since torch 2.13
    getattr(torch.distributed, "all_gather_single", former_name)(gathered, x.contiguous(), group)
    return gathered.view(group.size(), *x.shape)


def traced(*tensors) -> bool:
    """Tell whether a compiler, dispatch mode or tensor subclass needs ordinary torch operations."""
    return is_compiling() or dispatch_modes() > 0 or not is_plain(*tensors)


def results_are_kept() -> bool:
    """Tell whether a mode may keep what operations return.

    Nothing may write to it then: selective activation checkpointing gives it to the recomputation. This package's modes
    know what is written.
    """
    if is_compiling() or not dispatch_modes():
        return False
    return any(type(mode).__module__.partition(".")[0] != "liger_hw" for mode in active_dispatch_modes())


def in_forward_ad() -> bool:
    """Tell whether tensors may have tangents, within a level of forward-mode AD."""
    return forward_ad._current_level >= 0  # 0.05 us (an x86 CPU)


def has_tangents(arguments) -> bool:
    """Tell whether one of `arguments` is a tensor with a tangent of forward-mode AD."""
    return in_forward_ad() and any(
        torch.is_tensor(x) and forward_ad.unpack_dual(x).tangent is not None for x in arguments
    )


@contextmanager
def autograd_records(recording: bool):
    """Set autograd's recording within the block, even inside a registered op.

    There the dispatcher excludes autograd's keys.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradFunctionality)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.set_grad_enabled(recording):
        yield


top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def saved_tensors_hooks():
    """Return the innermost pair of hooks for saved tensors (pack, unpack), or None."""
    return top_saved_tensors_hooks(True)


@constant_result
def no_saved_tensors_hooks():
    return top_saved_tensors_hooks(True) is None


def is_checkpointed() -> bool:
    """Tell whether torch's non-reentrant activation checkpointing saves autograd's tensors."""
    hooks = None if is_compiling() else saved_tensors_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__


def saved_tensors_are_kept() -> bool:
    """Tell whether hooks get autograd's saved tensors that may keep them beyond the backward."""
    return not is_compiling() and saved_tensors_hooks() is not None and not is_checkpointed()


@contextmanager
def without_saved_tensors_hooks():
    """Keep the program's saved-tensor hooks from a graph that lives within the block.

    Checkpointing would recompute the whole model for each such backward, and offloading would copy its tensors.
    """
    if is_compiling() or saved_tensors_hooks() is None:
        yield
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield


@contextmanager
def hidden_from_modes():
    """Hide the block's operations from every mode of dispatch and of functions."""
    left = [torch._C._pop_torch_function_stack() for _ in range(function_modes())]
    # a mode's handler that calls the operation has left its mode, but not the mode's dispatch keys
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    included = included.remove(torch._C.DispatchKey.Python).remove(torch._C.DispatchKey.PythonTLSSnapshot)
    try:
        hide = without_dispatch_modes if dispatch_modes() else nullcontext  # the former imports the compiler
        with hide(), torch._C._ForceDispatchKeyGuard(included, excluded):
            yield
    finally:
        for mode in reversed(left):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def without_modes():
    """Leave every mode of dispatch and of functions within the block; autograd records there."""
    with hidden_from_modes(), torch.inference_mode(False), torch.enable_grad():
        yield


_GLOBAL_HOOKS = [
    table for name, table in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and name.endswith("_hooks") and isinstance(table, dict)
]  # fmt: skip


@contextmanager
def without_global_module_hooks():
    """Hide the hooks that the program has set on all modules."""
    kept = [dict(table) for table in _GLOBAL_HOOKS]
    for table in _GLOBAL_HOOKS:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(_GLOBAL_HOOKS, kept):
            table.update(hooks)


@contextmanager
def state_restored():
    """Restore modes, hooks on all modules, gradients and autocast of a CPU after an exception.

    Ctrl-C may come while a block enters or leaves one of them, which then stays, or is lost.
    """
    functions, dispatch, tables = active_function_modes(), active_dispatch_modes(), [*map(dict, _GLOBAL_HOOKS)]
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    try:
        yield
    except BaseException:
        for count, pop, push, modes in (
            (function_modes, torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack, functions),
            (dispatch_modes, _pop_dispatch_mode, torch._C._push_on_torch_dispatch_stack, dispatch),
        ):
            while count():
                pop()
            for mode in modes:
                push(mode)
        for table, hooks in zip(_GLOBAL_HOOKS, tables):
            table.clear()
            table.update(hooks)
        torch.set_grad_enabled(grad)
        torch.set_autocast_enabled("cpu", autocast)
        raise


def alias(x):
    """Return `x` without its graph, with the same version counter, inside a dispatch mode."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def unviewed(x):
    """Return `x` as no view, so that a program may write to it.

    A tracer gets `x` itself: an exported program would return `x.data` as a constant.
    """
    return x if is_compiling() else x.data


def is_compiled(module) -> bool:
    """Tell whether torch.compile wraps `module`, or its method compile() was called."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


tensor_version = operator.attrgetter("_version")  # how often it was written to; as fast as the attribute
is_view = operator.methodcaller("_is_view")  # of another tensor, for autograd; as fast as the method
# what the node of a product of a matrix, or of a vector, keeps of it
kept_matrix, kept_vector = operator.attrgetter("_saved_mat2"), operator.attrgetter("_saved_vec")
is_zerotensor = operator.methodcaller("_is_zerotensor")  # zeros without memory


def storage_id(x) -> int:
    """Return the identity of a tensor's memory.

    No other memory has it while a `StorageWeakRef` to this one exists.
    """
    return x.untyped_storage()._cdata


def operation_schema(operation):
    """Return the schema of an operation, or None for one of higher order."""
    return getattr(operation, "_schema", None)


def is_view_operation(operation) -> bool:
    """Tell whether an operation's results share memory with its arguments."""
    return any(result.alias_info is not None for result in operation._schema.returns)


def written_arguments(operation, args, kwargs):
    """Yield the arguments of a call that `operation` writes to."""
    for position, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def tensor_without_memory(cls, shape, strides, dtype, device, message):
    """Return a tensor of a subclass of torch.Tensor that has no memory.

    C code that asks for its memory gets an error with `message`; in builds without CUDA torch's if it would write, else
    the address 0. `strides` of None are those of a contiguous tensor.
    """
    tensor = torch.Tensor._make_wrapper_subclass(cls, shape, strides, dtype=dtype, device=device)
    if FORBID_MEMORY is not None:
        FORBID_MEMORY(tensor, message)
    else:
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def share_memory(tensor, values) -> None:
    """Give a tensor the memory, sizes and strides of `values`; its graph stays."""
    with without_torch_function(), torch._C._DisableTorchDispatch():
        tensor.data = values


def from_first_element(values):
    """Return a view of part of a tensor's memory whose storage begins there.

    Autograd replays later views of a tensor of a subclass on a gradient whose memory begins at its first element.
    """
    storage, start = values.untyped_storage(), values.storage_offset() * values.element_size()
    if not start or storage.device.type == "meta":
        return values
    part = storage[start : storage.nbytes()]
    return torch.empty(0, dtype=values.dtype, device=values.device).set_(part, 0, values.shape, values.stride())


def has_hooks(module) -> bool:
    """Tell whether a call of `module` runs hooks, its own or those of all modules."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks or has_global_module_hooks())


def forward_hooks(module) -> tuple:
    """Return the hooks of `module` that run before and after its forward."""
    return *module._forward_pre_hooks.values(), *module._forward_hooks.values()


def backward_hooks(module) -> tuple:
    """Return the hooks of `module` that run before and after its backward."""
    return *module._backward_pre_hooks.values(), *module._backward_hooks.values()


def without_compiler_disabled(function):
    """Return the function that torch.compiler.disable wraps, or `function`."""
    module = getattr(function, "__globals__", {}).get("__name__")
    return getattr(function, "__wrapped__", None) if module == "torch._dynamo.eval_frame" else function


def is_wrapped_by_fsdp1(module) -> bool:
    """Tell whether `module` is torch's FullyShardedDataParallel, which may not be imported."""
    return hasattr(module, "_fsdp_wrapped_module")


def is_fsdp2_hook(hook) -> bool:
    """Tell whether `hook` is one by which FSDP2 gathers and frees weights."""
    return getattr(hook, "__module__", None) == "torch.distributed.fsdp._fully_shard._fsdp_state"


def is_replica(module) -> bool:
    """Tell whether torch.nn.DataParallel made `module` for one of its devices."""
    return getattr(module, "_is_replica", False)


def has_batched(tensors) -> bool:
    """Tell whether autograd batched any of the tensors, for `is_grads_batched` or a vectorized Jacobian."""
    batched = torch._C._dispatch_key_parse("Batched")
    return any(torch.is_tensor(x) and torch._C._dispatch_keys(x).has(batched) for x in tensors)


def backward_keeps_graph() -> bool:
    """Tell whether the backward that runs here was called with retain_graph=True."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def backward_number() -> int:
    """Return the number of the backward that runs here; no two have the same."""
    return torch._C._current_graph_task_id()


@constant_result
def compiles_backward() -> bool:
    """Tell whether compiled autograd runs the backward here."""
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)


def after_backward(function) -> None:
    """Call `function` at the end of the backward that runs now."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def grouped_mm():
    """Return torch's grouped matrix product, public or not yet."""
    return getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def saved_tensors_may_change():
    """Tell whether the program is within torch.autograd.graph.allow_mutation_on_saved_tensors."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


@functools.cache
def clamp_passes_at_limits() -> bool:
    """Tell whether torch's clamp passes gradients of values that equal a limit.

    That of 2.13 does, that of 2.15 does not.
    """
    with without_modes(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        x = torch.zeros((), device="cpu", requires_grad=True)
        return torch.autograd.grad(x.clamp(max=0.0), x)[0].item() != 0


@functools.cache
def has_wide_products(device_type: str) -> bool:
    """Tell whether torch multiplies 16-bit matrices into fp32 on such devices."""
    if device_type == "meta":
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype_out", device_type.upper())

"""Match LayerNorm, RMSNorm and L2 norms, of any rounding order."""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch.compiler import is_compiling

from liger_hw.dispatch import autocasts
from liger_hw.kernels.norms.l2_norm import L2_CASTING_MODES, l2_norm
from liger_hw.kernels.norms.layer_norm import layer_norm
from liger_hw.kernels.norms.rms_norm import CASTING_MODES, rms_norm
from liger_hw.patching import probing, witnesses
from liger_hw.patching.match import Match, compiles_by_itself, in_memory_order
from liger_hw.patching.reading import read

NORM_OPS = {op.__name__: op for op in (rms_norm, layer_norm, l2_norm)}
PROBE_EPS = 0.05  # replaces an eps attribute: large enough to change the result
OTHER_EPS = (0.0, 1e-7, 3.0)  # beside the module's
WRITTEN_EPS = (1e-5, 1e-6, 1e-8, 1e-12)  # tried for norms whose code contains eps as a number
PROBE_WIDTH = 64  # for a norm without a weight, or whose weight is empty on this rank (ZeRO-3)
PROBE_ROWS = 7
HALF = (torch.bfloat16, torch.float16)
MIXED = [(dtype, torch.float32) for dtype in HALF], [(torch.float32, dtype) for dtype in HALF]  # of x and weight
WIDENED = {"layer_norm", "rms_norm", "normalize", "norm", "vector_norm"}  # functions that autocast computes in fp32


@dataclass(frozen=True)
class NormMatch(Match):
    """Match of a norm of rows.

    Attributes:
        narrow_input, wide_input: the op also agrees where x has a narrower or a wider dtype than the weight.
        default_eps: the module takes None as eps.
        width: of the rows, of a module that states one: torch's layers refuse others.
        keeps_order: results have the memory order of x, of which torch's own norms make contiguous ones.
    """

    kind = "norm"
    inputs = ("x",)
    narrow_input: bool = False
    wide_input: bool = False
    default_eps: bool = False
    width: int | None = None
    keeps_order: bool = False

    def members(self, original, unchanged):
        op, options, names = NORM_OPS[self.op], dict(self.options), dict(self.names)
        weight_name, bias_name, eps_name = names["weight"], names.get("bias"), names.get("eps")
        written_eps = options.pop("eps", None)
        # under autocast torch's own layers run in fp32; on a GPU pow and rsqrt too, which a norm in fp32 does not show
        widens_under_autocast = not WIDENED.isdisjoint(read(original).attributes)
        widens_under_autocast |= options.get("casting_mode") == "none"
        narrow_input, wide_input, takes_none = self.narrow_input, self.wide_input, self.default_eps
        width, keeps_order = self.width, self.keeps_order
        offset = options.pop("offset", None) if op is layer_norm else None
        derived = original is not torch.nn.LayerNorm and issubclass(original, torch.nn.LayerNorm)

        def compute(x, weight, eps):
            return op(x, eps=eps, **options) if op is l2_norm else op(x, weight, eps=eps, **options)

        def forward(self, *args, **kwargs):
            if is_compiling() and compiles_by_itself(args):
                return original.forward(self, *args, **kwargs)
            if not unchanged(self, args, kwargs) or derived and autocasts(args[0].device.type):
                return original.forward(self, *args, **kwargs)
            x = args[0]
            if width is not None and x.shape[-1] != width:
                return original.forward(self, x)
            weight = getattr(self, weight_name) if weight_name else None
            bias = getattr(self, bias_name) if bias_name else None
            # a program may set another kind of weight, or none
            is_foreign = weight_name and not witnesses.is_torchs(weight)
            if is_foreign or bias is not None and not witnesses.is_torchs(bias):
                return original.forward(self, x)
            if weight_name and weight.dtype != x.dtype:
                wider = torch.promote_types(x.dtype, weight.dtype)  # fp32 of fp16 and bf16, which no probe showed
                if not (wide_input if wider == x.dtype else narrow_input and wider == weight.dtype):
                    return original.forward(self, x)
            if widens_under_autocast and x.dtype != torch.float32 and autocasts(x.device.type):
                return original.forward(self, x)
            eps = getattr(self, eps_name) if eps_name else written_eps
            if eps is None and takes_none:
                eps = default_eps(x.dtype)
            elif type(eps) is not float:  # a tensor, a number that kernels do not take, or the module's error for None
                return original.forward(self, x)
            try:
                if bias_name:
                    weight = weight if offset is None else weight + offset
                    return op(x, weight, bias, eps, **options)
                # contiguous: a CPU's reference keeps the order
                return in_memory_order(compute, x, weight, eps) if keeps_order else compute(x, weight, eps).contiguous()
            except ValueError:
                if weight is None or weight.shape == x.shape[-1:]:
                    raise
                return original.forward(self, x)  # a program set a weight of another shape, which torch may expand

        return {"forward": forward}


def check_eps(original, replacement, module, eps_name, case, exact=True):
    """Raise `Objection` if a norm uses its eps otherwise than the op.

    A norm may have a lower bound of eps.

    Args:
        original, replacement: functions of (eps, training, *arguments).
        case: as in `Proof`.
    """
    for eps, dtype in itertools.product((vars(module)[eps_name], *OTHER_EPS), witnesses.WITNESS_DTYPES):
        x, *rest = case(dtype, (2, 5))
        args = eps, module.training, x * (abs(eps) ** 0.5 or 3), *rest
        with probing.actual_floats():
            if not probing.agree(original, replacement, [args], exact):
                raise witnesses.Objection(f"uses its {eps_name} otherwise than the op")


def default_eps(dtype):
    """Return the eps of torch's RMSNorm for eps=None: that of its compute dtype."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def match_norm(module):
    """Return the `NormMatch` of a module that scales rows to unit size, or None."""
    if isinstance(module, torch.nn.LayerNorm):
        return _match_layer_norm(module)
    parameters = probing.direct_parameters(module)
    if module._modules or len(parameters) > 1 or any(p.ndim != 1 for p in parameters.values()):
        return None
    if len(probing.positional_inputs(module)) != 1:  # a second may be a gate
        return None
    weight_name = next(iter(parameters), None)
    offsets = (0.0, 1.0) if weight_name else (0.0,)
    forms = itertools.product(CASTING_MODES, offsets)
    ops = [(rms_norm, {"casting_mode": mode, "offset": offset}) for mode, offset in forms]
    ops += [(layer_norm, {}), *((l2_norm, {"casting_mode": mode}) for mode in L2_CASTING_MODES if not weight_name)]
    for (op, options), (eps_name, eps) in itertools.product(ops, _ways_to_eps(module)):
        match = _prove_norm(module, weight_name, op, options, eps_name, eps)
        if match is not None:
            return match
    return None


def _ways_to_eps(module):
    """Return (attribute of eps or None, value in the probe) for each possible eps."""
    if names := probing.float_attributes(module):
        return [(name, PROBE_EPS) for name in names]
    if getattr(module, "eps", 0) is None:
        return [("eps", None)]
    return [(None, eps) for eps in WRITTEN_EPS]


def _prove_norm(module, weight_name, op, options, eps_name, eps):
    weight = module._parameters[weight_name] if weight_name else None
    width = (weight.numel() if weight_name else _normalized_width(module)) or PROBE_WIDTH
    absent = {name: p for name, p in module._parameters.items() if p is None}

    def with_eps(eps, training, x, weight):
        parameters = absent | ({weight_name: weight} if weight_name else {})
        attributes = {"_buffers": {}, "training": training} | ({eps_name: eps} if eps_name else {})
        return type(module).forward(probing.copy_of(module, parameters, {}, **attributes), x)

    def by_op(eps, _, x, weight):
        number = default_eps(x.dtype) if eps is None else eps
        learned = () if op is l2_norm else (weight if weight_name else None,)
        return op.reference(x, *learned, eps=number, **options)

    original, replacement = functools.partial(with_eps, eps), functools.partial(by_op, eps)
    random = probing.generator()

    def rows(x_dtype, weight_dtype):
        # a small eps that the probe cannot change shows only in rows of the size of its square root
        scale = 3 if eps == PROBE_EPS else (default_eps(x_dtype) if eps is None else eps) ** 0.5
        x = scale * probing.random_rows(random, PROBE_ROWS, width, dtype=x_dtype)
        return module.training, x, torch.nn.Parameter(probing.random_rows(random, width, dtype=weight_dtype))

    exact = op is not layer_norm and type(module) is not torch.nn.RMSNorm  # torch's kernels sum in another order
    if not probing.agree(original, replacement, [rows(dtype, dtype) for dtype in probing.PROBE_DTYPES], exact):
        return None
    narrow, wide = (probing.agree(original, replacement, [rows(*pair) for pair in pairs], exact) for pairs in MIXED)
    case = probing.case_of(width, weights=1)
    states_width = bool(weight_name or _normalized_width(module))
    at_width = None if states_width else lambda width: probing.case_of(width, weights=1)(torch.float32, (2, 3))
    proof = witnesses.Proof(
        original, replacement, case, exact, width_is_given=bool(weight_name), at_width=at_width,
        roles=(eps_name,),
    )  # fmt: skip
    proof.confirm(module)
    if type(vars(module).get(eps_name)) is float:
        check_eps(with_eps, by_op, module, eps_name, case, exact)
    x, weight = case(torch.float32, (2, 3))
    turned = probing.run(lambda: original(module.training, x.transpose(0, 1), weight))
    names = {"weight": weight_name, "bias": None} if op is layer_norm else {"weight": weight_name}
    if eps_name:
        names["eps"] = eps_name
    else:
        options = options | {"eps": eps}
    takes_none = eps is None or type(module) is torch.nn.RMSNorm
    return NormMatch.of(
        op, options, names, narrow_input=narrow, wide_input=wide, default_eps=takes_none,
        width=_normalized_width(module) or None, keeps_order=not turned.is_contiguous(),
    )  # fmt: skip


def _normalized_width(module):
    shape = getattr(module, "normalized_shape", ())
    return shape[0] if isinstance(shape, (tuple, list, torch.Size)) and len(shape) == 1 else 0


def _match_layer_norm(module):
    """Match `torch.nn.LayerNorm` or a subclass that scales by weight or 1 + weight."""
    names = {"weight": "weight", "bias": "bias", "eps": "eps"}
    if len(module.normalized_shape) != 1:
        return None
    if type(module) is torch.nn.LayerNorm:  # `read` tells whether a program replaced its code
        return NormMatch.of(layer_norm, {}, names, width=module.normalized_shape[0])
    if module.weight is None or module._modules:
        return None
    width = module.weight.numel() or PROBE_WIDTH
    parts = [name for name in ("weight", "bias") if getattr(module, name, None) is not None]

    def with_eps(eps, training, x, *parameters):
        parameters = dict.fromkeys(("weight", "bias")) | dict(zip(parts, parameters))
        return type(module).forward(probing.copy_of(module, parameters, {}, eps=eps, training=training), x)

    case = probing.case_of(width, weights=len(parts))
    for offset in (0.0, 1.0):

        def by_op(eps, _, x, weight, bias=None, offset=offset):
            return layer_norm.reference(x, weight + offset, bias, eps)

        functions = (functools.partial(function, PROBE_EPS) for function in (with_eps, by_op))
        if witnesses.Proof(*functions, case, exact=False, roles=("eps",)).holds_for(module):
            check_eps(with_eps, by_op, module, "eps", case, exact=False)
            return NormMatch.of(layer_norm, {"offset": offset} if offset else {}, names)
    return None

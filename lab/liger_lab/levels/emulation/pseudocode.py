"""Translate AMD's pseudo-code of an instruction into a function of numpy arrays.

The pseudo-code is that of AMD's instruction set documents, as tinygrad's package ships it (`*.str_pcode.PCODE`):

    tmp = 64'U(S0.u32) + 64'U(S1.u32);
    VCC.u64[laneId] = tmp >= 0x100000000ULL ? 1'1U : 1'0U;
    D0.u32 = tmp.u32

becomes statements such as `t3 = t1 + t2`, each over all lanes. Operands arrive as unsigned integers of their width. A
branch computes both sides and selects. Pseudo-code that the translator cannot read raises `Unknown`, which quotes it.
"""

import functools
import re
from dataclasses import dataclass

import numpy as np

from liger_lab.levels.emulation import arithmetic


class Unknown(NotImplementedError):
    """An instruction or a part of it that the emulation does not know."""


# Pseudo-code that is a loop, or that names states which do not occur here, in functions of `arithmetic`.
REPLACED = {
    "V_RNDNE_F32": "D0.f32 = rint(S0.f32)",
    "V_RNDNE_F16": "D0.f16 = rint(S0.f16)",
    "V_RNDNE_F64": "D0.f64 = rint(S0.f64)",
    "V_RSQ_F32": "D0.f32 = reciprocal_root(S0.f32)",
    "V_LDEXP_F32": "D0.f32 = ldexp(S0.f32, S1.i32)",
    "V_LDEXP_F64": "D0.f64 = ldexp(S0.f64, S1.i32)",
    "V_FREXP_EXP_I32_F32": "D0.i32 = frexp_exponent(S0.f32)",
    "V_MED3_F32": "D0.f32 = median3(S0.f32, S1.f32, S2.f32)",
    "V_PERM_B32": "D0.u32 = permute_bytes(S0.u32, S1.u32, S2.u32)",
    "V_FFBH_U32": "D0.i32 = leading_zeros(S0.u32)",
    "V_CLZ_I32_U32": "D0.i32 = leading_zeros(S0.u32)",
    "V_FFBL_B32": "D0.i32 = trailing_zeros(S0.u32)",
    "V_CTZ_I32_B32": "D0.i32 = trailing_zeros(S0.u32)",
    "S_FF1_I32_B32": "D0.i32 = trailing_zeros(S0.u32)",
    "S_FF1_I32_B64": "D0.i32 = trailing_zeros(S0.u64)",
    "S_CTZ_I32_B32": "D0.i32 = trailing_zeros(S0.u32)",
    "S_FLBIT_I32_B32": "D0.i32 = leading_zeros(S0.u32)",
    "S_FLBIT_I32": "D0.i32 = equal_leading_bits(S0.u32)",
    "S_CLS_I32": "D0.i32 = equal_leading_bits(S0.u32)",
    "V_CLS_I32": "D0.i32 = equal_leading_bits(S0.u32)",
    "S_CLZ_I32_U32": "D0.i32 = leading_zeros(S0.u32)",
    "S_BITSET0_B32": "D0.u32 = D0.u32 & ~(1U << (S0.u32 & 31U))",
    "S_BITSET1_B32": "D0.u32 = D0.u32 | (1U << (S0.u32 & 31U))",
    "S_BCNT1_I32_B32": "D0.i32 = count_ones(S0.u32); SCC = D0.i32 != 0",
    "S_BCNT1_I32_B64": "D0.i32 = count_ones(S0.u64); SCC = D0.i32 != 0",
    "V_BFREV_B32": "D0.u32 = reversed_bits(S0.u32)",
    "S_BREV_B32": "D0.u32 = reversed_bits(S0.u32)",
    "V_BCNT_U32_B32": "D0.u32 = S1.u32 + 32'U(count_ones(S0.u32))",
    "V_MBCNT_LO_U32_B32": "D0.u32 = S1.u32 + 32'U(count_ones(S0.u32 & ((1U << laneNumber) - 1U)))",
    "V_MBCNT_HI_U32_B32": "D0.u32 = S1.u32 + 32'U(count_ones(S0.u32 & "
    "(laneNumber < 32U ? 0U : (1U << (laneNumber - 32U)) - 1U)))",
    "V_CMP_CLASS_F32": "D0.u64[laneId] = classify(S0.f32, S1.u32)",
    **dict.fromkeys(
        ("V_MAD_U64_U32", "V_MAD_CO_U64_U32"),
        "tmp = 64'U(S0.u32) * 64'U(S1.u32) + S2.u64;\nVCC.u64[laneId] = tmp < S2.u64;\nD0.u64 = tmp",
    ),
    "V_CVT_PK_BF16_F32": "tmp[15 : 0].bf16 = f32_to_bf16(S0.f32);\ntmp[31 : 16].bf16 = f32_to_bf16(S1.f32);\n"
    "D0 = tmp.b32",
    # the sources arrive with their halves selected
    "V_PK_MOV_B32": "D0.u64 = { S1[31 : 0].u32, S0[31 : 0].u32 }",
    # scaling steps of a division, whose cases are of denormal and huge quotients
    "V_DIV_SCALE_F32": """
VCC.u64[laneId] = 0U;
if ((S2.f32 == 0.0F) || (S1.f32 == 0.0F)) then
D0.f32 = not_a_number(S0.f32)
elsif exponent(S2.f32) - exponent(S1.f32) >= 96 then
VCC.u64[laneId] = 1U;
D0.f32 = S0.f32 == S1.f32 ? ldexp(S0.f32, 64) : S0.f32
elsif is_denormal(S1.f32) then
D0.f32 = ldexp(S0.f32, 64)
elsif (is_denormal(1.0F / S1.f32) && is_denormal(S2.f32 / S1.f32)) then
VCC.u64[laneId] = 1U;
D0.f32 = S0.f32 == S1.f32 ? ldexp(S0.f32, 64) : S0.f32
elsif is_denormal(1.0F / S1.f32) then
D0.f32 = ldexp(S0.f32, -64)
elsif is_denormal(S2.f32 / S1.f32) then
VCC.u64[laneId] = 1U;
D0.f32 = S0.f32 == S2.f32 ? ldexp(S0.f32, 64) : S0.f32
elsif exponent(S2.f32) <= 23 then
D0.f32 = ldexp(S0.f32, 64)
else
D0.f32 = S0.f32
endif""",
    # with 2^32, as older documents have it, the scales of 2^64 above would not cancel
    "V_DIV_FMAS_F32": """
tmp = fma(S0.f32, S1.f32, S2.f32);
if VCC.u64[laneId] then
D0.f32 = exponent(S2.f32) > 127 ? ldexp(tmp, 64) : ldexp(tmp, -64)
else
D0.f32 = tmp
endif""",
}  # fmt: skip
for _size in ("F32", "F16", "F64"):
    _type = _size.lower()
    for _words, _function in (
        (("MAX", "MAX_NUM"), "maximum"), (("MIN", "MIN_NUM"), "minimum"),
        (("MAXIMUM",), "maximum_or_nan"), (("MINIMUM",), "minimum_or_nan"),
    ):  # fmt: skip
        for _word in _words:
            for _name in (f"V_{_word}_{_size}", f"S_{_word}_{_size}"):
                REPLACED[_name] = f"D0.{_type} = {_function}(S0.{_type}, S1.{_type})"
            _three = re.sub("(MAX|MIN)(IMUM)?", r"\g<0>3", _word)  # MAX3_NUM, MAXIMUM3
            _inner = f"{_function}(S0.{_type}, S1.{_type})"
            REPLACED[f"V_{_three}_{_size}"] = f"D0.{_type} = {_function}({_inner}, S2.{_type})"

_FLOATS = {"f16": 16, "f32": 32, "f64": 64, "bf16": 16}
_NUMPY = {
    "u1": "np.bool_", "u8": "np.uint8", "u16": "np.uint16", "u32": "np.uint32", "u64": "np.uint64", "i8": "np.int8",
    "i16": "np.int16", "i32": "np.int32", "i64": "np.int64", "f16": "np.float16", "f32": "np.float32",
    "f64": "np.float64", "bf16": "np.float32",
}  # fmt: skip
# function -> (its name in `arithmetic` or numpy, the type of its result; None: the first argument's)
_FUNCTIONS = {
    "fma": ("fma", None), "floor": ("np.floor", None), "trunc": ("np.trunc", None), "ceil": ("np.ceil", None),
    "sqrt": ("np.sqrt", None), "abs": ("np.abs", None), "rint": ("np.rint", None), "log2": ("log2", None), "isNAN":
    ("np.isnan", "u1"), "isSignalNAN": ("is_signaling", "u1"), "isQuietNAN": ("np.isnan", "u1"), "cvtToQuietNAN":
    ("np.asarray", None), "sign": ("np.signbit", "u1"), "exponent": ("exponent", "i32"), "mantissa": ("mantissa",
    None), "ldexp": ("ldexp", None), "reciprocal_root": ("reciprocal_root", None), "frexp_exponent":
    ("frexp_exponent", "i32"), "median3": ("median3", None), "leading_zeros": ("leading_zeros", "i32"),
    "reversed_bits": ("reversed_bits", "u32"), "trailing_zeros": ("trailing_zeros", "i32"),
    "equal_leading_bits": ("equal_leading_bits", "i32"), "count_ones":
    ("np.bitwise_count", "u8"), "permute_bytes": ("permute_bytes", "u32"), "classify": ("classify", "u1"),
    "is_denormal": ("is_denormal", "u1"), "maximum": ("maximum", None), "minimum": ("minimum", None),
    "maximum_or_nan": ("np.maximum", None), "minimum_or_nan": ("np.minimum", None),
    "not_a_number": ("np.full_like", None), "f32_to_bf16": ("to_bf16", "bf16"), "sin": ("np.sin", None), "cos":
    ("np.cos", None),
}  # fmt: skip
_CONVERSION = re.compile(r"(?:v_cvt_)?(bf16|[fiu]\d+)_to_(bf16|[fiu]\d+)")
_EXTREME = re.compile(r"v_(max|min)3?(?:_num)?_(f16|f32|f64|[iu]16|[iu]32)")
_TOKEN = re.compile(
    r"\s*(\d+'[UIFB](?=\()|\d+'-?(?:0x)?[0-9a-fA-F]+U?|0x[0-9a-fA-F]+(?:ULL|LL|U|L)?|\d+\.\d+F?|\d+(?:ULL|LL|U|L|F)?|"
    r"[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|<>|&&|\|\||[-+*/%&|^~!?:()\[\]{},.=<>])"
)
_BINARY = [["||"], ["&&"], ["|"], ["^"], ["&"], ["==", "!=", "<>"], ["<", ">", "<=", ">="], ["<<", ">>"], ["+", "-"],
           ["*", "/", "%"]]  # fmt: skip


@dataclass(frozen=True)
class Value:
    """An expression: Python code, or a Python number, and its type.

    Numbers of type "weak" take the other operand's type.
    """

    code: object
    type: str

    @property
    def known(self):
        return not isinstance(self.code, str)


def _bits(type):
    return 1 if type == "u1" else int(re.sub(r"\D", "", type.replace("bf", "f")))


def _container(bits):
    return "u1" if bits == 1 else next(f"u{size}" for size in (8, 16, 32, 64) if bits <= size)


def _tokens(text):
    at, tokens = 0, []
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise Unknown(f"pseudo-code {text[at:]!r}")
        tokens.append(match[1])
        at = match.end()
    return tokens


class Translator:
    """Translate one instruction's pseudo-code; see `translate`."""

    def __init__(self, inputs, constants):
        self.lines, self.names, self.inputs, self.written = [], 0, inputs, {}
        self.variables = {name: Value(name, type) for name, type in inputs.items()}
        self.variables |= {name: Value(number, "u32") for name, number in constants.items()}
        self.variables |= {f"S[{i}]": Value(f"S{i}", inputs[f"S{i}"]) for i in range(3) if f"S{i}" in inputs}

    # --- statements ---------------------------------------------------------------------------------------------------
    def run(self, text):
        text = re.sub(r"\b(then|do|else)\b\s*(?=\S)", r"\1\n", text)
        statements = [line.strip() for line in re.split(r"[;\n]", text) if line.strip()]
        end = self.block(statements, 0)
        if end != len(statements):
            raise Unknown(f"pseudo-code {statements[end]!r}")

    def block(self, statements, at):
        """Translate statements up to the word that ends their block; return its position."""
        while at < len(statements):
            line = statements[at]
            word = line.split()[0]
            if word in ("elsif", "else", "endif", "endfor"):
                return at
            if word == "if":
                at = self.branches(statements, at)
            elif word == "for":
                at = self.loop(statements, at)
            elif word == "declare":
                name, _, type = line[7:].partition(":")
                array = re.match(r"\s*\d+'[A-Z]\[\d+\]", type)
                name = name.strip()
                if name not in self.variables and not array:
                    self.variables[name] = Value(0, _container(int(re.match(r"\s*(\d+)'", type)[1])))
                at += 1
            else:
                self.assignment(line)
                at += 1
        return at

    def branches(self, statements, at):
        """Compute every branch on a copy of the variables, then select."""
        start, cases, taken = dict(self.variables), [], False
        while not statements[at].startswith("endif"):
            line = statements[at]
            if line.startswith(("if", "elsif")):
                condition = self.condition(re.sub(r"^(if|elsif)\b(.*)\bthen$", r"\2", line))
            else:
                condition = Value(True, "u1")
            self.variables = dict(start)
            skipped = taken or (condition.known and not condition.code)
            lines = list(self.lines)
            at = self.block(statements, at + 1)
            if skipped:
                self.lines = lines
            else:
                cases.append((condition, self.variables))
                taken = condition.known
        result = start if not taken else cases.pop()[1]
        for condition, variables in reversed(cases):
            merged = dict(result)
            for name, value in variables.items():
                other = result.get(name)
                if value != other:
                    merged[name] = value if other is None else self.select(condition, value, other)
            result = merged
        self.variables = result
        return at + 1

    def loop(self, statements, at):
        name, first, last = re.match(r"for (\w+) in (\d+) : (\d+) do", statements[at]).groups()
        for i in range(int(first), int(last) + 1):
            self.variables[name] = Value(i, "weak")
            end = self.block(statements, at + 1)
        return end + 1

    def assignment(self, line):
        compound = re.match(r"(.+?)\s([-+*&|^])=\s(.+)", line)
        if compound:
            target, operator, value = compound.groups()
            line = f"{target} = {target} {operator} ({value})"
        *targets, expression = re.split(r"(?<![<>=!])=(?!=)", line)
        if not targets:
            raise Unknown(f"pseudo-code {line!r}")
        value = self.expression(expression)
        for target in targets:
            self.assign(target.strip(), value)

    def assign(self, target, value):
        match = re.fullmatch(r"(\w+)(?:\[(\w+)\](?!\.\w+\[))?(?:\.(\w+))?(?:\[(.+?)\])?(?:\.(\w+))?", target)
        if not match:
            raise Unknown(f"assignment to {target!r}")
        name, element, type, part, part_type = match.groups()
        if element is not None and part is None and element != "laneId":
            index = self.variables.get(element, Value(int(element) if element.isdigit() else None, "weak")).code
            name, element = f"{name}[{index}]", None
        if "laneId" in (part, element):
            self.set(f"{name}[lane]", self.typed(value, "u1"))
            return
        if element is not None:
            part = element
        if part is None:
            if type:
                value = self.typed(value, type.replace("b", "u") if type[0] == "b" and type != "bf16" else type)
            elif name in self.variables and name in self.inputs:
                value = self.typed(value, self.inputs[name])
            self.set(name, value)
            return
        high, _, low = part.partition(":")
        high = int(high)
        low = int(low) if low else high
        width = high - low + 1
        old = self.variables.get(name, Value(0, "u32"))
        old = self.reinterpret(old, f"u{max(_bits(old.type) if old.type != 'weak' else 32, 32 if high < 32 else 64)}")
        kind = part_type or type
        if kind and kind[0] in "fi" or kind == "bf16":
            value = self.typed(value, kind)
        value = self.reinterpret(value, _container(width)) if value.type != "weak" else value
        value = self.reinterpret(value, old.type)
        mask = ((1 << width) - 1) << low
        rest = self.binary("&", old, Value(~mask & ((1 << _bits(old.type)) - 1), old.type))
        shifted = self.binary("<<", value, Value(low, "weak")) if low else value
        self.set(name, self.binary("|", rest, self.binary("&", shifted, Value(mask, old.type))))

    def set(self, name, value):
        if value.known and value.type == "weak" and name.split("[")[0] in ("D0", "SCC"):
            value = Value(value.code, "u32")
        self.variables[name] = value
        self.written[name] = None

    # --- values -------------------------------------------------------------------------------------------------------
    def emit(self, code, type):
        self.names += 1
        name = f"t{self.names}"
        self.lines.append(f"{name} = {code}")
        return Value(name, type)

    def code(self, value, type=None):
        """Return Python code of a value in numpy's type."""
        if not value.known:
            return value.code
        type = value.type if type is None else type
        number = value.code
        if type == "weak":
            type = "f64" if isinstance(number, float) else "i32"
        if type[0] == "u":
            number &= (1 << _bits(type)) - 1
        return f"{_NUMPY[type]}({number!r})"

    def convert(self, value, type):
        """Convert a number to another type, as 64'F(x) does."""
        if value.type == type:
            return value
        if value.known:
            return Value(float(value.code) if type in _FLOATS else int(value.code), type)
        if type == "bf16":
            return self.emit(f"to_bf16({value.code}.astype(np.float32))", type)
        if value.type in _FLOATS and type[0] in "ui":
            return self.emit(f"to_int({value.code}, {_NUMPY[type]})", type)
        return self.emit(f"{value.code}.astype({_NUMPY[type]})", type)

    def typed(self, value, type):
        """Prepare a value for `target.type = value`.

        Floats convert to floats; all else keeps its bits.
        """
        if value.type in ("weak", type):
            return self.convert(value, type)
        if type in _FLOATS and value.type in _FLOATS:
            return self.convert(value, type)
        return self.reinterpret(value, type)

    def reinterpret(self, value, type):
        """Read the bits of a value as another type: x.f32, x.u16."""
        type = type.replace("b", "u") if re.fullmatch(r"b\d+", type) else type
        if value.type == type:
            return value
        if value.known:
            if value.type == "weak" or value.type[0] in "ui":
                if type in _FLOATS:
                    raw = {32: np.uint32, 64: np.uint64, 16: np.uint16}[_bits(type)](value.code)
                    if type == "bf16":
                        return Value(float((np.uint32(raw) << np.uint32(16)).view(np.float32)), type)
                    return Value(float(raw.view(f"f{_bits(type) // 8}")), type)
                number = int(value.code) & ((1 << _bits(type)) - 1)
                return Value(
                    number - (1 << _bits(type)) if type[0] == "i" and number >> _bits(type) - 1 else number, type
                )
            value = self.emit(self.code(value), value.type)
        if value.type == "bf16":
            value = self.emit(f"({value.code}.view(np.uint32) >> np.uint32(16)).astype(np.uint16)", "u16")
            return self.reinterpret(value, type)
        if type not in _FLOATS and type not in _NUMPY:  # u3, i24
            wide = self.reinterpret(value, _container(_bits(type)))
            if type[0] == "i":
                wide = self.convert(wide, _container(max(_bits(type), 32)))
                spare = Value(_bits(wide.type) - _bits(type), "weak")
                upper = self.binary("<<", wide, spare)
                return self.binary(">>", self.reinterpret(upper, f"i{_bits(wide.type)}"), spare)
            return self.binary("&", wide, Value((1 << _bits(type)) - 1, wide.type))
        if value.type in _FLOATS:
            bits = _bits(value.type)
            value = self.emit(f"{value.code}.view(np.uint{bits})", f"u{bits}")
            return self.reinterpret(value, type)
        if type == "bf16":
            wide = self.reinterpret(self.reinterpret(value, "u16"), "u32")
            return self.emit(f"({wide.code} << np.uint32(16)).view(np.float32)", "bf16")
        if type in _FLOATS:
            raw = self.reinterpret(value, f"u{_bits(type)}")
            return self.emit(f"{raw.code}.view({_NUMPY[type]})", type)
        if type == "u1":
            return self.emit(f"({value.code} & {self.code(Value(1, value.type))}).astype(bool)", "u1")
        return self.emit(f"{value.code}.astype({_NUMPY[type]})", type)

    def condition(self, text):
        return self.truth(self.expression(text))

    def truth(self, value):
        if value.type == "u1":
            return value
        if value.known:
            return Value(bool(value.code), "u1")
        return self.emit(f"{value.code} != 0", "u1")

    def common(self, a, b):
        """Return two operands in one type, as C promotes."""
        if a.type == "weak" and b.type == "weak":
            return a, b, "weak"
        if "weak" in (a.type, b.type):
            weak, other = (a, b) if a.type == "weak" else (b, a)
            type = other.type
            if isinstance(weak.code, float) and type not in _FLOATS:
                type = "f64"
        elif a.type in _FLOATS or b.type in _FLOATS:
            type = max((x.type for x in (a, b) if x.type in _FLOATS), key=lambda t: (_bits(t), t == "f32"))
        else:
            bits = max(_bits(a.type), _bits(b.type))
            widest = [x.type for x in (a, b) if _bits(x.type) == bits]
            type = f"{'i' if all(t[0] == 'i' for t in widest) else 'u'}{bits}"
        if type not in _FLOATS and type != "u1" and _bits(type) < 32:
            type = f"{type[0]}32"
        if type == "bf16":
            type = "f32"
        return self.convert(a, type), self.convert(b, type), type

    def binary(self, operator, a, b):
        if operator in ("<<", ">>"):
            if a.known and b.known:
                return Value(a.code << b.code if operator == "<<" else a.code >> b.code, a.type)
            a = self.convert(a, "u32") if a.type == "weak" else a
            if a.type == "u1" or _bits(a.type) < 32:
                a = self.convert(a, "i32" if a.type[0] == "i" else "u32")
            if b.known:
                return self.emit(f"{self.code(a)} {operator} {_NUMPY[a.type]}({b.code})", a.type)
            function = "shift_left" if operator == "<<" else "shift_right"
            return self.emit(f"{function}({self.code(a)}, {b.code})", a.type)
        if operator in ("&&", "||"):
            a, b = self.truth(a), self.truth(b)
            for one, other in ((a, b), (b, a)):
                if one.known:
                    decided = bool(one.code) == (operator == "||")
                    return Value(bool(one.code), "u1") if decided else other
            return self.emit(f"{a.code} {operator[0]} {b.code}", "u1")
        a, b, type = self.common(a, b)
        compared = operator in ("==", "!=", "<>", "<", ">", "<=", ">=")
        operator = "!=" if operator == "<>" else operator
        if a.known and b.known:
            result = eval(f"x {'//' if operator == '/' and type == 'weak' else operator} y", {"x": a.code, "y": b.code})
            return Value(result, "u1" if compared else type)
        if operator in "+-*" and type == "u1":
            a, b, type = self.convert(a, "u32"), self.convert(b, "u32"), "u32"
        return self.emit(f"{self.code(a, type)} {operator} {self.code(b, type)}", "u1" if compared else type)

    def select(self, condition, a, b):
        if condition.known:
            return a if condition.code else b
        if a.type == "weak" and b.type == "weak":
            a = self.convert(a, "f64" if isinstance(a.code, float) else "i32")
        if a.type == "bf16" or b.type == "bf16":
            type = "bf16"
        elif "weak" in (a.type, b.type):
            type = b.type if a.type == "weak" else a.type
        elif (a.type in _FLOATS) != (b.type in _FLOATS):  # an old register beside a new number
            number, raw = (a, b) if a.type in _FLOATS else (b, a)
            raw = self.reinterpret(raw, number.type)
            a, b, type = (number, raw, number.type) if number is a else (raw, number, number.type)
        else:
            type = max(a.type, b.type, key=_bits)
        a, b = self.convert(a, type), self.convert(b, type)
        return self.emit(f"np.where({condition.code}, {self.code(a, type)}, {self.code(b, type)})", type)

    # --- expressions --------------------------------------------------------------------------------------------------
    def expression(self, text):
        self.tokens, outer, self.at, self.text = _tokens(text), getattr(self, "tokens", None), 0, text
        value = self.ternary()
        if self.at != len(self.tokens):
            raise Unknown(f"pseudo-code {text!r} at {self.tokens[self.at]!r}")
        self.tokens = outer
        return value

    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def next(self, expected=None):
        token = self.peek()
        if expected and token != expected:
            raise Unknown(f"pseudo-code {self.text!r}: {token!r} instead of {expected!r}")
        self.at += 1
        return token

    def ternary(self):
        condition = self.level(0)
        if self.peek() != "?":
            return condition
        self.next()
        yes = self.ternary()
        self.next(":")
        return self.select(self.truth(condition), yes, self.ternary())

    def level(self, depth):
        if depth == len(_BINARY):
            return self.power()
        value = self.level(depth + 1)
        while self.peek() in _BINARY[depth]:
            value = self.binary(self.next(), value, self.level(depth + 1))
        return value

    def power(self):
        base = self.unary()
        if self.peek() != "**":
            return base
        self.next()
        exponent = self.unary()
        if base.known and exponent.known:
            return Value(float(base.code) ** exponent.code, "f32" if base.type == "f32" else "weak")
        raise Unknown(f"pseudo-code {self.text!r}: a power")

    def unary(self):
        token = self.peek()
        if token == "-":
            self.next()
            value = self.unary()
            if value.known:
                return Value(-value.code, value.type)
            return self.emit(f"-{value.code}", value.type)
        if token == "+":
            self.next()
            return self.unary()
        if token == "!":
            self.next()
            value = self.truth(self.unary())
            return Value(not value.code, "u1") if value.known else self.emit(f"~{value.code}", "u1")
        if token == "~":
            self.next()
            value = self.unary()
            return Value(~value.code, value.type) if value.known else self.emit(f"~{value.code}", value.type)
        return self.suffixes(self.primary())

    def primary(self):
        token = self.next()
        if token == "(":
            value = self.ternary()
            self.next(")")
            return value
        if token == "{":
            high = self.ternary()
            self.next(",")
            low = self.ternary()
            self.next("}")
            bits = 2 * _bits(low.type)
            wide = [self.reinterpret(part, f"u{bits}") for part in (high, low)]
            return self.binary("|", self.binary("<<", wide[0], Value(bits // 2, "weak")), wide[1])
        if re.match(r"\d+'[UIFB]$", token):
            bits, kind = token.split("'")
            self.next("(")
            value = self.ternary()
            self.next(")")
            type = f"{ {'U': 'u', 'I': 'i', 'F': 'f', 'B': 'u'}[kind] }{bits}"
            if kind == "F" and value.known and value.type != "weak" and value.type[0] == "u":
                return self.reinterpret(value, type)
            return self.convert(value, type)
        sized = re.fullmatch(r"(\d+)'(-?(?:0x)?[0-9a-fA-F]+)U?", token)
        if sized:
            return Value(int(sized[2], 0), "u1" if sized[1] == "1" else _container(int(sized[1])))
        if token[0].isdigit():
            if "." in token or (token.endswith("F") and not token.startswith("0x")):
                return Value(float(token.rstrip("F")), "f32" if token.endswith("F") else "weak")
            digits = token.rstrip("UL")
            unsigned = "U" in token or token.startswith("0x")
            if not unsigned and "L" not in token:
                return Value(int(digits, 0), "weak")
            size = 64 if token.endswith("LL") or int(digits, 0) >> 32 else 32
            return Value(int(digits, 0), f"{'u' if unsigned else 'i'}{size}")
        if self.peek() == "(":
            return self.call(token)
        return self.name(token)

    def name(self, token):
        if token in ("INF", "NAN", "PI", "OVERFLOW_F32", "UNDERFLOW_F32"):
            number = {"INF": np.inf, "NAN": np.nan, "PI": np.pi, "OVERFLOW_F32": 3.4028234663852886e38,
                      "UNDERFLOW_F32": 2.0**-149}[token]  # fmt: skip
            if self.peek() == ".":
                self.next()
                self.next()
            return Value(float(number), "weak")
        if token == "WAVE_MODE":
            self.next(".")
            return Value(False, "u1") if self.next() else None
        return Value(token, "name")

    def suffixes(self, value):
        """Read what follows a name or a value: .type, [bit], [high : low], [laneId]."""
        name = value.code if value.type == "name" else None
        if name is not None:
            value = self.variables.get(name)
        while self.peek() in (".", "["):
            if self.next() == ".":
                type = self.next()
                if value is None:  # a lane mask: VCC.u64[laneId]
                    continue
                value = self.reinterpret(value, type)
                continue
            if self.peek() == "laneId":
                self.next()
                self.next("]")
                lane = f"{name}[lane]"
                if lane not in self.variables:
                    raise Unknown(f"pseudo-code {self.text!r}: {name} by lane")
                value, name = self.variables[lane], None
                continue
            high = self.ternary()
            if self.peek() == ":":
                self.next()
                low = self.ternary()
                self.next("]")
                value = self.part(value, high.code, low.code)
                continue
            self.next("]")
            element = f"{name}[{high.code}]"
            if element in self.variables:
                value, name = self.variables[element], None
            elif value is None:
                raise Unknown(f"pseudo-code {self.text!r}: {name}")
            elif value.known:
                value = Value((value.code >> high.code) & 1, "u1")
            else:
                value = self.reinterpret(self.binary(">>", value, high), "u1")
        if value is None:
            raise Unknown(f"pseudo-code {self.text!r}: {name}")
        return value

    def part(self, value, high, low):
        width = high - low + 1
        if value.type in _FLOATS:
            value = self.reinterpret(value, f"u{_bits(value.type)}")
        if low:
            value = self.binary(">>", value, Value(low, "weak"))
        container = _container(width)
        value = self.reinterpret(value, container if width > 1 else "u8")
        if _bits(value.type) > width:
            value = self.emit(f"{value.code} & {self.code(Value((1 << width) - 1, value.type))}", value.type)
        return value

    def call(self, function):
        self.next("(")
        arguments = [self.ternary()]
        while self.peek() == ",":
            self.next()
            arguments.append(self.ternary())
        self.next(")")
        conversion = _CONVERSION.fullmatch(function)
        if conversion:
            source, target = conversion.groups()
            return self.convert(self.typed(arguments[0], source), target)
        first = arguments[0]
        extreme = _EXTREME.fullmatch(function)
        if extreme:
            name, type = {"max": "maximum", "min": "minimum"}[extreme[1]], extreme[2]
            name = f"np.{name}" if type[0] in "ui" else name
            value = self.convert(first, type)
            for other in arguments[1:]:
                value = self.emit(f"{name}({self.code(value)}, {self.code(self.convert(other, type))})", type)
            return value
        if function == "signext_from_bit":
            count, kind = self.code(self.convert(arguments[1], first.type)), first.type
            place = self.emit(f"{_NUMPY[kind]}({_bits(kind)}) - {count}", kind)
            value = self.emit(f"({first.code} << {place.code}) >> {place.code}", kind)
            return self.emit(f"np.where({count} == 0, {_NUMPY[kind]}(0), {value.code})", kind)
        if function == "signext":
            return self.convert(self.reinterpret(first, first.type.replace("u", "i")), "i64")
        if function == "pow":
            return self.emit(f"power({arguments[0].code}, {arguments[1].code})", arguments[1].type)
        if function == "fract":
            return self.emit(f"{first.code} - np.floor({first.code})", first.type)
        if function == "isEven":
            return self.emit(f"{first.code} % 2 == 0", "u1")
        if function not in _FUNCTIONS:
            raise Unknown(f"the function {function} of pseudo-code {self.text!r}")
        name, type = _FUNCTIONS[function]
        codes = [self.code(x) if x.type != "weak" else f"np.int32({x.code})" for x in arguments]
        if function == "not_a_number":
            codes.append("np.nan")
        if first.type == "bf16" and type is None:
            return self.convert(self.emit(f"{name}({', '.join(codes)})", "f32"), "bf16")
        return self.emit(f"{name}({', '.join(codes)})", type or first.type)


@functools.cache
def translate(text: str, inputs: tuple, constants: tuple = ()):
    """Translate pseudo-code.

    Args:
        text: the pseudo-code.
        inputs: (name, type) of each input, "u32" or "u64"; "VCC[lane]" and the like: bool for each lane.
        constants: (name, number) of fields that are known when the instruction is decoded.

    Returns:
        a function of the inputs in their order, which returns the written registers in the order of `outputs`;
        `outputs`: (name, type) of each, values as unsigned integers, or bools for "u1".

    Raises:
        Unknown: a part of the pseudo-code is not known.
    """
    translator = Translator(dict(inputs), dict(constants))
    translator.run(text)
    outputs, codes = [], []
    for name in translator.written:
        base = name.partition("[")[0]
        if base in ("D0", "D1", "SCC", "VCC", "EXEC", "PC", "SDST"):
            value = translator.variables[name]
            if value.type == "weak":
                value = translator.convert(value, "u32")
            if base == "SCC" or name.endswith("[lane]"):
                value = translator.truth(value)
            elif value.type == "bf16" or value.type in _FLOATS or value.type[0] == "i" or value.type == "u1":
                size = 32 if value.type == "u1" else _bits(value.type)
                value = translator.reinterpret(value, f"u{size}")
            outputs.append((name, value.type))
            codes.append(translator.code(value))
    arguments = ", ".join(_argument(name) for name, _ in inputs)
    body = [_rename(line) for line in translator.lines]
    source = f"def run({arguments}):\n" + "".join(f"    {line}\n" for line in body)
    source += f"    return ({', '.join(map(_rename, codes))},)\n"
    scope = {"np": np, "inf": np.inf, "nan": np.nan} | vars(arithmetic)
    exec(compile(source, "<pseudo-code>", "exec"), scope)
    return scope["run"], tuple(outputs)


def _argument(name):
    return name.replace("[lane]", "_lane")


def _rename(line):
    return re.sub(r"\b(\w+)\[lane\]", r"\1_lane", line)

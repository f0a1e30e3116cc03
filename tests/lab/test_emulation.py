"""Test the emulation of AMD GPUs: arithmetic, memory, kernels, and that mistakes are noticed."""

import importlib
from concurrent.futures import Future
from fractions import Fraction

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("tinygrad")
pytest.importorskip("elftools")
from liger_hw import cli  # noqa: E402
from liger_hw._triton import interpreting  # noqa: E402
from liger_hw.dispatch import OPS  # noqa: E402
from liger_hw.kernels import load_all  # noqa: E402
from liger_hw.testing import parity  # noqa: E402
from liger_lab.cases import training_cases  # noqa: E402
from liger_lab.levels import compile_cache, emulated, evidence  # noqa: E402
from liger_lab.levels.crosscompile import DEVICES  # noqa: E402
from liger_lab.levels.emulation import Fault, Unknown, arithmetic, executed_on, facts, launches  # noqa: E402
from liger_lab.levels.emulation.instructions import Decoder, Instruction, dpp_lanes  # noqa: E402
from liger_lab.levels.emulation.machine import EXEC, SCALARS, Arena, Lds, Waves  # noqa: E402
from liger_lab.levels.emulation.pseudocode import translate  # noqa: E402

pytestmark = pytest.mark.skipif(interpreting(), reason="compiles kernels, which the interpreter replaces")


# Arithmetic -----------------------------------------------------------------------------------------------------------


def nearest(exact: Fraction, dtype) -> float:
    """Round a rational number to `dtype`, to nearest, ties to even."""
    near = dtype(float(exact))
    candidates = [near, np.nextafter(near, dtype(np.inf)), np.nextafter(near, dtype(-np.inf))]
    unsigned = {2: np.uint16, 4: np.uint32}[near.itemsize]
    return min(candidates, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(unsigned)) & 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_fma_rounds_once(dtype):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(4000).astype(dtype) for _ in range(2))
    # addends that cancel the product, and addends of other sizes, where two roundings differ from one
    c = np.where(random.random(4000) < 0.5, -(a * b), (a * b) * dtype(2) ** random.integers(-14, 14, 4000)).astype(
        dtype
    )
    found = arithmetic.fma(a, b, c)
    for x, y, z, result in zip(a, b, c, found):
        assert result == nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), dtype)


def test_bf16_rounds_to_nearest_even():
    x = torch.randn(10_000).numpy()
    x[:4] = np.inf, -np.inf, 0.0, np.finfo(np.float32).max
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    assert np.array_equal(arithmetic.to_bf16(x), expected) and np.isnan(arithmetic.to_bf16(np.float32([np.nan])))[0]


U, V, W = (np.random.default_rng(seed).integers(0, 1 << 32, (2, 64), np.uint32) for seed in range(3))
FU, FV = (np.random.default_rng(seed).standard_normal((2, 64)).astype(np.float32) for seed in range(2))


def signed_24(x):
    """Return the lower 24 bits as signed numbers."""
    return (x << 8).view(np.int32) >> 8


@pytest.mark.parametrize(
    "family, name, inputs, expected",
    [
        ("cdna", "V_ADD_U32", (U, V), U + V),
        ("cdna", "V_LSHL_ADD_U32", (U, V, W), (U << (V & 31)) + W),
        ("cdna", "V_BFE_U32", (U, V, W), (U >> (V & 31)) & ((1 << (W & 31).astype(np.uint64)) - 1).astype(np.uint32)),
        ("cdna", "V_MAD_I32_I24", (U, V, W), signed_24(U) * signed_24(V) + W.view(np.int32)),
        ("rdna3", "V_ALIGNBIT_B32", (U, V, W), (((U.astype(np.uint64) << 32) | V) >> (W & 31)).astype(np.uint32)),
        ("rdna3", "V_MUL_HI_U32", (U, V), ((U.astype(np.uint64) * V) >> 32).astype(np.uint32)),
        ("rdna3", "V_CVT_I32_F32", (FU,), np.trunc(FU).astype(np.int32)),
        ("rdna4", "V_XOR3_B32", (U, V, W), U ^ V ^ W),
        ("rdna4", "V_MUL_F32", (FU, FV), FU * FV),
        ("rdna4", "V_CVT_F16_F32", (FU,), FU.astype(np.float16)),
    ],
)
def test_pseudocode_is_the_instruction(family, name, inputs, expected):
    codes = importlib.import_module(f"tinygrad.runtime.autogen.amd.{family}.str_pcode").PCODE
    text = next(text for op, text in codes.items() if op.name.removesuffix("_E32").removesuffix("_E64") == name)
    function, ((output, type),) = translate(text, tuple((f"S{i}", "u32") for i in range(len(inputs))))
    (found,) = function(*(x.view(np.uint32) for x in inputs))
    assert output == "D0" and type == f"u{8 * expected.itemsize}"
    assert np.array_equal(found, expected.view(found.dtype))


def test_pseudocode_of_branches_selects_by_lane():
    text = "if S0.u32 > 5U then\nD0.u32 = 1U\nelsif S0.u32 == 5U then\nD0.u32 = S0.u32 + 2U\nelse\nD0.u32 = 3U\nendif"
    function, _ = translate(text, (("S0", "u32"),))
    assert function(np.arange(4, 8, dtype=np.uint32))[0].tolist() == [3, 7, 1, 1]


def test_constants_of_16_bits_are_signed():
    function, _ = translate("D0.i32 = 32'I(signext(SIMM16.i16))", (), (("SIMM16", 0xE000),))
    assert function()[0].astype(np.int32) == -0x2000


def test_what_pseudocode_does_not_say_is_an_error():
    with pytest.raises(Unknown, match="the function wonder of pseudo-code"):
        translate("D0.u32 = wonder(S0.u32)", (("S0", "u32"),))


def test_an_unknown_instruction_is_named():
    decoder = Decoder("gfx942", Arena())
    with pytest.raises(Unknown, match="gfx942 .*DS_ADD_U32"):
        decoder.decode((0xD8000000).to_bytes(4, "little") + bytes(16))


def test_what_was_in_exec_is_saved():
    save = Decoder("gfx1100", Arena()).decode((0xBE802001).to_bytes(4, "little") + bytes(16))
    scalars = np.zeros((SCALARS, 2), np.uint32)
    scalars[1], scalars[EXEC] = 0xFF, 0xF0F0F0F0
    waves = Waves(np.zeros((256, 2, 32), np.uint32), scalars, np.zeros(2, bool), np.arange(2), 0)
    save.run(waves)
    assert save.name == "S_AND_SAVEEXEC_B32" and waves.scc.all()
    assert (waves.s[0] == 0xF0F0F0F0).all() and (waves.s[EXEC] == 0xF0).all()


def test_lanes_of_dpp():
    lanes, found = dpp_lanes(0x111, 32, cdna=False)  # row_shr:1
    assert lanes[5] == 4 and found[5] and not found[16]
    with pytest.raises(Unknown, match="0x142"):  # row_bcast15 is CDNA's
        dpp_lanes(0x142, 32, cdna=False)


def _waves(registers, active=None):
    """Return two waves of 64 lanes with `registers` at the front, in which the lanes `active` are active."""
    vectors, scalars = np.zeros((256, 2, 64), np.uint32), np.zeros((SCALARS, 2), np.uint32)
    vectors[: len(registers)] = registers
    bits = sum(1 << lane for lane in (range(64) if active is None else active))
    scalars[EXEC], scalars[EXEC + 1] = bits & 0xFFFFFFFF, bits >> 32
    return Waves(vectors, scalars, np.zeros(2, bool), np.arange(2), 0)


@pytest.mark.parametrize("code, rows", [(0x7E00B501, 32), (0x7E00B301, 16)], ids=["32", "16"])
@pytest.mark.parametrize("active", [None, [1, 17, 33, 49]], ids=["whole", "partial"])
def test_rows_of_lanes_are_swapped(code, rows, active):
    """v_permlane32_swap_b32 v0, v1 and v_permlane16_swap_b32: odd rows of v0 with even rows of v1, in active lanes."""
    before = np.arange(256, dtype=np.uint32).reshape(2, 2, 64)
    waves = _waves(before, active)
    swap = Decoder("gfx950", Arena()).decode(code.to_bytes(4, "little") + bytes(16))
    swap.run(waves)
    expected = before.copy()
    for lane in range(64) if active is None else active:
        if lane // rows % 2:
            expected[0, :, lane], expected[1, :, lane - rows] = before[1, :, lane - rows], before[0, :, lane]
    assert f"LANE{rows}" in swap.name and np.array_equal(waves.v[:2], expected)


def test_a_swap_with_an_inactive_lane_is_refused():
    swap = Decoder("gfx950", Arena()).decode((0x7E00B501).to_bytes(4, "little") + bytes(16))
    with pytest.raises(Unknown, match="an active and an inactive lane"):
        swap.run(_waves(U[None], [3]))


def test_a_truth_table_of_three_inputs():
    table = 0b01101010  # v_bitop3_b32 v3, v0, v1, v2 bitop3:0x6a
    code = bytes.fromhex("030534d200030a4c")
    waves = _waves(np.stack([U, V, W]))
    Decoder("gfx950", Arena()).decode(code + bytes(12)).run(waves)
    expected = np.zeros_like(U)
    for case in range(8):
        inputs = [x if case >> place & 1 else ~x for x, place in ((U, 2), (V, 1), (W, 0))]
        expected |= (table >> case & 1) * (inputs[0] & inputs[1] & inputs[2])
    assert np.array_equal(waves.v[3], expected)


def test_formats_are_registered_once():
    from tinygrad.renderer import amd

    decoder = Decoder("gfx1100", Arena())
    counts = []
    for code in (0xBE802001, 0xBE812001):  # s_and_saveexec_b32 s0, s1 and s1, s1
        decoder.decode(code.to_bytes(4, "little") + bytes(16))
        counts.append(len(amd._load_formats()["rdna3"]))
    assert counts[0] == counts[1]


def test_bf16_products_of_gfx90a_have_other_numbers():
    code = bytes.fromhex("0080e6d300050204")  # v_mfma_f32_32x32x8bf16_1k; on gfx942 a sparse product
    assert Decoder("gfx90a", Arena()).decode(code + bytes(12)).name == "V_MFMA_F32_32X32X8_BF16"


@pytest.mark.parametrize("code, shape", [("0080d4d300050204", "32X32X8I8"), ("0080d5d300050204", "16X16X16I8")])
def test_int8_products_of_gfx90a_have_numbers_of_fp16_products(code, shape):
    decoded = Decoder("gfx90a", Arena()).decode(bytes.fromhex(code) + bytes(12))
    assert decoded.name == f"V_MFMA_I32_{shape}"


# Memory ---------------------------------------------------------------------------------------------------------------


def test_bytes_of_no_tensor_are_forbidden():
    arena = Arena()
    address = arena.place(np.arange(10, dtype=np.uint8), 256, writable=True)
    read_only = arena.place(np.zeros(8, np.uint8), 256)
    assert arena.load(np.array([address + 2], np.uint64), 8).tolist() == [list(range(2, 10))]
    for at, size in ((address + 3, 8), (address - 1, 1), (address + 10, 1), (0, 4)):
        with pytest.raises(Fault, match="outside every tensor"):
            arena.load(np.array([at], np.uint64), size)
    with pytest.raises(Fault):
        arena.store(np.array([read_only], np.uint64), np.zeros((1, 4), np.uint8))
    with pytest.raises(Fault, match="of LDS"):
        Lds(2, 16, 0).load(np.array([0]), np.array([14]), 4)


def _lds(decoder, size):
    """Give a decoder LDS for two programs; return its bytes, by program."""
    decoder.lds = Lds(2, size, 0)
    return decoder.lds.bytes.reshape(2, size)


@pytest.mark.parametrize("code, dtype", [(0xD9C60008, np.uint16), (0xD9C40008, np.uint8)])
def test_a_transposed_read_gives_columns(code, dtype):
    """ds_read_b64_tr_b16 v[0:1], v1 offset:8: lane i of 16 gets column i of their rows of 16 values; tr_b8 as well."""
    decoder, rows = Decoder("gfx950", Arena()), 8 // np.dtype(dtype).itemsize
    values = _lds(decoder, 1024).view(dtype)
    read = decoder.decode(code.to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(12))
    addresses = np.broadcast_to(8 * np.arange(64, dtype=np.uint32)[::-1], (2, 64))  # rows of the last lanes come first
    waves = _waves(np.stack([addresses, addresses]))
    read.run(waves)
    found = waves.v[:2].transpose(1, 2, 0).copy().view(dtype)
    for program, lane, place in np.ndindex(2, 64, rows):
        column = lane & 15
        holder = (lane & ~15) + 16 // rows * place + column // rows  # the lane whose 8 bytes hold it
        at = (addresses[program, holder] + 8) // (8 // rows) + column % rows
        assert found[program, lane, place] == values[program, at]
    with pytest.raises(Unknown, match="inactive lanes"):
        read.run(_waves(np.stack([addresses, addresses]), [0, 1]))


def test_a_buffer_load_to_lds():
    """buffer_load_dwordx4 v0, s[8:11], 0 offen offset:16 lds: 16 bytes a lane from M0 on; zeros out of bounds."""
    arena = Arena()
    data = np.arange(1024, dtype=np.uint32).view(np.uint8)
    address = arena.place(data, 256)
    decoder = Decoder("gfx950", arena)
    lds = _lds(decoder, 2048)
    before = lds.copy()
    code = 0xE05D1010 | 0x80020000 << 32
    load = decoder.decode(code.to_bytes(8, "little") + bytes(12))
    active = [lane for lane in range(64) if lane != 5]
    offsets = np.broadcast_to(16 * np.arange(64, dtype=np.uint32)[::-1], (2, 64))
    waves = _waves(offsets[None], active)
    for register, value in ((8, address & 0xFFFFFFFF), (9, address >> 32), (10, 512), (124, 32)):
        waves.s[register] = value
    load.run(waves)
    for lane in range(64):
        place, source = 32 + 16 + 16 * lane, offsets[0, lane] + 16
        expected = data[source : source + 16] if source + 16 <= 512 else np.zeros(16, np.uint8)
        for program in range(2):
            kept = before[program, place : place + 16]
            assert (lds[program, place : place + 16] == (kept if lane == 5 else expected)).all()


def test_a_global_load_to_lds():
    """global_load_lds_dwordx4 v[0:1], off offset:16: 16 bytes a lane from M0 on; no register changes."""
    arena = Arena()
    data = np.arange(1024, dtype=np.uint32).view(np.uint8)
    address = arena.place(data, 256)
    decoder = Decoder("gfx950", arena)
    lds = _lds(decoder, 2048)
    expected = lds.copy()
    load = decoder.decode((0xDDF48010 | 0x7F0000 << 32).to_bytes(8, "little") + bytes(12))
    places = address + 16 * np.arange(64, dtype=np.uint64)[::-1]
    halves = np.stack([places & np.uint64(0xFFFFFFFF), places >> np.uint64(32)]).astype(np.uint32)
    waves = _waves(np.broadcast_to(halves[:, None], (2, 2, 64)), range(1, 64))
    before = waves.v.copy()
    waves.s[124] = 32
    load.run(waves)
    for lane in range(1, 64):
        start = 16 * (63 - lane) + 16
        expected[:, 48 + 16 * lane : 64 + 16 * lane] = data[start : start + 16]
    assert (lds == expected).all() and (waves.v == before).all()


# Kernels --------------------------------------------------------------------------------------------------------------


def sample(op, dtype=torch.bfloat16, number=0):
    load_all()
    torch.manual_seed(0)
    return list(training_cases(op, dtype))[number]


KERNELS = [  # elementwise, reductions, matrix instructions; `liger-hw emulate` runs all
    (op, torch.bfloat16, arch) for op in ("swiglu", "softmax", "grouped_mm") for arch in ("gfx1100", "gfx1201")
]
KERNELS += [  # upper halves of registers; a constant of fp16 in fp32 arithmetic; scalar loads of 16 bits
    ("poly_norm", torch.bfloat16, "gfx1100"), ("poly_norm", torch.float16, "gfx942"),
    ("poly_norm", torch.bfloat16, "gfx1201"),
    *(("int2_matmul", torch.int8, arch) for arch in ("gfx90a", "gfx950", "gfx1100")),
]  # fmt: skip


@pytest.mark.parametrize("op, dtype, arch", KERNELS)
def test_a_kernel_computes(op, dtype, arch):
    result = emulated.execute(op, *sample(op, dtype), arch)
    assert not result["error"] and result["launches"] and result["instructions"] > 100


def test_waves_in_another_order_compute_the_same_bits():
    inputs, options = sample("rms_norm", number=1)
    outputs = []
    for reverse in (False, True):
        with executed_on(DEVICES["gfx942"], reverse):
            outputs.append(parity.run(OPS["rms_norm"], inputs, options))
    assert all(torch.equal(a, b) for a, b in zip(*outputs))


@pytest.mark.parametrize("ascending", [True, False])
def test_a_loop_to_lower_addresses_loses_stores_where_bounds_are_checked_without_wrapping(ascending, monkeypatch):
    torch.manual_seed(0)
    load_all()
    device = DEVICES["gfx1201"]
    assert device.ascending_only and not DEVICES["gfx1100"].ascending_only
    if not ascending:
        monkeypatch.setitem(vars(device), "ascending_only", False)
    logits, target = torch.randn(2, 10000, requires_grad=True), torch.tensor([5, 9999])
    result = emulated.execute("cross_entropy", (logits, target), {"in_place": True, "softcap": 3.0}, "gfx1201")
    assert bool(result["error"]) != ascending


def test_scratch_is_reached_by_buffer_instructions():
    """On gfx90a a kernel that spills addresses its scratch by a descriptor in registers."""
    torch.manual_seed(0)
    sizes = (2, 16, 21), (336, 288), (288,), (1,), (1,), (1,)
    inputs = tuple(torch.randn(size, requires_grad=True) for size in sizes)
    assert not emulated.execute("mhc_coefficients", inputs, {}, "gfx90a")["error"]
    with executed_on(DEVICES["gfx90a"]) as executed:
        parity.run(OPS["mhc_coefficients"], inputs, {})
    assert any(launches.code_of(one.launch).scratch for one in executed)


@pytest.mark.parametrize("name, modifiers, expected", [("V_S_EXP_F32", 0, 4.0), ("V_S_EXP_F32", 1, 0.25)])
def test_scalar_forms_of_vector_instructions_have_modifiers(name, modifiers, expected):
    # v_s_exp_f32 s0, s1 in VOP3: opcode 0x280 in bits 16 to 25, the source in 32 to 40, its sign in 61
    code = 0xD6800000 | 1 << 32 | modifiers << 61
    instruction = Decoder("gfx1201", Arena()).decode(code.to_bytes(8, "little") + bytes(12))
    scalars = np.zeros((SCALARS, 1), np.uint32)
    scalars[1] = np.float32(2.0).view(np.uint32)
    waves = Waves(np.zeros((256, 1, 32), np.uint32), scalars, np.zeros(1, bool), np.arange(1), 0)
    instruction.run(waves)
    assert instruction.name == name and waves.s[0].view(np.float32)[0] == expected


class Inline:
    """A pool of this process."""

    def __init__(self, jobs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


def test_a_planted_miscompilation_fails_the_command(monkeypatch, tmp_path, capsys):
    command = ["emulate", "--few", "--archs", "gfx1100", "--ops", "swiglu", "--report", str(tmp_path)]
    monkeypatch.setattr(compile_cache, "processes", Inline)
    assert cli.main(command) in (0, None)
    runs, cells = evidence.read([tmp_path / "emulated.json"])
    assert {(cell.op, cell.level, cell.failed) for cell in cells} == {("swiglu", "emulated", 0)}
    assert {facts["level"] for facts in runs.values()} == {"emulated"}

    with executed_on(DEVICES["gfx1100"]) as executed:
        parity.run(OPS["swiglu"], *sample("swiglu"))
    key, real = executed[0].launch.key, launches.code_of
    offset, exponential = next((at, i) for at, i in executed[0].run.visited.items() if i.name == "V_EXP_F32")

    def planted(launch):
        code = real(launch)
        return emulated.removed(code, offset, exponential.size) if launch.key == key else code

    monkeypatch.setattr(launches, "code_of", planted)
    assert cli.main(command) == 1
    assert "swiglu on gfx1100 in" in capsys.readouterr().out
    assert any(cell.failed for cell in evidence.read([tmp_path / "emulated.json"])[1])


def test_an_architecture_without_a_decoder_is_refused(tmp_path, capsys):
    assert cli.main(["emulate", "--archs", "gfx12ff", "--report", str(tmp_path)]) == 2
    assert "unknown architecture 'gfx12ff'" in (message := capsys.readouterr().err)
    assert "The emulation executes: gfx942, gfx90a" in message


def test_removed_instructions_are_noticed():
    control = emulated.removals("swiglu", "gfx942", 8)
    changed = control["removed"] - control["same bits"]
    assert control["removed"] == 8 and changed and control["noticed"] >= changed / 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert control["removed"] == control["noticed"] + control["same bits"] + sum(control["missed"].values())


def test_facts_of_a_launch():
    ((inputs, options),) = emulated._wide_sample("rms_norm", few=True)
    result = emulated.execute("rms_norm", inputs, options, "gfx942", traced=True)
    forward = next(facts for facts in result["waves"] if facts["kernel"] == "rms_norm_forward")
    assert not result["error"] and forward["elements"] == 16 * 8192
    assert forward["widths"] == {16: 1.0} and 10 < forward["per element"] < 40 and forward["wait"] > 10
    assert forward["banks"] == 1.0 and 0 < forward["lds"] < 1 and 0 < forward["occupancy"] <= 1


def test_the_distance_of_a_wait():
    load, store, add = (Instruction(name, 4) for name in ("GLOBAL_LOAD_DWORD", "GLOBAL_STORE_DWORD", "V_ADD_F32"))
    trace = [load, add, load, add, add, Instruction("S_WAITCNT", 4, wait=1), add, store,
             Instruction("S_WAITCNT", 4, wait=0)]  # fmt: skip
    assert facts.wait_distances(trace, stores_count=True) == [5, 6]
    assert facts.wait_distances(trace[:-1], stores_count=True) == [5]


def test_conflicts_of_banks():
    lds = Lds(2, 4096, 0, count_banks=True)
    programs = np.repeat(np.arange(2), 32)
    lds.load(programs, np.tile(np.arange(32) * 4, 2), 4)
    assert (lds.passes, lds.least) == (1, 1)
    lds.load(programs, np.tile(np.arange(32) * 64, 2), 4)  # every 16th word: two banks
    assert (lds.passes, lds.least) == (17, 2)

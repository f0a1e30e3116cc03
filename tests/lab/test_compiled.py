"""Read, judge and keep results of compilation, of assembly with known answers."""

import dataclasses
import json
import struct

import pytest

from liger_lab.levels import assembly, compile_cache, compiled, crosscompile, resources
from liger_lab.levels.assembly import Access
from liger_lab.levels.crosscompile import DEVICES, Launch, Resources
from liger_lab.levels.occupancy import occupancy

GOOD = Resources(64, 0, 0, 1024, accesses=(Access("k.py:1:1", "load", "X", 4096, 4096, 2, 1, {16: 2}),))


def launched(arch="sm90", aligned=True, constants=None, stride_known=True, **options):
    config = {"meta": {"COLS": 4096}, "num_warps": 8, "num_stages": 1, "programs": 1, "source": "heuristic"}
    signature = {"X": "*bf16", "x_stride": "i32"}
    attributes = {0: [["tt.divisibility", 16]]} | ({1: [["tt.divisibility", 16]]} if stride_known else {})
    constants = {"cols": 4096} if constants is None else constants
    options = {"num_warps": 8} | options
    return Launch("m", "k", arch, signature, constants, attributes, options, config, aligned, ("X",))


def changed(**facts):
    return dataclasses.replace(GOOD, **facts)


def narrow(pointer="X", width=2, elements=4096):
    return changed(
        accesses=(*GOOD.accesses, Access("k.py:2:1", "store", pointer, elements, elements, 2, 1, {width: 16}))
    )


def test_good_code_misses_no_gate():
    assert compiled.judge(launched(), GOOD) == {}


@pytest.mark.parametrize(("gate", "found"), [
    ("builds", "CompilationError: no"),
    ("fits", changed(shared=300_000)),
    ("spills", changed(spills=4, scratch=16)),
    ("spills", changed(scratch=16)),
    ("widths", narrow()),
    ("widths", narrow(width=8)),
    ("atomics", changed(atomics=1)),
    ("atomics", changed(loops=1)),
    ("fp64", changed(doubles=2)),
    ("calls", changed(calls=1)),
    ("calls", changed(library=["__nv_tanhf"])),
    ("races", changed(overwritten=1)),
])  # fmt: skip
def test_each_gate_stops_what_it_is_for(gate, found):
    assert list(compiled.judge(launched(), found)) == [gate]


LOOP = """
%x = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x128x64xbf16, #shared, #smem, mutable>
%first = ttg.memdesc_index %x[%c0] : !ttg.memdesc<{buffers}x128x64xbf16>
%second = ttg.memdesc_index %x[%c1] : !ttg.memdesc<{buffers}x128x64xbf16>
scf.for %i = %a to %b {{
  %tile = ttg.memdesc_index %x[%at] : !ttg.memdesc<{buffers}x128x64xbf16>
  {products}
  %3 = ttng.warp_group_dot_wait %2 {{pendings = {pending} : i32}} : tensor<128x32xf32, #mma>
  scf.yield %3
}}
%4 = ttng.warp_group_dot_wait %3 {{pendings = 0 : i32}} : tensor<128x32xf32, #mma>
"""
PRODUCT = "%2 = ttng.warp_group_dot %tile, %phi, %1 {inputPrecision = 0 : i32, isAsync = true} : tensor<128x32xf32>\n"


@pytest.mark.parametrize(("buffers", "products", "pending", "found"), [
    (3, 1, 1, 0), (2, 1, 1, 1), (2, 1, 0, 0), (2, 2, 2, 1), (3, 4, 3, 0),
])  # fmt: skip
def test_tiles_that_are_overwritten_too_early(buffers, products, pending, found):
    """Two copies ahead and a product that still runs need three buffers."""
    text = LOOP.format(buffers=buffers, products=PRODUCT * products, pending=pending)
    assert assembly.overwritten_tiles(text) == found


@pytest.mark.parametrize(("lost", "missed"), [({16: 2}, []), ({16: 2, 4: 1}, ["widths"]), ({}, ["widths"])])
def test_an_access_whose_place_was_lost_is_the_narrowest_of_those(lost, missed):
    """gfx1100 prints all loads of cross entropy's backward of 256,000 columns at line 0."""
    gone = dataclasses.replace(GOOD.accesses[0], widths={})
    elsewhere = Access("?", "load", "?", 1, 1, 1, 0, lost)
    assert list(compiled.judge(launched(), changed(accesses=(gone, elsewhere)))) == missed


def test_too_many_warps_of_64_lanes_do_not_fit():
    assert "fits" in compiled.judge(launched("gfx942", num_warps=32), GOOD)
    assert "fits" not in compiled.judge(launched("gfx1100", num_warps=32), GOOD)
    both = compiled.judge(launched("gfx942", num_warps=32), changed(shared=300_000))["fits"]
    assert both == "32 warps, allowed 16; 300000 bytes of shared memory, allowed 65536"


def test_what_is_allowed():
    assert not compiled.judge(launched(), narrow(elements=16)), "a tile that is not the kernel's largest"
    assert not compiled.judge(launched("gfx942"), changed(spills=4)), "scalars kept in a vector register's lanes"


def test_whose_rows_must_be_read_in_whole_vectors():
    finds_vectors = {"ALIGNED": False, "cols": 50257}
    odd = launched(aligned=False, constants=finds_vectors, stride_known=False)
    assert compiled.judge(odd, narrow()), "the rows of a vocabulary of any size"
    assert not compiled.judge(odd, narrow("WEIGHT")), "one vector for all rows, read out of step"
    assert compiled.judge(launched(), narrow()), "a norm of a model's width"
    assert not compiled.judge(launched(aligned=False, constants={"cols": 1001}, stride_known=False), narrow())
    assert not compiled.judge(launched(constants={"cols": 1}), narrow()), "a row that is too short for a vector"
    assert not compiled.judge(launched(constants={}, stride_known=False), narrow()), "rows that may begin anywhere"
    assert not compiled.judge(launched(aligned=False, constants={"rotary_dim": 20}), narrow()), "halves that do"
    assert compiled.judge(launched(aligned=False, constants={}), narrow()), "one long row of any size"


TTIR = """
#loc = loc("/x/liger_hw/kernels/norms/rms_norm.py":10:1)
#loc1 = loc("/x/liger_hw/kernels/norms/rms_norm.py":12:9)
#loc2 = loc("/x/liger_hw/kernels/vocabulary/cross_entropy/kernels.py":40:13)
#loc3 = loc("x"(#loc2))
#loc4 = loc(callsite(#loc3 at #loc1))
module {
  tt.func public @k(%X: !tt.ptr<bf16> {tt.divisibility = 16 : i32, tt.pointer_range = 32 : i32} loc("X"(#loc)), %Y: !tt.ptr<f32> loc("Y"(#loc)), %n: i32 loc("n"(#loc))) attributes {noinline = false} {
    %0 = tt.load %Y : !tt.ptr<f32> loc(#loc1)
    %1 = scf.for %i = %a to %n step %b iter_args(%s = %c) -> (tensor<8x512xf32>)  : i32 {
      %2 = tt.splat %X : !tt.ptr<bf16> -> tensor<8x512x!tt.ptr<bf16>> loc(#loc1)
      %3 = tt.addptr %2, %o : tensor<8x512x!tt.ptr<bf16>>, tensor<8x512xi32> loc(#loc1)
      %4 = tt.load %3, %m, %z : tensor<8x512x!tt.ptr<bf16>> loc(#loc4)
      %5 = "tt.reduce"(%4) <{axis = 1 : i32}> ({
      ^bb0(%p: f32 loc(unknown), %q: f32 loc(unknown)):
        tt.reduce.return %p : f32 loc(#loc1)
      }) : (tensor<8x512xf32>) -> tensor<8xf32> loc(#loc1)
      scf.yield %s : tensor<8x512xf32> loc(#loc1)
    } loc(#loc1)
    tt.store %3, %1, %m : tensor<8x512x!tt.ptr<bf16>> loc(#loc1)
    %t = tt.extern_elementwise %1 {libname = "", libpath = "", pure = true, symbol = "__nv_tanhf"} : (tensor<4xf32>) -> tensor<4xf32> loc(#loc1)
    tt.return loc(#loc1)
  } loc(#loc)
} loc(#loc)
"""  # noqa: E501
PTX = """
	.loc	1 12 9                          // rms_norm.py:12:9
	// begin inline asm
	.loc	1 12 9                          // rms_norm.py:12:9
	mov.u32 %r1, 0x0;
	.loc	1 13 9                          // rms_norm.py:13:9
	@%p1 ld.global.L1::evict_last.b32 { %r1 }, [ %rd1 + 0 ];
	// end inline asm
	.loc	2 40 13, function_name $L__info_string0, inlined_at 1 12 9 // kernels.py:40:13
	cp.async.cg.shared.global [ %r25 + 0 ], [ %rd11 + 0 ], 0x10, %r28;
	@%p2 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd2 + 0 ];
	.loc	1 12 9
	st.global.v2.b32 [ %rd3 + 0 ], { %r2, %r3 };
	.file	1 "/x/liger_hw/kernels/norms/rms_norm.py"
	.file	2 "/x/liger_hw/kernels/vocabulary/cross_entropy/kernels.py"
"""
AMD = """
	.file	1 "/x/liger_hw/kernels/norms" "rms_norm.py"
	.file	2 "/x/liger_hw/kernels/vocabulary/cross_entropy" "kernels.py"
	.loc	1 12 9
	global_load_dword v1, v0, s[2:3]
	.loc	2 40 13 is_stmt 0
	buffer_load_dwordx4 v[4:7], v0, s[8:11], 0 offen
	buffer_load_b128 v[4:7], v0, s[8:11], 0 offen
	.loc	1 12 9
	buffer_store_short v1, v0, s[8:11], 0 offen
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	.loc	1 0 5
	global_store_d16_hi_b16 v0, v1, off
"""


def test_accesses_are_found_with_tile_pointer_loop_and_place():
    scalar, load, store = assembly.accesses_of(TTIR)
    assert scalar == Access("rms_norm.py:12:9", "load", "Y", 1, 1, 4, 0, {})
    assert load == Access("cross_entropy/kernels.py:40:13", "load", "X", 4096, 512, 2, 1, {})
    assert store == Access("rms_norm.py:12:9", "store", "X", 4096, 512, 2, 0, {})
    assert assembly.library_calls(TTIR) == ["__nv_tanhf"]


def test_a_line_in_two_loops_is_one_access_that_says_so():
    start, end = TTIR.index("    %1 = scf.for"), TTIR.index("    tt.store")
    twice = TTIR[:end] + TTIR[start:end] + TTIR[end:]
    assert [access.loops for access in assembly.accesses_of(twice)] == [0, 2, 0]


@pytest.mark.parametrize(("text", "instruction", "widths"), [
    (PTX, assembly.ptx_access, [{4: 1}, {16: 2}, {8: 1}]),
    (AMD, assembly.amd_access, [{4: 1}, {16: 2}, {2: 1}]),
], ids=["ptx", "amd"])  # fmt: skip
def test_instructions_are_found_at_their_place(text, instruction, widths):
    found = assembly.with_widths(assembly.accesses_of(TTIR), text, instruction)
    assert [access.widths for access in found[:3]] == widths
    assert [(access.at, access.kind) for access in found[3:]] == ([("?", "store")] if text is AMD else [])


def test_an_instruction_without_a_column_belongs_to_its_line():
    """LLVM gives column 0 to instructions whose places it merged."""
    access = Access("k.py:1:9", "load", "X", 64, 64, 2, 0)
    text = '.file 1 "/x/kernels" "k.py"\n.loc 1 1 0\n\tbuffer_load_b128 v0\n.loc 1 1 9\n\tbuffer_load_u16 v0\n'
    assert [found.widths for found in assembly.with_widths([access], text, assembly.amd_access)] == [{16: 1, 2: 1}]
    other = dataclasses.replace(access, at="k.py:1:5", pointer="Y")
    found = assembly.with_widths([access, other], text, assembly.amd_access)
    assert found[0].widths == {2: 1} and found[2].at == "?", "of two on a line it may be either's"


def test_an_access_printed_under_another_has_the_narrowest_of_its_pointer():
    accesses = [
        Access(f"k.py:{row}:1", "load", pointer, 64, 64, 2, 0) for row, pointer in [(1, "X"), (2, "X"), (3, "Y")]
    ]
    text = '.file 1 "/x/kernels" "k.py"\n.loc 1 1 1\n\tbuffer_load_b128 v0\n\tbuffer_load_b64 v0\n'
    found = assembly.with_widths(accesses, text, assembly.amd_access)
    assert [access.widths for access in found] == [{16: 1, 8: 1}, {8: 0}, {8: 0}]
    larger = [
        dataclasses.replace(accesses[0], elements=16),
        accesses[1],
        dataclasses.replace(accesses[1], at="k.py:3:1"),
    ]
    text = text.replace(".loc 1 1 1", ".loc 1 1 1\n\tbuffer_load_b32 v0\n.loc 1 2 1")
    found = assembly.with_widths(larger, text, assembly.amd_access)
    assert [access.widths for access in found] == [{4: 1}, {16: 1, 8: 1}, {8: 0}], "not of a smaller tile"
    found = assembly.with_widths(larger[:2], text.replace(".loc 1 2 1", ""), assembly.amd_access)
    assert found[1].widths == {16: 0}, "what a smaller tile cannot be"
    assert assembly.with_widths(accesses[:1], "", assembly.amd_access)[0].widest == 0


def test_a_small_tile_need_not_fill_more_than_a_warp():
    def wanted(elements, row, itemsize, warp_size):
        return assembly.expected_width(Access("", "load", "X", elements, row, itemsize, 1), warp_size)

    assert wanted(4096, 4096, 2, 32) == 16
    assert wanted(256, 256, 2, 32) == 16
    assert wanted(256, 256, 2, 64) == 8
    assert wanted(4096, 4, 2, 32) == 8, "four columns"
    assert wanted(16, 16, 4, 32) == 4


def test_the_usage_of_a_cubin():
    """A section table with .nv.info of one kernel: 40 registers, 16 bytes of stack."""
    info = (
        struct.pack("<BBHII", 4, 0x2F, 8, 1, 40)
        + struct.pack("<BBHII", 4, 0x11, 8, 1, 16)
        + struct.pack("<BBH", 3, 1, 7)
    )
    names = b"\0.shstrtab\0.nv.info\0"
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64 + len(info) + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 1)
    table = b"".join(
        struct.pack("<IIQQQQ", name, 0, 0, 0, offset, size).ljust(64, b"\0")
        for name, offset, size in [(0, 0, 0), (1, 64 + len(info), len(names)), (11, 64, len(info))]
    )
    assert assembly.cubin_usage(bytes(header) + info + names + table) == (40, 16)


@pytest.mark.parametrize(("arch", "registers", "shared", "warps", "programs", "limit"), [
    # CUDA's occupancy calculator
    ("sm90", 64, 0, 8, 4, "registers"),
    ("sm90", 32, 0, 8, 8, "warps"),
    ("sm90", 37, 0, 16, 3, "registers"),
    ("sm90", 32, 100 * 1024, 4, 2, "shared"),
    ("sm86", 40, 0, 32, 1, "warps"),
    ("sm86", 40, 0, 16, 3, "warps"),
    ("sm89", 32, 32 * 1024, 4, 3, "shared"),
    ("sm86", 16, 0, 1, 16, "programs"),
    # LLVM's; the table of waves in its documentation
    ("gfx942", 64, 0, 4, 8, "warps"),
    ("gfx942", 72, 0, 4, 7, "registers"),
    ("gfx942", 128, 0, 16, 1, "registers"),
    ("gfx942", 64, 33 * 1024, 4, 1, "shared"),
    ("gfx950", 64, 33 * 1024, 4, 4, "shared"),
    ("gfx1100", 96, 0, 8, 8, "warps"),
    ("gfx1100", 120, 0, 8, 6, "registers"),
    ("gfx1102", 96, 0, 8, 5, "registers"),
])  # fmt: skip
def test_occupancy(arch, registers, shared, warps, programs, limit):
    found = occupancy(DEVICES[arch].core, registers, shared, warps)
    assert (found.programs, found.limit) == (programs, limit)
    assert 0 < found.share <= 1


def test_every_architecture_of_the_matrix_has_a_compiler_and_limits():
    assert set(compiled.ARCHS) <= set(DEVICES) and all(device.core for device in DEVICES.values())


def test_results_are_kept(tmp_path):
    cache = compile_cache.Cache(tmp_path)
    cache.add("a", GOOD)
    cache.add("b", "CompilationError: no")
    again = compile_cache.Cache(tmp_path)
    assert again.known["b"] == "CompilationError: no"
    assert compiled.judge(launched(), again.known["a"]) == {} and again.known["a"].registers == 64


def test_a_line_cut_short_costs_that_line(tmp_path):
    cache = compile_cache.Cache(tmp_path)
    cache.add("a", GOOD)
    cache.file.write_text(cache.file.read_text() + cache.file.read_text()[:40])
    assert set(compile_cache.Cache(tmp_path).known) == {"a"}


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = compile_cache.Cache(tmp_path / "file" / "folder")
    cache.add("a", GOOD)
    assert cache.known["a"] is GOOD and "not kept" in caplog.text


def test_only_what_is_used_is_kept(tmp_path):
    cache = compile_cache.Cache(tmp_path)
    for key in "abcd":
        cache.add(key, GOOD)
    cache.keep({"a", "b", "c"})
    assert set(compile_cache.Cache(tmp_path).known) == set("abcd"), "a quarter is not worth it"
    cache.keep({"a"})
    assert set(compile_cache.Cache(tmp_path).known) == {"a"}


def test_a_cache_that_is_too_large_says_so(tmp_path, monkeypatch, caplog):
    cache = compile_cache.Cache(tmp_path)
    cache.add("a", GOOD)
    monkeypatch.setattr(compile_cache, "LARGEST_FILE", cache.file.stat().st_size - 1)
    assert not compile_cache.Cache(tmp_path).known and "not used: it has" in caplog.text


def test_results_of_other_code_are_forgotten(tmp_path, monkeypatch):
    compile_cache.Cache(tmp_path).add("a", GOOD)
    monkeypatch.setattr(crosscompile, "reader", lambda: ("3.9.0", "another"))
    assert not compile_cache.Cache(tmp_path).known


def rows():
    use = compiled.Use(launched(), "cross_entropy", "bf16", False, "model", ["8192x32000"])
    return [compiled.record(use, GOOD), compiled.record(use, narrow()), compiled.record(use, "CompilationError: </b>")]


def test_records_are_plain_data_and_say_what_was_missed():
    good, bad, broken = json.loads(json.dumps(rows()))
    assert good["passed"] and not bad["passed"] and not broken["passed"]
    assert good["backend"] == "nvidia:sm90" and good["occupancy"]["programs"] == 4
    assert "2 bytes, needed: at least 16" in bad["missed"]["widths"] and not bad["gates"]["widths"]
    (cell,) = compiled.cells(rows(), "run")
    assert (cell.op, cell.backend, cell.passed, cell.failed) == ("cross_entropy", "nvidia:sm90", 1, 2)


def test_tables_and_page_show_what_was_missed(tmp_path):
    about = {"versions": {"triton": "3.9.0"}, "date": "today", "commit": "c", "command": "liger-hw compile"}
    assert "2 of 3 FAIL" in resources.show(rows())
    resources.write(rows(), about | {"commit": None}, tmp_path / "compiled.html")  # installed, not checked out
    page = resources.write(rows(), about, tmp_path / "compiled.html").read_text()
    assert "2 of 3 miss a gate" in page and 'data-op="cross_entropy"' in page and "</b>" not in page
    assert "http" not in page.replace("http-equiv", "")

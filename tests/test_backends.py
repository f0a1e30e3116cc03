import contextlib
import functools
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from liger_hw import backends, use_backend
from liger_hw.backends import VENDORS, amd, intel, nvidia
from liger_hw.backends.device import Device

KiB, MiB = 1024, 1024 * 1024
GPU = torch.device("cuda", 0)
EVERY = [device for vendor in VENDORS.values() for device in vendor.ARCHS.values()]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """As in a fresh process: no device was described and LIGER_HW_BACKEND was not read."""
    monkeypatch.setattr(backends, "_devices", {})
    monkeypatch.setattr(backends, "_forced", backends._UNREAD)
    monkeypatch.setattr(backends, "_variable", functools.cache(backends._variable.__wrapped__))
    monkeypatch.delenv("LIGER_HW_BACKEND", raising=False)


def cuda(monkeypatch, hip=None, **facts):
    """torch.cuda describes one device with these facts."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**facts))


def an_nvidia(monkeypatch, major, minor, **facts):
    defaults = {
        "name": "NVIDIA H200", "warp_size": 32, "multi_processor_count": 132, "L2_cache_size": 60 * MiB,
        "shared_memory_per_block_optin": 232448, "max_threads_per_multi_processor": 2048,
    }  # fmt: skip
    cuda(monkeypatch, major=major, minor=minor, **defaults | facts)


def an_amd(monkeypatch, arch, warp_size, cores, **facts):
    defaults = {"name": "AMD Instinct MI300X", "L2_cache_size": 4 * MiB}
    cuda(monkeypatch, "7.1", gcnArchName=arch, warp_size=warp_size, multi_processor_count=cores, **defaults | facts)


def an_intel(monkeypatch, arch, **facts):
    defaults = {
        "name": "Intel(R) Arc(TM) B580", "sub_group_sizes": [16, 32], "gpu_subslice_count": 20,
        "local_mem_size": 128 * KiB, "max_work_group_size": 1024, "last_level_cache_size": 18 * MiB,
        "max_num_sub_groups": 64, "architecture": 0,
    }  # fmt: skip
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(**defaults | facts))
    monkeypatch.setattr(intel, "_driver_arch", lambda device: arch)


@pytest.mark.parametrize("device", EVERY, ids=lambda device: f"{device.vendor}-{device.arch}")
def test_facts_are_possible(device):
    assert device.warp_size in (16, 32, 64)
    assert device.max_warps * device.warp_size == device.max_threads <= device.core_threads
    assert 64 * KiB <= device.shared_memory <= 256 * KiB
    assert 64 <= device.registers <= 256 and device.num_cores > 0 and device.l2 > 0 and device.bandwidth > 0
    assert device.backends == (f"{device.vendor}:{device.arch}", device.vendor, "triton", "reference")


def test_devices_are_compared_by_identity():
    """One value per torch device is hashed on every launch."""
    assert nvidia.ARCHS["sm90"].with_facts(name="x") != nvidia.ARCHS["sm90"].with_facts(name="x")


def test_with_facts_keeps_facts_unknown_to_a_driver():
    known = Device("intel", "pvc", 32, 64, 128 * KiB, l2=204 * MiB)
    found = known.with_facts(num_cores=56, l2=0, name=None)
    assert (found.num_cores, found.l2, found.name) == (56, 204 * MiB, "")


def test_an_nvidia_gpu(monkeypatch):
    an_nvidia(monkeypatch, 9, 0)
    found = backends.detected(GPU)
    assert (found.vendor, found.arch, found.name) == ("nvidia", "sm90", "NVIDIA H200")
    assert (found.shared_memory, found.l2, found.num_cores) == (232448, 60 * MiB, 132)
    assert backends.detected(GPU) is found


@pytest.mark.parametrize(
    "name, arch, warp_size, registers",
    [("gfx942:sramecc+:xnack-", "gfx942", 64, 128), ("gfx90a:sramecc+:xnack-", "gfx90a", 64, 128),
     ("gfx1100", "gfx1100", 32, 192), ("gfx1201", "gfx1201", 32, 192)],
)  # fmt: skip
def test_an_amd_gpu(monkeypatch, name, arch, warp_size, registers):
    an_amd(monkeypatch, name, warp_size, 304)
    found = backends.detected(GPU)
    assert (found.vendor, found.arch, found.warp_size, found.num_cores) == ("amd", arch, warp_size, 304)
    assert found.registers == registers and found.max_warps == 1024 // warp_size
    assert found.backends[0] == f"amd:{arch}"


XPU = torch.device("xpu", 0)


def test_an_intel_gpu(monkeypatch):
    an_intel(monkeypatch, "bmg")
    found = backends.detected(XPU)
    assert (found.vendor, found.arch, found.warp_size, found.num_cores) == ("intel", "bmg", 32, 20)
    assert (found.max_warps, found.warp_sizes, found.shared_memory) == (32, (16, 32), 128 * KiB)
    assert found.launch_options == {"grf_mode": "default", "warp_size": 32}


def test_xe_hpg_runs_sub_groups_of_16(monkeypatch):
    """Of 32, each lane would have 32 registers."""
    an_intel(monkeypatch, "dg2", sub_group_sizes=[8, 16, 32], local_mem_size=64 * KiB, max_num_sub_groups=128)
    found = backends.detected(XPU)
    assert (found.warp_size, found.max_threads, found.registers, found.shared_memory) == (16, 512, 64, 64 * KiB)
    assert found.launch_options["warp_size"] == 16 and found.warp_sizes == (8, 16, 32)


def test_intel_sub_groups_of_16_only(monkeypatch):
    """The compiler has to be told: it asks for 32 otherwise, and refuses that."""
    an_intel(monkeypatch, "lnl", sub_group_sizes=[8, 16], max_work_group_size=512)
    found = backends.detected(XPU)
    assert (found.warp_size, found.max_threads, found.max_warps) == (16, 512, 32)
    assert found.launch_options == {"grf_mode": "default", "warp_size": 16}


def test_intel_limits_on_the_groups_of_a_work_group(monkeypatch):
    an_intel(monkeypatch, "bmg", max_num_sub_groups=16)
    assert backends.detected(XPU).max_warps == 16


@pytest.mark.parametrize(
    "number, arch",
    [  # values of SYCL's list of architectures
        (0x000000030F000700, "pvc"), (0x000000030F400700, "pvc"), (0x000000030DC00800, "dg2"),
        (0x000000030E000500, "dg2"), (0x0000000500400400, "bmg"), (0x0000000500800000, "bmg"),
        (0x0000000501000400, "lnl"), (0x0000000311C00400, "mtl"), (0x0000000780000400, "ptl_h"),
    ],
)  # fmt: skip
def test_torch_numbers_the_architecture(monkeypatch, number, arch):
    an_intel(monkeypatch, "asked in vain", architecture=number)
    assert backends.detected(XPU).arch == arch


def test_intel_names_its_architecture_in_a_dict(monkeypatch):
    runtime = pytest.importorskip("triton").runtime
    target = SimpleNamespace(arch={"arch": "pvc", "has_subgroup_2d_block_io": True})
    active = SimpleNamespace(get_current_target=lambda: target)
    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.xpu, "device", lambda device: contextlib.nullcontext())
    assert intel._driver_arch(XPU) == "pvc"
    target.arch = {}
    assert intel._driver_arch(XPU) == "unknown"
    target.arch = "not a dict"
    assert intel._driver_arch(XPU) == "unknown"


def test_intel_without_an_active_driver(monkeypatch):
    """`liger-hw info` still shows the device."""

    class Driver:
        @property
        def active(self):
            raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(pytest.importorskip("triton").runtime, "driver", Driver())
    monkeypatch.setattr(torch.xpu, "device", lambda device: contextlib.nullcontext())
    assert intel._driver_arch(XPU) == "unknown"


@pytest.mark.parametrize(
    "device, num_warps, knobs, words",
    [
        (intel.ARCHS["pvc"], 32, {"warp_size": 8}, "warp_size=8, allowed: 16, 32"),
        (intel.ARCHS["dg2"].with_facts(max_threads=1024), 64, {"grf_mode": "256"}, "allowed: 32 at most"),
        (intel.ARCHS["dg2"].with_facts(max_threads=1024), 64, {}, None),
        (intel.ARCHS["pvc"], 32, {"grf_mode": "256"}, None),
        (intel.ARCHS["pvc"], 16, {"grf_mode": "large"}, "grf_mode=large, allowed: default, 128, 256, auto"),
        (intel.ARCHS["pvc"], 64, {}, "64 warps are 2048 threads"),
        (intel.ARCHS["pvc"], 64, {"warp_size": 16}, None),
        (intel.ARCHS["dg2"], 32, {"warp_size": 32}, "32 warps are 1024 threads, allowed: 512"),
        (amd.ARCHS["gfx942"], 32, {}, "32 warps are 2048 threads"),
        (amd.ARCHS["gfx1100"], 32, {"waves_per_eu": 2}, None),
        (nvidia.ARCHS["sm90"], 64, {}, "64 warps are 2048 threads"),
    ],
)
def test_launches_that_a_compiler_refuses(device, num_warps, knobs, words):
    found = backends.launch_error(device, num_warps, device.launch_options | knobs)
    assert (found is None) == (words is None) and (words or "") in (found or "")


NEWEST = max(nvidia.ARCHS, key=lambda arch: int(arch.removeprefix("sm")))


@pytest.mark.parametrize(
    "vendor, unknown, like",
    [
        # names that no GPU has, so that a new row changes none of these
        (nvidia, "sm10", "sm80"), (nvidia, "sm85", "sm80"), (nvidia, "sm999", NEWEST),
        (amd, "gfx90f", "gfx90a"), (amd, "gfx94f", "gfx942"), (amd, "gfx110f", "gfx1100"), (amd, "gfx115f", "gfx1150"),
        (amd, "gfx12ff", "gfx1200"),
        *((intel, arch, like) for arch, (like, _) in intel.RELATIVES.items()), (intel, "unknown", "bmg"),
    ],
)  # fmt: skip
def test_the_nearest_of_unknown_architectures(vendor, unknown, like):
    assert vendor.nearest(unknown) is vendor.ARCHS[like]


@pytest.mark.parametrize(
    "make, device, arch, like",
    [
        (lambda patch: an_nvidia(patch, 8, 5, name="none"), GPU, "sm85", "sm80"),
        (lambda patch: an_amd(patch, "gfx115f:xnack-", 32, 8), GPU, "gfx115f", "gfx1150"),
        (lambda patch: an_intel(patch, "unknown"), XPU, "unknown", "bmg"),
    ],
    ids=["nvidia", "amd", "intel"],
)
def test_an_unknown_architecture_costs_one_log_line(monkeypatch, caplog, make, device, arch, like):
    make(monkeypatch)
    with caplog.at_level(logging.WARNING):
        first, second = backends.detected(device), backends.detected(device)
    assert first is second and first.arch == arch
    assert len(caplog.records) == 1
    assert arch in caplog.text and like in caplog.text


def test_a_cpu():
    found = backends.detected(torch.device("cpu"))
    assert (found.vendor, found.backends) == ("cpu", ("cpu", "reference"))


def test_no_driver_is_asked_at_import():
    """Asking one before a fork poisons the child."""
    check = (
        "import torch; ask = lambda *a, **k: 1 / 0; torch.cuda.get_device_properties = torch.cuda._lazy_init = ask; "
        "torch.xpu.get_device_properties = torch.xpu._lazy_init = ask; "
        "import liger_hw; from liger_hw.kernels import load_all; load_all()"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_variable_is_read_once(monkeypatch):
    monkeypatch.setenv("LIGER_HW_BACKEND", "amd:gfx942")
    assert backends.forced() == "amd:gfx942"
    monkeypatch.setenv("LIGER_HW_BACKEND", "nvidia")
    assert backends.forced() == "amd:gfx942"


def test_an_empty_variable_forces_nothing(monkeypatch):
    monkeypatch.setenv("LIGER_HW_BACKEND", "")
    assert backends.forced() is None


@pytest.mark.parametrize("name", ["cuda", "amd:sm90", "nvidia:", "nvidia:gfx942", "AMD", "triton:sm90", "reference:x"])
def test_unknown_names_list_the_known(monkeypatch, name):
    with pytest.raises(ValueError) as by_call, use_backend(name):
        pass
    monkeypatch.setenv("LIGER_HW_BACKEND", name)
    with pytest.raises(ValueError) as by_variable:
        backends.forced()
    for error in (by_call, by_variable):
        for word in (repr(name), "reference", "triton", "nvidia", "gfx942", "bmg"):
            assert word in str(error.value)


def test_use_backend_nests_and_restores():
    assert backends.forced() is None
    with use_backend("triton"):
        with use_backend(None):
            assert backends.forced() is None
        with pytest.raises(ZeroDivisionError), use_backend("amd"):
            assert backends.forced() == "amd"
            1 / 0  # noqa: B018
        assert backends.forced() == "triton"
    assert backends.forced() is None


def test_use_backend_in_two_threads_that_leave_in_the_order_they_entered():
    """The innermost block that is still open rules; at the end nothing is forced."""
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first():
        with use_backend("amd"):
            first_is_in.set()
            assert second_is_in.wait(10)
        first_is_out.set()

    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(first)
        assert first_is_in.wait(10) and backends.forced() == "amd"
        with use_backend("intel"):
            second_is_in.set()
            assert first_is_out.wait(10)
            assert backends.forced() == "intel"
        thread.result()
    assert backends.forced() is None


def test_forced_name_selects_the_device(monkeypatch):
    """A name that fits the present device means that device; another name its own facts."""
    an_nvidia(monkeypatch, 9, 0, multi_processor_count=78)
    here = backends.detected(GPU)
    for name in ("triton", "reference", "nvidia", "nvidia:sm90"):
        assert backends.target(name, GPU) is here
    assert backends.target("nvidia:sm80", GPU) is nvidia.ARCHS["sm80"]
    assert backends.target("amd", GPU) is amd.ARCHS["gfx942"]
    assert backends.target("intel:lnl", GPU) is intel.ARCHS["lnl"]


def test_meta_tensors_stand_for_a_device(monkeypatch):
    an_amd(monkeypatch, "gfx950", 64, 256)
    with backends.meta_tensors_are_on(GPU):
        with backends.meta_tensors_are_on(GPU):
            pass
        assert backends.device_of(torch.empty(1, device="meta")) is backends.detected(GPU)
    assert backends.device_of(torch.empty(1, device="meta")).vendor == "cpu"

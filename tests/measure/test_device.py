"""Devices as NVML, the AMD topology and torch would show them, faked; and the stand-ins where there is none."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fp8tune import errors
from fp8tune.measure import device
from fp8tune.measure.backends import interpreter
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.records import ClockLimits, Device, Telemetry
from fp8tune_kernels.arches import ARCHES

UUID = "GPU-11111111-2222-3333-4444-555555555555"
OTHER_UUID = UUID.replace("1", "9")
ANSWERS = {
    "Init": None,
    "SystemGetDriverVersion": "580.95.05",
    "DeviceGetCudaComputeCapability": (9, 0),
    "DeviceGetName": "NVIDIA H100 80GB HBM3",
    "DeviceGetNumGpuCores": 16896,
    "DeviceGetClockInfo": 1980,
    "DeviceGetTemperature": 41,
    "DeviceGetPowerUsage": 118_500,
    "DeviceGetCurrentClocksEventReasons": 4,
    "DeviceGetApplicationsClock": 1755,
    "DeviceGetMaxClockInfo": 1980,
    "DeviceGetEnforcedPowerLimit": 700_000,
}


class FakeNvml:
    """Two H100s as NVML shows them; sensors named in ``unreadable`` raise."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, *unreadable: str, devices: int = 2) -> None:
        self.uuids, self.unreadable = [UUID, OTHER_UUID][:devices], unreadable

    def __getattr__(self, name: str) -> Any:
        name = name.removeprefix("nvml")

        def call(argument: Any = None, *_: object) -> Any:
            if name in self.unreadable or not self.uuids:
                raise self.NVMLError("Not Supported")
            if name == "DeviceGetCount":
                return len(self.uuids)
            try:
                if name == "DeviceGetHandleByIndex":
                    return range(len(self.uuids))[argument]
                if name == "DeviceGetHandleByUUID":
                    return self.uuids.index(argument)
                return self.uuids[argument] if name == "DeviceGetUUID" else ANSWERS[name]
            except (IndexError, ValueError):
                raise self.NVMLError("Not Found") from None

        return call


@contextlib.contextmanager
def opened(*unreadable: str) -> Iterator[None]:
    device._limits_in.cache_clear()
    nvml = FakeNvml(*unreadable)
    with mock.patch.object(device, "_open_nvidia", return_value=0), mock.patch.object(device, "pynvml", nvml):
        yield
    device._limits_in.cache_clear()


def probe(environment: dict[str, str], nvml: FakeNvml, sysfs: Path = Path("/nonexistent")) -> Device | None:
    with mock.patch.object(device, "pynvml", nvml):
        return device.probe(environment, sysfs)


def test_an_nvidia_gpu_is_described_without_torch() -> None:
    gpu, installed, hashed = probe({}, FakeNvml()), device.software(), device.hash_uuid(UUID)
    assert gpu is not None
    assert (gpu.arch, gpu.name, gpu.multiprocessors) == ("sm_90", "NVIDIA H100 80GB HBM3", 132)
    assert (gpu.driver, gpu.timing, gpu.torch, gpu.triton) == ("580.95.05", "gated", installed.torch, installed.triton)
    assert gpu.uuid_hash == hashed == device.hash_uuid(UUID.removeprefix("GPU-").upper())
    assert (len(hashed), UUID in repr(gpu)) == (16, False)


@pytest.mark.parametrize(
    ("visible", "uuid"),
    [
        *(("0", UUID), ("1", OTHER_UUID), ("1,0", OTHER_UUID), (UUID, UUID), (" 0 , 1", UUID)),
        *((invisible, None) for invisible in ("", "-1", "7", "GPU-none", "NoDevFiles")),
    ],
)
def test_the_first_visible_device_is_taken(visible: str, uuid: str | None) -> None:
    gpu = probe({"CUDA_VISIBLE_DEVICES": visible}, FakeNvml())
    assert (gpu and gpu.uuid_hash) == (uuid and device.hash_uuid(uuid))


def test_a_driver_that_is_missing_is_none_and_one_that_does_not_answer_a_line() -> None:
    assert probe({}, FakeNvml(devices=0)) is None
    with pytest.raises(errors.MachineError, match=r"does not answer.*nvidia-smi"):
        probe({}, FakeNvml("DeviceGetName"))


def test_telemetry_reads_what_it_can_and_throttling_at_either_end_of_a_block() -> None:
    with opened():
        assert device.telemetry() == Telemetry(1980, 1980, 41, 118.5, 4)
        assert device.telemetry_over(Telemetry(throttle_reasons=0x20)).throttle_reasons == 0x24
        assert device.telemetry_over(Telemetry()).throttle_reasons == 4
        assert device.clock_limits() == ClockLimits(1755, 1755, 700.0)
    with opened("DeviceGetPowerUsage", "DeviceGetClockInfo"):
        assert device.telemetry() == Telemetry(None, None, 41, None, 4)
    with opened("DeviceGetApplicationsClock", "DeviceGetEnforcedPowerLimit"):  # then the most that a clock reaches
        assert device.clock_limits() == ClockLimits(1980, 1980, None)


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("1", ["1"]), (f"1, {UUID}", ["1", UUID]), ("7,0", ["0"]), ("", [])]
)
def test_every_visible_gpu_has_a_handle(visible: str | None, names: list[str]) -> None:
    with mock.patch.object(device, "pynvml", FakeNvml()):
        handles = device.nvidia_handles({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        assert [*handles] == names
        assert all(device.telemetry(handle).power_w == 118.5 for handle in handles.values())
    with mock.patch.object(device, "pynvml", FakeNvml(devices=0)):
        assert device.nvidia_handles({}) == {}


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    """The AMD driver's topology: a CPU, an MI300X and an MI250X."""
    mi300x = {"gfx_target_version": "90402", "simd_count": "1216", "simd_per_cu": "4", "unique_id": "123"}
    mi250x = {"gfx_target_version": "90010", "simd_count": "416", "simd_per_cu": "4", "unique_id": "456"}
    for number, properties in enumerate([{"cpu_cores_count": "96", "gfx_target_version": "0"}, mi300x, mi250x]):
        node = tmp_path / "class/kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text("".join(f"{name} {value}\n" for name, value in properties.items()))
    (tmp_path / "module/amdgpu").mkdir(parents=True)
    (tmp_path / "module/amdgpu/version").write_text("6.10.5\n")
    return tmp_path


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("gfx942", 304, "6.10.5")),
        ({"HIP_VISIBLE_DEVICES": "1"}, ("gfx90a", 104, "6.10.5")),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("gfx90a", 104, "6.10.5")),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ("gfx942", 304, "6.10.5")),
        ({"HIP_VISIBLE_DEVICES": ""}, None),
        ({"HIP_VISIBLE_DEVICES": "2"}, None),
    ],
)
def test_an_amd_gpu_is_read_from_the_drivers_topology(topology, environment, expected) -> None:
    gpu = probe(environment, FakeNvml(devices=0), topology)
    assert (gpu and (gpu.arch, gpu.multiprocessors, gpu.driver)) == expected
    assert [device.arch_of_version(version) for version in (90500, 110000)] == ["gfx950", "gfx1100"]


def test_limits_are_the_archs_with_the_devices_own_count_and_stand_ins_have_none() -> None:
    limits = device.limits(Device("sm_90", multiprocessors=114))
    assert limits is not None
    assert (limits.multiprocessors, limits.shared_bytes_per_block) == (114, ARCHES["sm_90"].shared_bytes_per_block)
    stand_in = interpreter().device
    assert (stand_in.arch, bool(stand_in.triton)) == ("interpreter", True)
    assert device.limits(stand_in) is device.limits(Device("sm_10")) is None
    assert SimulatedBackend("simulated:1").device == Device("simulated", "simulated:1")


def test_versions_are_torchs_own_and_reading_them_imports_no_torch() -> None:
    assert device.software().torch == torch.__version__
    assert bool(device.software().runtime) == bool(torch.version.cuda or torch.version.hip)
    read = "device.software(); device.probe(); device.telemetry()"
    code = f"import sys; from fp8tune.measure import device; {read}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_probing_without_a_context_tells_what_torch_tells() -> None:
    gpu, properties = device.probe(), torch.cuda.get_device_properties(0)
    assert gpu is not None
    assert (gpu.name, gpu.multiprocessors) == (properties.name, properties.multi_processor_count)
    if gpu.arch.startswith("sm_"):
        assert gpu.arch == f"sm_{properties.major}{properties.minor}"
        assert gpu.uuid_hash == device.hash_uuid(str(properties.uuid))
    else:
        assert gpu.arch == properties.gcnArchName.partition(":")[0]


@pytest.mark.gpu
def test_telemetry_is_cheap_enough_to_read_around_every_block() -> None:
    assert device.telemetry().sm_clock_mhz
    assert device.clock_limits().power_limit_w
    begun = time.perf_counter()
    for _ in range(50):
        device.telemetry()
        device.clock_limits()
    assert (time.perf_counter() - begun) / 50 < 1e-3

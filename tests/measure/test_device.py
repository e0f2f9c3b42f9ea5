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


class FakeNvml:
    """Two H100s as NVML shows them; sensors named in ``unreadable`` raise."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, devices: int = 2, unreadable: tuple[str, ...] = ()) -> None:
        self.uuids, self.unreadable = [UUID, OTHER_UUID][:devices], unreadable

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetNumGpuCores": 16896,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetPowerUsage": 118_500,
            "nvmlDeviceGetCurrentClocksEventReasons": 4,
            "nvmlDeviceGetApplicationsClock": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        }

        def call(argument: Any = None, *_: object) -> Any:
            if name in self.unreadable or not self.uuids:
                raise self.NVMLError("Not Supported")
            try:
                if name == "nvmlDeviceGetHandleByIndex":
                    return range(len(self.uuids))[argument]
                if name == "nvmlDeviceGetHandleByUUID":
                    return self.uuids.index(argument)
                return self.uuids[argument] if name == "nvmlDeviceGetUUID" else answers[name]
            except (IndexError, ValueError):
                raise self.NVMLError("Not Found") from None

        return call


@contextlib.contextmanager
def opened(nvml: FakeNvml) -> Iterator[None]:
    device._limits_in.cache_clear()
    with mock.patch.object(device, "_open_nvidia", return_value=0), mock.patch.object(device, "pynvml", nvml):
        yield
    device._limits_in.cache_clear()


def probe(environment: dict[str, str], nvml: FakeNvml) -> Device | None:
    return device.probe(environment, nvml, Path("/nonexistent"))


def test_an_nvidia_gpu_is_described_without_torch() -> None:
    results = probe({}, FakeNvml())
    assert results is not None
    assert (results.arch, results.name, results.multiprocessors) == ("sm_90", "NVIDIA H100 80GB HBM3", 132)
    assert (results.driver, results.timing) == ("580.95.05", "gated")
    assert (len(results.uuid_hash), UUID in repr(results)) == (16, False)
    assert results.uuid_hash == device.hash_uuid(UUID) == device.hash_uuid(UUID.removeprefix("GPU-").upper())
    assert (results.torch, results.triton) == (device.software().torch, device.software().triton)


@pytest.mark.parametrize(
    ("visible", "uuid"),
    [
        *(("0", UUID), ("1", OTHER_UUID), ("1,0", OTHER_UUID), (UUID, UUID), (" 0 , 1", UUID)),
        *((invisible, None) for invisible in ("", "-1", "7", "GPU-none", "NoDevFiles")),
    ],
)
def test_the_first_visible_device_is_taken(visible: str, uuid: str | None) -> None:
    results = probe({"CUDA_VISIBLE_DEVICES": visible}, FakeNvml())
    assert (results and results.uuid_hash) == (uuid and device.hash_uuid(uuid))


def test_a_driver_that_is_missing_is_none_and_one_that_does_not_answer_a_line(tmp_path: Path) -> None:
    assert probe({}, FakeNvml(devices=0)) is None
    assert device.probe_amd({}, tmp_path) is None
    with pytest.raises(errors.MachineError, match=r"does not answer.*nvidia-smi"):
        probe({}, FakeNvml(unreadable=("nvmlDeviceGetName",)))


def test_telemetry_reads_what_it_can_and_throttling_at_either_end_of_a_block() -> None:
    with opened(FakeNvml()):
        assert device.telemetry() == Telemetry(1980, 1980, 41, 118.5, 4)
        assert device.telemetry_over(Telemetry(throttle_reasons=0x20)).throttle_reasons == 0x24
        assert device.telemetry_over(Telemetry()).throttle_reasons == 4
    with opened(FakeNvml(unreadable=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo"))):
        assert device.telemetry() == Telemetry(None, None, 41, None, 4)


def test_clock_limits_are_application_clocks_or_the_most_a_clock_reaches() -> None:
    with opened(FakeNvml()):
        assert device.clock_limits() == ClockLimits(1755, 1755, 700.0)
    with opened(FakeNvml(unreadable=("nvmlDeviceGetApplicationsClock", "nvmlDeviceGetEnforcedPowerLimit"))):
        assert device.clock_limits() == ClockLimits(1980, 1980, None)


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    """The AMD driver's topology: a CPU, an MI300X and an MI250X."""
    nodes = tmp_path / "class/kfd/kfd/topology/nodes"
    mi300x = {"gfx_target_version": "90402", "simd_count": "1216", "simd_per_cu": "4", "unique_id": "123"}
    mi250x = {"gfx_target_version": "90010", "simd_count": "416", "simd_per_cu": "4", "unique_id": "456"}
    for number, properties in enumerate([{"cpu_cores_count": "96", "gfx_target_version": "0"}, mi300x, mi250x]):
        (nodes / str(number)).mkdir(parents=True)
        text = "".join(f"{name} {value}\n" for name, value in properties.items())
        (nodes / str(number) / "properties").write_text(text)
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
def test_an_amd_gpu_is_read_from_the_drivers_topology(
    topology: Path, environment: dict[str, str], expected: tuple[str, int, str] | None
) -> None:
    results = device.probe(environment, FakeNvml(devices=0), topology)
    assert (results and (results.arch, results.multiprocessors, results.driver)) == expected
    assert [device.arch_of_version(version) for version in (90500, 110000)] == ["gfx950", "gfx1100"]


def test_limits_are_the_archs_with_the_devices_own_count_and_stand_ins_have_none() -> None:
    limits = device.limits(Device("sm_90", multiprocessors=114))
    assert limits is not None
    assert (limits.multiprocessors, limits.shared_bytes_per_block) == (114, ARCHES["sm_90"].shared_bytes_per_block)
    stand_in = interpreter().device
    assert (stand_in.arch, bool(stand_in.triton)) == ("interpreter", True)
    assert device.limits(stand_in) is device.limits(Device("sm_10")) is None
    assert SimulatedBackend("simulated:1").device == Device("simulated", "simulated:1")


def test_versions_are_torchs_own() -> None:
    assert device.software().torch == torch.__version__
    assert bool(device.software().runtime) == bool(torch.version.cuda or torch.version.hip)


def test_probing_imports_no_torch() -> None:
    code = (
        "import sys; from fp8tune.measure import device; "
        "device.probe(); device.telemetry(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_probing_without_a_context_tells_what_torch_tells() -> None:
    results, properties = device.probe(), torch.cuda.get_device_properties(0)
    assert results is not None
    assert (results.name, results.multiprocessors) == (properties.name, properties.multi_processor_count)
    if results.arch.startswith("sm_"):
        assert results.arch == f"sm_{properties.major}{properties.minor}"
        assert results.uuid_hash == device.hash_uuid(str(properties.uuid))
    else:
        assert results.arch == properties.gcnArchName.partition(":")[0]


@pytest.mark.gpu
def test_telemetry_is_cheap_enough_to_read_around_every_block() -> None:
    assert device.telemetry().sm_clock_mhz
    assert device.clock_limits().power_limit_w
    begun = time.perf_counter()
    for _ in range(50):
        device.telemetry()
        device.clock_limits()
    assert (time.perf_counter() - begun) / 50 < 1e-3

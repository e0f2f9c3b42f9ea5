"""Devices as NVML, the AMD topology and torch would show them, faked; and the stand-ins where there is none."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from fp8tune import errors
from fp8tune.measure import device, rocm
from fp8tune.records import ClockLimits, Device, Telemetry
from fp8tune_kernels.arches import ARCHES

UUID = "GPU-11111111-2222-3333-4444-555555555555"
NO_AMD = Path("/nonexistent")


class FakeNvml:
    """Two H100s as NVML shows them; sensors named in ``unreadable`` raise."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, devices: int = 2, unreadable: tuple[str, ...] = ()) -> None:
        self.uuids = [UUID, UUID.replace("1", "9")][:devices]
        self.unreadable = unreadable

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own names from here on
        if not self.uuids:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= len(self.uuids):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid not in self.uuids:
            raise self.NVMLError("Not Found")
        return self.uuids.index(uuid)

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return self.uuids[handle]

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.95.05"

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
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

        def call(*_: object) -> Any:
            if name in self.unreadable:
                raise self.NVMLError("Not Supported")
            return answers[name]

        if name not in answers:
            raise AttributeError(name)
        return call


@contextlib.contextmanager
def opened(nvml: FakeNvml) -> Iterator[None]:
    with mock.patch.object(device, "_open_nvidia", return_value=0), mock.patch.object(device, "pynvml", nvml):
        yield


def probe(environment: dict[str, str], nvml: FakeNvml) -> Device | None:
    return device.probe(environment, nvml, NO_AMD)


def test_an_nvidia_gpu_is_described_without_torch() -> None:
    found = probe({}, FakeNvml())
    assert found is not None
    assert (found.arch, found.name, found.multiprocessors) == ("sm_90", "NVIDIA H100 80GB HBM3", 132)
    assert found.driver == "580.95.05"
    assert found.uuid_hash == device.hash_uuid(UUID)
    assert len(found.uuid_hash) == 16
    assert UUID not in repr(found)
    assert device.hash_uuid(UUID) == device.hash_uuid(UUID.removeprefix("GPU-").upper())  # torch's spelling
    assert (found.torch, found.triton) == (device.software().torch, device.software().triton)


@pytest.mark.parametrize(
    ("visible", "uuid"),
    [("0", UUID), ("1", UUID.replace("1", "9")), ("1,0", UUID.replace("1", "9")), (UUID, UUID), (" 0 , 1", UUID)],
)
def test_the_first_visible_device_is_taken(visible: str, uuid: str) -> None:
    found = probe({"CUDA_VISIBLE_DEVICES": visible}, FakeNvml())
    assert found is not None
    assert found.uuid_hash == device.hash_uuid(uuid)


@pytest.mark.parametrize("visible", ["", "-1", "7", "GPU-none", "NoDevFiles"])
def test_no_visible_device_is_none(visible: str) -> None:
    assert probe({"CUDA_VISIBLE_DEVICES": visible}, FakeNvml()) is None


def test_a_driver_that_is_missing_is_none_and_one_that_does_not_answer_a_line(tmp_path: Path) -> None:
    assert probe({}, FakeNvml(devices=0)) is None
    assert rocm.probe({}, tmp_path) is None
    with pytest.raises(errors.MachineError, match=r"does not answer.*nvidia-smi"):
        probe({}, FakeNvml(unreadable=("nvmlDeviceGetName",)))


def test_telemetry_reads_what_it_can() -> None:
    with opened(FakeNvml()):
        assert device.telemetry() == Telemetry(1980, 1980, 41, 118.5, 4)
    with opened(FakeNvml(unreadable=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo"))):
        assert device.telemetry() == Telemetry(None, None, 41, None, 4)


def test_clock_limits_are_application_clocks_or_the_most_a_clock_reaches() -> None:
    with opened(FakeNvml()):
        assert device.clock_limits() == ClockLimits(1755, 1755, 700.0)
    with opened(FakeNvml(unreadable=("nvmlDeviceGetApplicationsClock", "nvmlDeviceGetEnforcedPowerLimit"))):
        assert device.clock_limits() == ClockLimits(1980, 1980, None)


def topology(folder: Path, *gpus: dict[str, str]) -> Path:
    """The driver's topology: a CPU first, then GPUs."""
    nodes = folder / "class/kfd/kfd/topology/nodes"
    for number, properties in enumerate([{"cpu_cores_count": "96", "gfx_target_version": "0"}, *gpus]):
        (nodes / str(number)).mkdir(parents=True)
        text = "".join(f"{name} {value}\n" for name, value in properties.items())
        (nodes / str(number) / "properties").write_text(text)
    (folder / "module/amdgpu").mkdir(parents=True)
    (folder / "module/amdgpu/version").write_text("6.10.5\n")
    return folder


MI300X = {"gfx_target_version": "90402", "simd_count": "1216", "simd_per_cu": "4", "unique_id": "123"}
MI250X = {"gfx_target_version": "90010", "simd_count": "416", "simd_per_cu": "4", "unique_id": "456"}


def test_an_amd_gpu_is_read_from_the_drivers_topology(tmp_path: Path) -> None:
    found = device.probe({}, FakeNvml(devices=0), topology(tmp_path, MI300X, MI250X))
    assert found is not None
    assert (found.arch, found.multiprocessors, found.driver) == ("gfx942", 304, "6.10.5")
    assert len(found.uuid_hash) == 16


@pytest.mark.parametrize(
    ("environment", "arch"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, "gfx90a"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "gfx90a"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "gfx942"),
        ({"HIP_VISIBLE_DEVICES": ""}, None),
        ({"HIP_VISIBLE_DEVICES": "2"}, None),
    ],
)
def test_hip_visibility_is_honoured(tmp_path: Path, environment: dict[str, str], arch: str | None) -> None:
    found = rocm.probe(environment, topology(tmp_path, MI300X, MI250X))
    assert (found.arch if found else None) == arch


@pytest.mark.parametrize(
    ("version", "arch"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110000, "gfx1100")]
)
def test_the_drivers_version_names_the_arch(version: int, arch: str) -> None:
    assert rocm.arch_of_version(version) == arch


def test_amd_telemetry_reads_what_it_can() -> None:
    kinds = SimpleNamespace(GFX=0, MEM=1, HOTSPOT=1, CURRENT=0)
    amdsmi = SimpleNamespace(
        AmdSmiClkType=kinds,
        AmdSmiTemperatureType=kinds,
        AmdSmiTemperatureMetric=kinds,
        amdsmi_get_clock_info=lambda handle, kind: {"clk": 2100 if kind == 0 else 1300},
        amdsmi_get_temp_metric=lambda handle, sensor, metric: "N/A",
        amdsmi_get_power_info=lambda handle: {"current_socket_power": 410},
    )
    assert rocm.telemetry(amdsmi, None) == Telemetry(2100, 1300, None, 410.0, None)


def test_the_stand_ins_say_what_they_are() -> None:
    assert device.interpreter_device().arch == "interpreter"
    assert device.interpreter_device().triton
    assert device.simulated_device() == Device("simulated", "simulated clock")


def test_limits_are_the_archs_with_the_devices_own_count() -> None:
    limits = device.limits(Device("sm_90", multiprocessors=114))
    assert limits is not None
    assert limits.multiprocessors == 114
    assert limits.shared_bytes_per_block == ARCHES["sm_90"].shared_bytes_per_block
    assert device.limits(device.interpreter_device()) is None
    assert device.limits(Device("sm_10")) is None


def test_throttling_at_either_end_of_a_block_is_stored() -> None:
    with opened(FakeNvml()):
        assert device.telemetry_over(Telemetry(throttle_reasons=0x20)).throttle_reasons == 0x24
        assert device.telemetry_over(Telemetry()).throttle_reasons == 4


def test_versions_are_torchs_own() -> None:
    import torch

    assert device.software().torch == torch.__version__
    built_for = torch.version.cuda or torch.version.hip
    assert bool(device.software().runtime) == bool(built_for)


def test_probing_imports_no_torch() -> None:
    code = (
        "import sys; from fp8tune.measure import device; "
        "device.probe(); device.telemetry(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_probing_without_a_context_tells_what_torch_tells() -> None:
    found = device.probe()
    assert found is not None
    import torch

    properties = torch.cuda.get_device_properties(0)
    assert (found.name, found.multiprocessors) == (properties.name, properties.multi_processor_count)
    if found.arch.startswith("sm_"):
        assert found.arch == f"sm_{properties.major}{properties.minor}"
        assert found.uuid_hash == device.hash_uuid(str(properties.uuid))
    else:
        assert found.arch == properties.gcnArchName.partition(":")[0]


@pytest.mark.gpu
def test_telemetry_is_cheap_enough_to_read_around_every_block() -> None:
    assert device.telemetry().sm_clock_mhz
    assert device.clock_limits().power_limit_w
    begun = time.perf_counter()
    for _ in range(50):
        device.telemetry()
        device.clock_limits()
    assert (time.perf_counter() - begun) / 50 < 1e-3

"""Names of tuned JSON files, and the rules by which vLLM and SGLang look them up.

The rules were read from the lookups in vLLM 0.33.0 and SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fp8tune.text import NAME

_SPLIT = re.compile(r",(?![^\[]*\])")  # commas outside of brackets
_BLOCK = re.compile(r"\[(\d{1,9})(, ?)(\d{1,9})\]")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")

_ARCHES = {
    "sm_80": "A100 A800",
    "sm_89": "L4 L20 L40 L40S 4090 Ada",
    "sm_90": "H20 H100 H200 H800 GH200",
    "sm_100": "B200 GB200",
    "sm_103": "B300 GB300",
    "sm_120": "5090 Blackwell",
    "sm_121": "GB10",
    "gfx90a": "MI250 MI250X",
    "gfx942": "MI300X MI308X MI325 MI325X",
    "gfx950": "MI350 MI350X MI355 MI355X",
    "gfx1151": "8060S",
    "gfx1201": "R9700",
}
"""Arch -> words of device names: the files name devices alone."""


def arch_of(device: str) -> str:
    """Return the arch of a device's name, with blanks or ``_``; empty if it is unknown."""
    words = {*re.findall(r"[A-Za-z0-9]+", device)}
    return next((arch for arch, names in _ARCHES.items() if not words.isdisjoint(names.split())), "")


@dataclass(frozen=True)
class FileName:
    """Name of a tuned file without its suffix, such as ``E=8,N=512,device_name=NVIDIA_H200,dtype=fp8_w8a8``."""

    parts: tuple[str, ...]
    is_down: bool = False  # ends in _down: SGLang's configs of the second GEMM

    @classmethod
    def parse(cls, stem: str) -> FileName:
        """Split a name at its commas. Any text is a name; :attr:`Rule.mismatch` says what is wrong with it."""
        whole = stem.removesuffix("_down")
        return cls(tuple(_SPLIT.split(whole)), whole != stem)

    def __str__(self) -> str:
        return ",".join(self.parts) + ("_down" if self.is_down else "")

    @cached_property
    def fields(self) -> Mapping[str, str]:
        """Values by name, in the order of the file name; empty for a part without ``=``."""
        return {name: value for name, _, value in (part.partition("=") for part in self.parts)}

    @property
    def device(self) -> str:
        """Name of the device; empty if there is none."""
        return self.fields.get("device_name", self.fields.get("device", ""))

    @property
    def dtype(self) -> str:
        """Name of the dtype; empty if there is none."""
        return self.fields.get("dtype", self.fields.get("cache_dtype", ""))

    @property
    def block_shape(self) -> tuple[int, int] | None:
        """Block of quantized weights that shares a scale."""
        block = _BLOCK.fullmatch(self.fields.get("block_shape", ""))
        return (int(block[1]), int(block[3])) if block else None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the file. Flags are sizes of 1."""
        sizes = {"down": 1} if self.is_down else {}
        for name, value in self.fields.items():
            if NAME.fullmatch(name) and re.fullmatch(r"[0-9]{1,19}|True", value):
                sizes[name] = 1 if value == "True" else int(value)
        if self.block_shape:
            sizes |= dict(zip(("block_n", "block_k"), self.block_shape, strict=True))
        return sizes


TILE = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
GROUPED_TILE = (*TILE, "GROUP_SIZE_M")
"""Constants of the fused-MoE and block-scaled GEMM kernels that every config has to set."""

_CUDA = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_AMD = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")


def launch_options(arch: str) -> tuple[str, ...]:
    """Return the options of Triton's compiler that a config for an arch may set; all for an unknown one."""
    return _CUDA if arch.startswith("sm_") else (*_CUDA, *_AMD, *(() if arch.startswith("gfx") else ("grf_mode",)))


_AMD_NAMES = {word: f"AMD_Instinct_{word}" for word in ("MI300A", "MI300X", "MI308X", "MI325X")}
_AMD_NAMES |= {word: f"AMD_Radeon_{word}" for word in ("RX7900XTX", "890M", "8060S", "RX9070XT", "R9700")}
_AMD_NAMES |= {"MI325": "AMD_Instinct_MI325X", "MI308": "AMD_Instinct_MI308X", "MI300X_HF": "AMD_Instinct_MI300X_HF"}
"""Word of a device's name -> name that vLLM gives to the PCI ID of that device, whatever the driver calls it."""


@dataclass(frozen=True)
class Rule:
    """File names that one lookup makes, and the configs that its kernel takes."""

    consumer: str
    kernel: str
    fields: tuple[str, ...]  # names in their order; those that end in "?" may be missing
    values: Mapping[str, tuple[str, ...]]  # field -> texts that the lookup writes
    version: str = ""  # where the Triton version stands: "entry", "folder", or nowhere
    required: tuple[str, ...] = GROUPED_TILE
    optional: tuple[str, ...] = ()
    has_down: bool = False
    may_be_null: bool = False  # an entry that leaves the size to another kernel

    @property
    def comma(self) -> str:
        """Comma in block_shape."""
        return ", " if self.consumer == "SGLang" else ","

    @property
    def ladder(self) -> tuple[int, int] | None:
        """Smallest and largest size that the consumer's tuner tries; None if that is unknown."""
        return (1, 4096) if {*TILE} <= {*self.required} else None

    def is_like(self, name: FileName) -> bool:
        """Return True if a name begins with the fields of this rule's, in any order."""
        return {*[*name.fields][:2]} == {*self.fields[:2]}

    def file_name(self, values: Mapping[str, object], device: str) -> FileName:
        """Return the name of the file that the lookup opens. Fields without a value are left out."""
        values = {**values, ("device" if "device" in self.fields else "device_name"): self.device_name(device)}
        if block := values.get("block_shape"):
            values["block_shape"] = f"[{self.comma.join(map(str, block))}]"  # type: ignore[call-overload]
        parts = []
        for name in (field.removesuffix("?") for field in self.fields):
            if self.values.get(name) == ("",):
                parts.append(name)
            elif values.get(name) not in (None, ""):
                parts.append(f"{name}={values[name]}")
        return FileName(tuple(parts))

    def device_name(self, device: str) -> str:
        """Return the name that the lookup gives to a device."""
        if self.consumer != "vLLM":
            return device.replace(" ", "_")
        device = re.sub(r"[\s/]+", "_", device)
        words = device.split("_")
        if self.kernel == "fused MoE" and "H200" in words:
            return "NVIDIA_H200"  # of all H200s
        if device in _AMD_NAMES.values():
            return device
        return next((_AMD_NAMES[word] for word in words if word in _AMD_NAMES), device)

    def mismatch(self, name: FileName) -> tuple[str, str]:
        """Return the reason why the lookup never opens a file of this name, and the remedy; empty if it may."""
        required = [field for field in self.fields if not field.endswith("?")]
        order = [field.removesuffix("?") for field in self.fields]
        fields = [*name.fields]
        if fields != [field for field in order if field in fields] or not {*required} <= {*fields}:
            unknown = [field or "(nothing)" for field in fields if field not in order]
            missing = [field for field in required if field not in fields]
            problem = (
                f"{unknown[0]} in the name" if unknown else f"no {missing[0]}" if missing else "fields in another order"
            )
            return f"{problem}: the lookup writes {', '.join(self.fields)}", "name them as the lookup does"
        if name.is_down and not self.has_down:
            return "the lookup writes no _down", "name them as the lookup does"
        if (expected := self.device_name(name.device)) != name.device:
            return f"the lookup calls {name.device} {expected}", f"call the device {expected}"
        for field, value in name.fields.items():
            known = self.values.get(field)
            if field in ("device_name", "device"):
                continue
            if field == "block_shape":
                block = _BLOCK.fullmatch(value)
                if not block or block[2] != self.comma:
                    text = f"block_shape=[128,{self.comma[1:]}128]"
                    return f"block_shape={value}: the lookup writes {text}", f"write {text}"
            elif known is None and not _NUMBER.fullmatch(value):
                return f"{field}={value} is no number", _RENAME
            elif known is not None and value not in known:
                *names, last = filter(None, known)
                listed = f"{', '.join(names)} or {last}" if names else last
                return f"{field}={value}: the lookup writes {listed}", _RENAME
        return "", ""


_RENAME = "rename it as the lookup does, or remove it"
_WEIGHTS = ("fp8_w8a8", "int8_w8a16", "int4_w4a16", "float32")
_MOE = ("E", "N", "device_name", "dtype?", "block_shape?")
_GEMM = ("N", "K", "device_name", "dtype", "block_shape")
_VLLM_TYPES = {"dtype": (*_WEIGHTS, "fp8_w8a16")}
_SGLANG_TYPES = {"dtype": (*_WEIGHTS, "int8_w8a8"), "per_channel_quant": ("True",)}
_FLYDSL_TYPES = {"dtype": ("int4_w4a16",), "backend": ("flydsl",)}
_CHANNELWISE_TYPES = {"dtype": ("fp8_w8a8_channelwise",)}
_MAMBA = ("headdim", "dstate", "device_name", "cache_dtype")
_MAMBA_TYPES = {"cache_dtype": ("float16", "float32", "float8_e4m3fn", "int8", "int16")}  # bfloat16 reads float16's
_MAMBA_REQUIRED = ("BLOCK_SIZE_M", "num_warps")
_LORA = {f"LoRA {word}": f"lora_{word}" for word in ("shrink", "expand")}

VLLM_MOE = Rule("vLLM", "fused MoE", _MOE, _VLLM_TYPES, "entry", optional=("SPLIT_K",))
SGLANG_MOE = Rule(
    "SGLang", "fused MoE", (*_MOE, "per_channel_quant?"), _SGLANG_TYPES, "folder", optional=("USE_TMA",), has_down=True
)
RULES = (
    VLLM_MOE,
    Rule("vLLM", "FlyDSL fused MoE", ("E", "N", "device_name", "dtype", "backend"), _FLYDSL_TYPES, required=()),
    Rule("vLLM", "W8A8 block GEMM", _GEMM, {"dtype": ("fp8_w8a8",)}),
    Rule("vLLM", "Mamba state update", _MAMBA, _MAMBA_TYPES, "entry", required=_MAMBA_REQUIRED),
    SGLANG_MOE,
    Rule("SGLang", "W8A8 block GEMM", _GEMM, {"dtype": ("fp8_w8a8", "int8_w8a8")}, optional=("SPLIT_K", "SWAP_AB")),
    Rule("SGLang", "W8A8 channelwise GEMM", _GEMM[:4], _CHANNELWISE_TYPES, required=TILE, may_be_null=True),
    *(Rule("SGLang", name, (word, *"KRS", "device"), {word: ("",)}, "folder", (), ()) for name, word in _LORA.items()),
)
"""Lookups whose files have one entry for each size."""

_VLLM_LORA = re.compile(r"(.+?)_(?:SHRINK|EXPAND_(?:TRUE|FALSE)|FUSED_MOE_LORA_W(?:13|2)_(?:SHRINK|EXPAND))")


def vllm_lora_device(stem: str) -> str:
    """Return the device that a file names for vLLM's LoRA kernels; empty for any other name."""
    match = _VLLM_LORA.fullmatch(stem)
    return match[1] if match else ""

"""Checks of other programs' tuned files: every kind of problem, and names as the lookups make them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from any_text import any_text
from command_line import fp8tune
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8tune.check.configs import Problem, check_folder, shared_bytes
from fp8tune.check.findings import Level
from fp8tune.errors import UsageError
from fp8tune.tables.tuned_files import RULES, SGLANG_MOE, VLLM_MOE, FileName, Rule, arch_of

TILE = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
LADDER = {str(size): TILE for size in (1, 4, 16, 64, 256, 1024, 4096)}
CURRENT = {"triton_version": "3.8.0", **LADDER}
NAME = "E=8,N=512,device_name=NVIDIA_H200,dtype=fp8_w8a8"
OTHER = "E=8,N=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8"
GEMM = "N=512,K=512,device_name=NVIDIA_H200,dtype=fp8_w8a8"
MAMBA = "headdim=64,dstate=128,device_name=NVIDIA_B200,cache_dtype="
V, S = "vllm/", "sglang/configs/"
S38 = f"{S}triton_3_8_0/"


def problems(folder: Path, files: dict[str, object]) -> dict[str, list[tuple[Problem, str]]]:
    """The problems of each file that has any."""
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    checked, findings = check_folder(folder, "3.8.0")
    assert len({finding.text for finding in findings}) == len(findings)
    assert all(
        len(finding.text) <= 300 and bool(finding.fix) == (finding.level is not Level.OK) for finding in findings
    )
    kinds = {file.path: [(item.problem, item.text) for item in file.problems] for file in checked}
    return {path.removesuffix(".json"): items for path, items in kinds.items() if items}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (f"{V}{NAME}", CURRENT),
        (f"{V}{NAME},block_shape=[128,128]", CURRENT),
        (f"{V}E=8,N=512,device_name=NVIDIA_H100", CURRENT),  # NVIDIA's driver has called some of them so
        (f"{V}{MAMBA}float16", CURRENT),
        (f"{S38}{NAME},block_shape=[128, 128],per_channel_quant=True_down", LADDER),
        (f"{S38}{NAME}", {**LADDER, "64": {**TILE, "USE_TMA": True}}),
        (f"{S38}lora_shrink,K=1024,R=64,S=2,device=NVIDIA_H200", {"256": {"BLOCK_N": 16}}),
        (f"{V}NVIDIA_H200_EXPAND_TRUE", {"1": {}}),
        (f"{S}E=256,device_name=NVIDIA_GB300", {"configs": {"1": {"block_size": 448}}}),  # another layout
    ],
)
def test_sound_files_have_no_problem(tmp_path: Path, name: str, content: object) -> None:
    assert problems(tmp_path, {name: content}) == {}


def entry(**changes: object) -> dict[str, object]:
    """A file whose entry for 64 is changed."""
    return {**CURRENT, "64": {name: value for name, value in {**TILE, **changes}.items() if value is not None}}


@pytest.mark.parametrize(
    ("name", "content", "problem", "text"),
    [
        # names
        (f"{V}{NAME},block_shape=[128, 128]", CURRENT, Problem.NO_MATCH, "the lookup writes block_shape=[128,128]"),
        (f"{S38}{NAME},block_shape=[128,128]", LADDER, Problem.NO_MATCH, "the lookup writes block_shape=[128, 128]"),
        (f"{V}E=8,N=512,device_name=NVIDIA_H200_NVL", CURRENT, Problem.NO_MATCH, "calls NVIDIA_H200_NVL NVIDIA_H200"),
        (f"{V}E=8,N=512,device_name=NVIDIA H200", CURRENT, Problem.NO_MATCH, "calls NVIDIA H200 NVIDIA_H200"),
        (f"{S38}E=8,N=512,device_name=NVIDIA H200", LADDER, Problem.NO_MATCH, "calls NVIDIA H200 NVIDIA_H200"),
        (
            f"{V}{NAME.replace('NVIDIA_H200', 'AMD_Instinct_MI325_OAM')}",
            CURRENT,
            Problem.NO_MATCH,
            "AMD_Instinct_MI325X",
        ),
        (f"{V}{NAME.replace('fp8_w8a8', 'bf16')}", CURRENT, Problem.NO_MATCH, "dtype=bf16"),
        (f"{V}E=8,N=512", CURRENT, Problem.NO_MATCH, "no device_name"),
        (f"{V}N=512,E=8,device_name=NVIDIA_H200", CURRENT, Problem.NO_MATCH, "another order"),
        (f"{V}E=08,N=512,device_name=NVIDIA_H200", CURRENT, Problem.NO_MATCH, "E=08 is no number"),
        (f"{V}{NAME},topk=2", CURRENT, Problem.NO_MATCH, "topk in the name"),
        (f"{V}{NAME}_down", CURRENT, Problem.NO_MATCH, "no _down"),
        (f"{V}{MAMBA}bfloat16", CURRENT, Problem.NO_MATCH, "bfloat16"),
        (f"{V}{GEMM.replace('fp8', 'int8')},block_shape=[128,128]", LADDER, Problem.NO_MATCH, "dtype=int8_w8a8"),
        (f"{V}NVIDIA_A100-SXM4-80GB_SHRINK", {"1": {}}, Problem.NO_MATCH, "NVIDIA_A100_SXM4_80GB"),
        (f"{S}{NAME}", LADDER, Problem.NO_MATCH, "triton_X_Y_Z"),
        # entries
        (f"{V}{NAME}", "{", Problem.DAMAGED, "Expecting"),
        (f"{V}{NAME}", "[]", Problem.DAMAGED, "no JSON object"),
        (f"{V}{NAME}", {**CURRENT, "64": None}, Problem.DAMAGED, "'64' is None instead of a config"),
        (f"{V}{NAME}", {**CURRENT, "large": TILE}, Problem.DAMAGED, "'large' is no size"),
        (f"{S38}{NAME}", {**LADDER, "triton_version": "3.8.0"}, Problem.DAMAGED, "'triton_version' is no size"),
        (f"{V}{NAME}", json.dumps(CURRENT)[:-1] + ', "64": {}}', Problem.DAMAGED, "'64' is there twice"),
        (f"{V}{NAME}", entry(GROUP_SIZE_M=None), Problem.DAMAGED, "lacks GROUP_SIZE_M"),
        (f"{V}{NAME}", entry(BLOCK_SIZE_N="128"), Problem.DAMAGED, "lacks BLOCK_SIZE_N"),
        (f"{V}{NAME}", entry(waves_per_eu=0), Problem.DAMAGED, "waves_per_eu, which neither the kernel"),
        (f"{S38}{NAME}", {**LADDER, "64": {**TILE, "SPLIT_K": 1}}, Problem.DAMAGED, "SPLIT_K, which neither"),
        (f"{V}{NAME}", entry(BLOCK_SIZE_M=48), Problem.DAMAGED, "BLOCK_SIZE_M=48, which is no power of two"),
        (f"{V}{NAME}", entry(num_warps=0), Problem.DAMAGED, "num_warps=0"),
        # the GPU
        (f"{V}{NAME}", entry(num_stages=10), Problem.NO_LAUNCH, "64: needs 245760 bytes"),
        (f"{V}{NAME}", entry(num_warps=64), Problem.NO_LAUNCH, "2048 threads a block"),
        (f"{V}{NAME}", entry(BLOCK_SIZE_K=16), Problem.NO_LAUNCH, "BLOCK_SIZE_K=16"),
        # the Triton version, and sizes
        (f"{V}{NAME}", LADDER, Problem.NO_TRITON, "not recorded"),
        (f"{V}{GEMM},block_shape=[128,128]", LADDER, Problem.NO_TRITON, "not recorded"),
        (f"{V}{NAME}", {**LADDER, "triton_version": "3.4.0"}, Problem.OLD_TRITON, "Triton 3.4.0, you have 3.8.0"),
        (f"{S}triton_3_5_1/{NAME}", LADDER, Problem.OLD_TRITON, "Triton 3.5.1, you have 3.8.0"),
        (f"{V}{NAME}", {"triton_version": "3.8.0", "1": TILE, "4": TILE}, Problem.GAP, "above 4"),
        (f"{V}{NAME}", {"triton_version": "3.8.0", "2048": TILE}, Problem.GAP, "below 2048"),
        (f"{V}{NAME}", {name: row for name, row in CURRENT.items() if name != "64"}, Problem.GAP, "from 16 to 256"),
    ],
)
def test_each_problem_is_named_alone(tmp_path: Path, name: str, content: object, problem: Problem, text: str) -> None:
    (items,) = problems(tmp_path, {name: content, f"{V}{OTHER}": {**CURRENT, "1": {**TILE, "num_warps": 8}}}).values()
    if name.startswith(f"{V}{GEMM[:8]}") and problem is not Problem.NO_TRITON:  # none of these can record it
        assert items.pop(1)[0] is Problem.NO_TRITON
    ((kind, message),) = items
    assert kind is problem
    assert text in message


def test_a_bad_entry_does_not_hide_the_others(tmp_path: Path) -> None:
    content = {**entry(num_stages=10), "512": None, "2048": {**TILE, "BLOCK_SIZE_M": 7}, "4096": TILE}
    ((_, items),) = problems(tmp_path, {f"{V}{NAME}": content}).items()
    assert [problem for problem, _ in items] == [Problem.DAMAGED, Problem.DAMAGED, Problem.NO_LAUNCH]


def test_copies_and_hidden_files_name_the_other(tmp_path: Path) -> None:
    h100, changed = NAME.replace("H200", "H100_80GB_HBM3"), {**LADDER, "64": {**TILE, "num_warps": 8}}
    many = {str(2**power): {**TILE, "GROUP_SIZE_M": power + 1} for power in range(13)}
    near = {**many, "1": TILE | {"num_warps": 8}}
    b200, old = OTHER.replace("H200", "B200"), f"{S}triton_3_5_1/"
    files = {f"{S38}{NAME}": LADDER, f"{S38}{h100}": LADDER, f"{S38}{OTHER}": many, f"{S38}{b200}": near}
    files |= {f"{old}{NAME}": changed, f"{old}{OTHER}": many}
    result = {path: dict(items) for path, items in problems(tmp_path, files).items()}
    assert "NVIDIA_H100_80GB_HBM3" in result[f"{S38}{NAME}"][Problem.COPY]
    assert "NVIDIA_H200" in result[f"{S38}{h100}"][Problem.COPY]
    assert "Triton 3.8.0" in result[f"{old}{OTHER}"][Problem.COPY]
    assert result[f"{S38}{b200}"] == {Problem.NEAR_COPY: "92% of the configs are those of NVIDIA_H200"}
    hidden = {path for path, items in result.items() if Problem.HIDDEN in items}
    assert hidden == {f"{old}{NAME}", f"{old}{OTHER}"}


@pytest.mark.parametrize(
    ("arch", "element_bytes", "tile", "bytes_"),
    [  # as Triton 3.7.1 states them for vLLM's kernel: (M, N, K, num_warps, num_stages)
        ("sm_80", (2, 2), (16, 64, 64, 4, 4), 30720),
        ("sm_80", (2, 2), (64, 128, 64, 4, 2), 24576),
        ("sm_90", (2, 2), (16, 64, 64, 4, 2), 10240),
        ("sm_90", (2, 2), (64, 128, 64, 4, 1), 24576),
        ("sm_90", (2, 2), (128, 256, 64, 8, 4), 196608),
        ("sm_90", (1, 1), (64, 128, 64, 4, 3), 36864),
        ("sm_120", (1, 1), (128, 256, 64, 8, 4), 73728),
        ("gfx942", (2, 2), (64, 128, 64, 4, 1), 16384),
        ("gfx942", (1, 1), (128, 256, 64, 8, 4), 73728),
    ],
)
def test_shared_memory_is_what_the_compiler_states(
    arch: str, element_bytes: tuple[int, int], tile: tuple[int, ...], bytes_: int
) -> None:
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
    assert shared_bytes(dict(zip(names, tile, strict=True)), arch, element_bytes) == bytes_


# Names

DEVICES = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X", "Intel(R) Arc(TM) Pro B60 Graphics")


@st.composite
def names(draw: st.DrawFn) -> tuple[Rule, FileName]:
    """A rule, and a name that its lookup makes."""
    rule = draw(st.sampled_from(RULES))
    values: dict[str, object] = {}
    for field in rule.fields:
        name = field.removesuffix("?")
        if name == "block_shape":
            values[name] = draw(st.sampled_from([(128, 128), (64, 32)]))
        elif name in rule.values:
            values[name] = draw(st.sampled_from(rule.values[name]))
        else:
            values[name] = draw(st.integers(0, 10**6))
        if field.endswith("?") and draw(st.booleans()):
            values[name] = None
    return rule, rule.file_name(values, draw(st.sampled_from(DEVICES)))


@given(names(), st.integers(0, 200), st.characters(codec="ascii"))
def test_names_of_a_lookup_match_and_changed_ones_do_not(named: tuple[Rule, FileName], place: int, letter: str) -> None:
    rule, name = named
    assert FileName.parse(str(name)) == name
    assert rule.mismatch(name) == ("", "")
    text = str(name)
    start = text.index("device")
    changed = text[: place % start] + letter + text[place % start + 1 :]  # before the device, of which any text is one
    result = FileName.parse(changed)
    if dict(result.fields) != dict(name.fields) and not rule.mismatch(result)[0]:  # another number is a name, too
        assert letter.isdigit()


@given(any_text(max_size=60))
def test_any_text_is_a_name_that_keeps_it(text: str) -> None:
    assert str(FileName.parse(text)) == text
    assert all(isinstance(rule.mismatch(FileName.parse(text))[0], str) for rule in RULES)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | any_text(max_size=5)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(any_text(max_size=5), inner, max_size=2)
)
KEYS = st.sampled_from(["1", "64", "triton_version", "BLOCK_SIZE_M"])


@settings(max_examples=40, deadline=None)
@given(names(), st.dictionaries(KEYS, JSON | st.dictionaries(st.sampled_from([*TILE]), JSON, max_size=6), max_size=3))
def test_whatever_a_file_holds_it_is_reported(
    tmp_path_factory: pytest.TempPathFactory, named: tuple[Rule, FileName], content: object
) -> None:
    path = tmp_path_factory.mktemp("hostile") / f"{named[1]}.json"
    path.write_text(json.dumps(content))
    ((file,), findings) = check_folder(path.parent, "3.8.0")
    assert file.path == path.name
    assert findings


def test_lookups_spell_names_their_own_way() -> None:
    values = {"E": 8, "N": 512, "dtype": "fp8_w8a8", "block_shape": (128, 128)}
    tail = "dtype=fp8_w8a8,block_shape=[128,{}128]"
    assert str(VLLM_MOE.file_name(values, "NVIDIA H200 NVL")) == f"E=8,N=512,device_name=NVIDIA_H200,{tail.format('')}"
    sglang = f"E=8,N=512,device_name=NVIDIA_H200_NVL,{tail.format(' ')}"
    assert str(SGLANG_MOE.file_name(values, "NVIDIA H200 NVL")) == sglang
    assert [arch_of(name) for name in ("NVIDIA_L40S", "AMD Instinct MI325X", "abacus")] == ["sm_89", "gfx942", ""]


# The command


def test_the_command_lists_errors_first_and_counts_by_device(tmp_path: Path) -> None:
    files = {f"{V}{NAME}": CURRENT, f"{V}{NAME},block_shape=[128, 128]": LADDER, f"{V}readme": {}}
    problems(tmp_path, files)
    result = fp8tune("doctor", "--configs", str(tmp_path))
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("error    1 file that no lookup opens")
    assert "2 tuned files with 14 configs" in result.stdout
    assert lines[-1].split()[:2] == ["NVIDIA_H200", "2"]
    document = json.loads(fp8tune("doctor", "--configs", str(tmp_path), "--format", "json").stdout)
    kinds = [[item["problem"] for item in file["problems"]] for file in document["files"]]
    assert sorted(kinds) == [[], ["no match", "no Triton"]]
    assert fp8tune("doctor", "colwise", "--configs", str(tmp_path)).returncode == 2


@pytest.mark.parametrize("name", ["absent", "folder"])
def test_a_folder_without_tuned_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="folder"):
        check_folder(tmp_path / name)

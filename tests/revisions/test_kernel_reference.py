"""The text that names a kernel: what it may hold, and that it comes back as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.names import stored_kernels
from fp8tune.revisions.reference import KernelReference
from fp8tune.text import KERNEL_NAME, SPEC_NAME

NAMES = st.from_regex(r"[a-z_][a-z0-9_.]{0,9}:_?[a-z]\w{0,9}", fullmatch=True) | st.sampled_from(
    ["colwise", "a/b.py:K"]
)
BOUNDS = st.none() | st.floats(0, 1)
REFERENCES = st.builds(
    KernelReference,
    NAMES,
    recording=st.sampled_from(["", "run.json", "/tmp/a b/run 1.json"]),
    check=st.just("tolerance"),
    relative=BOUNDS,
    absolute=BOUNDS,
    reference=st.sampled_from(["", "package.module:function"]),
    sizes=st.sampled_from(["", "recorded"]),
)


@given(REFERENCES)
def test_a_reference_comes_back_from_its_text(reference: KernelReference) -> None:
    assert KernelReference.parse(str(reference)) == reference


def test_the_parts_of_a_reference() -> None:
    whole = KernelReference.parse("a.b:_k@run.json?check=tolerance&relative=1e-3&reference=m:f&sizes=recorded")
    assert whole == KernelReference("a.b:_k", "run.json", "tolerance", 1e-3, None, "m:f", "recorded")
    assert KernelReference.parse("colwise?reference=m:f") == KernelReference("colwise", reference="m:f")
    assert KernelReference.parse("at@home/kernel.py:K") == KernelReference("at@home/kernel.py:K")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a:b?chek=exact", "unknown option in 'a:b?chek=exact' 'chek': did you mean check?"),
        ("a:b?check=bytes", "unknown check 'bytes'"),
        ("a:b?check=tolerance&relative=nan", "relative=nan"),
        ("a:b?relative=1e-3", "check=tolerance"),
        ("a:b?reference=f", "reference 'f'"),
        ("a:b?sizes=odd", "sizes=odd"),
    ],
)
def test_what_a_reference_may_not_hold(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        KernelReference.parse(text)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "name", ["colwise", "torchao.prototype.moe:_kernel", "app/my-lib.py:_kernel", "m:" + "a" * 198]
)
def test_names_that_rows_take(name: str) -> None:
    assert KERNEL_NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["m:" + "a" * 199, "m:a:b", "m:a\x1b", ":a", "m:", "a b"])
def test_names_that_rows_refuse(name: str) -> None:
    assert not KERNEL_NAME.fullmatch(name)
    assert not SPEC_NAME.fullmatch(name)


def test_a_kernel_with_rows_is_read_without_its_module() -> None:
    class Rows:
        def kernels(self) -> list[str]:
            return ["nowhere.at_all:_kernel"]

    assert stored_kernels(["nowhere.at_all:_kernel@run.json?check=exact"], Rows()) == ["nowhere.at_all:_kernel"]  # type: ignore[arg-type]

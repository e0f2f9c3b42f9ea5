"""The text that names a kernel: what it may hold, and that it comes back as it was."""

from __future__ import annotations

import pytest
from any_text import CHARACTERS
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.revisions.reference import KernelReference

NAMES = st.from_regex(r"[a-z_][a-z0-9_.]{0,9}:_?[a-z]\w{0,9}", fullmatch=True, alphabet=CHARACTERS) | st.sampled_from(
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

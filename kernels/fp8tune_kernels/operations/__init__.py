"""Whole operations that ``fp8tune bench --op`` times: sizes, inputs, contenders, and how outputs are compared."""

"""Paths in the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLANTED = ROOT / "tests" / "planted"
PUBLISHED = ROOT / "sweeps" / "published" / "kernels.csv"

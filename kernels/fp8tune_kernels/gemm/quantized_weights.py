"""Weights that are quantized once and multiplied by several micro-batches, until they change."""

from __future__ import annotations

"""Picks in the formats that others read: one module a format."""

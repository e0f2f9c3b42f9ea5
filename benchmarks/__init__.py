"""Measurements that take a GPU and minutes: run by hand, from the root of a checkout; no part of the package."""

"""Rechecks: whether tuned configs still hold with the versions installed here, at a small part of a sweep's cost."""

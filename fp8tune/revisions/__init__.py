"""Whose code it is: a kernel's spec, its source hash, git and checkouts of its revisions."""

"""Whose code it is: a kernel's spec, its source hash, git and its worktrees."""

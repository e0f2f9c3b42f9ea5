"""Observe the launches of a program, inside its own processes. Needs nothing but Python, torch and Triton."""

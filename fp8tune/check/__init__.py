"""Checks of ``doctor``: this machine, databases and tables, and the lookup key of a kernel."""

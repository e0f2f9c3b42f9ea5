"""Fixtures and settings for all tests, except in the process of pytest-xdist that only distributes them.

It needs none, and to import torch and the store would take it three seconds before any worker starts.
"""

import os
import sys

if "PYTEST_XDIST_WORKER" in os.environ or not any(word.startswith(("-n", "--numprocesses")) for word in sys.argv):
    from fixtures import *  # noqa: F403

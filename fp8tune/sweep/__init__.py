"""From what a user asked for to rows: the loop of trials, and the finals. Called, it is :func:`fp8tune.api.sweep`."""

import sys

from fp8tune.calling import CallablePackage

sys.modules[__name__].__class__ = CallablePackage

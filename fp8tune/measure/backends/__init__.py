"""Where arms run: one module a back end, all of them behind :class:`fp8tune.measure.engine.Backend`."""

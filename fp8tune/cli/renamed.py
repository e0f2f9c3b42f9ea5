"""Commands and options of version 0.2 that have another name now. Messages name the new one."""

COMMANDS = {
    "explain": "fp8tune show KERNEL SIZE",
    "lint": "fp8tune doctor KERNEL",
    "static-report": "fp8tune show KERNEL --device ARCH",
    "calibrate": "part of fp8tune sweep: leave it out",
    "queue": "fp8tune worker --status",
    "import": "fp8tune db import",
    "compact": "fp8tune db prune",
    "forget": "fp8tune db forget",
    "completion": "fp8tune --install-completion",
}

_SIZE = "part of --shapes, such as --shapes llama4,{}"
_BUDGET = "--budget, such as --budget 10m"

OPTIONS: dict[str, dict[str, str]] = {
    "record": {"--jit": "--kernel", "--format": "fp8tune show RECORDING --format json", "--no-values": "dropped"},
    "sweep": {
        "--check": "--tolerance",
        "--time-budget": _BUDGET,
        "--routing": _SIZE.format("routing=zipf"),
        "--scale-mode": _SIZE.format("scale=exact"),
        "--in-dtype": _SIZE.format("dtype=bfloat16"),
        "--seed": _SIZE.format("seed=1"),
        "--retry-failed": "--again",
        "--static": "--arch ARCH, which always compiles only",
        "--trial-timeout": "fixed: leave it out",
    },
    "show": {
        "--shape": "an argument: fp8tune show KERNEL M=16640,K=1408",
        "--recording": "an argument: fp8tune show run.json",
        "--published": "--verdict published",
        "--explain": "in fp8tune show --help",
    },
    "export": {
        "--dtype": "--size dtype=fp8_w8a8",
        "--dry": "--check",
        "--device": "dropped: all devices of --arch are written",
        "--prune": "dropped: delete the file first",
        "--format": "--for",
        "--verbose": "dropped: leave it out",
    },
    "compare": {
        "--configs": "--picks",
        "--from-db": "--db DB",
        "--routing": _SIZE.format("routing=zipf"),
        "--scale-mode": _SIZE.format("scale=exact"),
        "--seed": _SIZE.format("seed=1"),
        "--repo": "dropped: run it in the repository",
        "--blind": "dropped: A..A always times",
    },
    "report": {"--arch": "--device", "--format": "-o FOLDER/", "--compare": "fp8tune compare A..B --format html"},
    "bench": {
        "--routing": _SIZE.format("routing=zipf"),
        "--seed": _SIZE.format("seed=1"),
        "--groups": _SIZE.format("groups=FILE"),
        "--alone": "--against none",
        "--variants": "part of --format json",
        "--timer": "the variable FP8TUNE_TIMER",
        "--time-budget": "dropped: name fewer kernels",
    },
    "doctor": {
        "--time-budget": _BUDGET,
        "--timer": "the variable FP8TUNE_TIMER",
        "--repair": "dropped: SQLite recovers by itself",
    },
    "worker": {
        "--time-budget": _BUDGET,
        "--timer": "the variable FP8TUNE_TIMER",
        "--retry-failed": "dropped: queue the sweep again",
        "--forget": "fp8tune db forget sweep:ID",
    },
    "db import": {"--compile": "fp8tune sweep --arch ARCH", "--format": "dropped"},
    "db prune": {"-o": "dropped: copy the file first", "--output": "dropped: copy the file first"},
    "db forget": {},
}

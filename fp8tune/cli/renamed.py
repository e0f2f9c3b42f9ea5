"""Commands and options of version 0.2 that have another name now. Messages name the new one."""

COMMANDS = {
    "explain": "fp8tune show KERNEL SIZE",
    "lint": "fp8tune doctor KERNEL",
    "static-report": "fp8tune show KERNEL --device ARCH",
    "calibrate": "gone: a sweep needs no calibration",
    "queue": "fp8tune worker --status",
    "import": "fp8tune db import",
    "compact": "fp8tune db prune",
    "forget": "fp8tune db forget",
    "completion": "fp8tune --install-completion",
}

OPTIONS = {
    "--jit": "--kernel",
    "--check": "--tolerance",
    "--time-budget": "--budget, such as --budget 10m",
    "--routing": "part of --shapes, such as --shapes llama4,routing=zipf",
    "--scale-mode": "part of --shapes, such as --shapes llama4,scale=exact",
    "--in-dtype": "part of --shapes, such as --shapes llama4,dtype=bfloat16",
    "--seed": "part of --shapes, such as --shapes llama4,seed=1",
    "--groups": "part of --shapes, such as --shapes grouped-mm,groups=FILE",
    "--retry-failed": "--again of fp8tune sweep",
    "--static": "--arch ARCH, which always compiles only",
    "--shape": "an argument: fp8tune show KERNEL M=16640,K=1408",
    "--recording": "an argument: fp8tune show run.json",
    "--published": "--verdict published",
    "--dry": "--check",
    "--configs": "--picks",
    "--from-db": "--db DB",
    "--alone": "--against none",
    "--timer": "the variable FP8TUNE_TIMER",
}
"""Options that a command does not have any more; one that has an option of that name never looks here."""

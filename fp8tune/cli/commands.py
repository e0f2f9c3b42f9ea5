"""All commands with their help: which options each takes, and what ``--help`` says about it.

The function of ``fp8tune NAME`` is ``NAME`` in :mod:`fp8tune.cli.NAME`; it is imported when the command runs, so that
``--help`` is fast. It returns the exit code, or None for 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8tune import options


@dataclass(frozen=True)
class Command:
    """Help of one command. Fields of its options without an :class:`~fp8tune.options.Option` are arguments."""

    options: type[Any]
    help: str
    epilog: str = ""
    usage: str = ""
    """Arguments, as the first line of the help names them."""
    takes_program: bool = False
    """True if everything after the first argument belongs to a program that the command runs."""


HELP = """Tune Triton kernels: find the fastest launch configs that give the right output, keep every result, and write
the best configs back to your code."""

EPILOG = """
$ fp8tune tune -- python train.py    # tune the kernels of your program
$ fp8tune show                       # what is known, without a GPU

Database: --db, else $FP8TUNE_DB, else ./fp8tune.db. Without --db, reading
adds the results that come with fp8tune. FP8TUNE_TIMER=simulated:1 simulates
a GPU.
"""

GROUPS = {"db": "Import, prune or forget results."}

COMMANDS = {
    "tune": Command(
        options.TuneOptions,
        """Record a program, tune its kernels, and offer the diff.

        Runs the program once, tunes what takes the most GPU time, runs it again with the picks, prints what that
        changed, and asks before it changes a file. Without a GPU it only checks outputs.
        """,
        """
        $ fp8tune tune -- python train.py
        $ fp8tune tune --budget 1h --apply -- torchrun --nproc-per-node 8 train.py
        """,
        usage="-- COMMAND...",
        takes_program=True,
    ),
    "record": Command(
        options.RecordOptions,
        """Record which Triton kernels a program launches, and with what.

        Follows child processes, and exits with the program's exit code.
        """,
        """
        $ fp8tune record -o run.json -- torchrun --nproc-per-node 8 train.py
        $ fp8tune record --strict -- python train.py
        """,
        usage="-- COMMAND...",
        takes_program=True,
    ),
    "sweep": Command(
        options.SweepOptions,
        """Check and time every config of a kernel on every size.

        Stores results as they come; run it again to resume. Without a GPU, checks outputs on small sizes with Triton's
        interpreter and times nothing. Exits 1 if a size has no right config.
        """,
        """
        $ fp8tune sweep --kernel colwise --shapes llama4
        $ fp8tune sweep --kernel colwise --shapes llama4,K=5120,routing=zipf
        $ fp8tune sweep --recording run.json --budget 30m

        Kernels with results: fp8tune show. Shape sets: llama4, deepseek-v3, models,
        deepseek-moe-16b, rows, grouped-mm, bench-models, moe-layer-up,
        moe-layer-down, starting-line, unseen, tiny.
        """,
    ),
    "recheck": Command(
        options.RecheckOptions,
        """Find out whether tuned configs still hold after an upgrade.

        Compares machine code first (no GPU needed), then times configs in use and known rivals. With --budget, sweeps
        sizes whose ranking moved, and confirms the others. TABLE is a file that export wrote; default: the tables in
        use. Exits 1 if a config is beaten.
        """,
        """
        $ fp8tune recheck --arch sm_90
        $ fp8tune recheck softmax_sm_90.py --recording run.json --budget 5m
        """,
        usage="[TABLE]",
    ),
    "show": Command(
        options.ShowOptions,
        """Show the best configs and what they gain over today's.

        SIZE, such as K=1408 or M=16640,K=1408, keeps matching sizes; a single match shows all configs and why the pick
        won. A recording may stand for KERNEL.
        """,
        """
        proven     confirmed in fresh processes: no rival is over 1.5 % faster
        open       confirmed, but noise may hide a rival that is over 1.5 % faster
        alone      one config was timed: nothing to compare
        quick      coarse pass in one process, not confirmed
        stale      measured with other code, Triton or driver than this GPU runs now
        published  reported by others, not measured here
        wrong      no config gives the right output, so there is no pick

        $ fp8tune show colwise M=16640,K=5120,G=16
        """,
        usage="[KERNEL [SIZE]]",
    ),
    "export": Command(
        options.ExportOptions,
        """Write the best configs as a table, a diff or other formats.

        Without --for, updates the table that fp8tune-kernels reads: the committed one inside a checkout of fp8tune,
        else your own. Leaves out quick, stale and simulated picks. Needs no GPU.
        """,
        """
        $ fp8tune export --arch gfx942
        $ fp8tune export --arch sm_90 --check --db results.db
        $ fp8tune export --for diff --kernel ops:softmax -o softmax.diff
        $ fp8tune export --for vllm --kernel moe:fused -o configs
        """,
    ),
    "compare": Command(
        options.CompareOptions,
        """Judge whether a change made kernels slower, faster or wrong.

        A and B are revisions, or WORKTREE; A...B starts at their merge base. A GPU times both in turns. Without one,
        outputs are compared on small sizes, with Triton's interpreter; with --db, recorded results are compared. A..A
        shows the noise. Exits 1 on REGRESSION or WRONG, 3 on OPEN.
        """,
        """
        $ fp8tune compare main..branch
        $ fp8tune compare main...branch --format markdown > comment.md
        $ fp8tune compare main...branch --outputs-only
        """,
        usage="A..B",
    ),
    "report": Command(
        options.ReportOptions,
        """Write one HTML file with charts of all results.

        Works offline. Needs pip install 'fp8tune[report]'.
        """,
        "$ fp8tune report --kernel colwise -o colwise.html",
    ),
    "doctor": Command(
        options.DoctorOptions,
        """Find problems with this machine, a database or tuned files.

        KERNEL: also check on this GPU that its lookup key covers everything that changes which config wins. Exits 1 on
        an error, 3 if a key stays open.
        """,
        """
        $ fp8tune doctor --db results.db
        $ fp8tune doctor --configs vllm/model_executor/layers/fused_moe/configs
        """,
        usage="[KERNEL]",
    ),
    "db import": Command(
        options.ImportOptions,
        """Merge other databases, published results or tuned files.

        Reads .db, .db.xz, CSV, Triton caches, and JSON of vLLM, SGLang and HF.
        """,
        "$ fp8tune db import other.db ~/.triton/cache",
        usage="PATH...",
    ),
    "db prune": Command(
        options.PruneOptions,
        """Make a database small enough to commit.

        Keeps picks, confirmations, and the 28 fastest others of each size.
        """,
        "$ fp8tune db prune --db results.db --archive full.db.xz",
    ),
    "db forget": Command(
        options.ForgetOptions,
        """Delete results, after a question.

        TARGET is KERNEL, KERNEL@SIZE or trial:17.
        """,
        "$ fp8tune db forget colwise@M=16640,K=5120 --yes",
        usage="TARGET...",
    ),
}

"""Every object of the JSON that commands print, field by field. The reference pages are made of this.

:data:`DOCUMENTS` has one entry for each function that makes an object which is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fp8tune.render.fields import Document, Field, field

INTS = "object of integers"
INTS_OR_NULL = "object of integers or null"
PORTION = "share, 0 to 1"

KERNEL = field("kernel", "text", "the kernel's name, `module:attribute` for one from elsewhere")
ARCH = field("arch", "text", "the GPU arch, such as `sm_90`")
DEVICE = field("device", "text", "the device's name; empty where no device was involved")
KIND = field("kind", "text", "`measured`, `published`, `static`, `interpreter` or `simulated`")
SHAPE = field("shape", INTS, "the problem's sizes by name")
ROUTING = field("routing", "text or null", "how rows spread over groups; `none` without groups")
LAYOUT = field("input_layout", "text or null", "`contiguous`, `transposed`, or `recorded-` and a launch's id")
IN_DTYPE = field("in_dtype", "text or null", "the inputs' dtype")
FP8_DTYPE = field("fp8_dtype", "text or null", "the outputs' FP8 dtype; null for a kernel without one")
SCALE_MODE = field("scale_mode", "text or null", "`power-of-two` or `exact`, MXFP8 `floor` or `rceil`")
SEED = field("seed", "integer", "seeds values and group layout")
CONFIG = field("config", INTS, "the launch config")
TIME = field("time_us", "number or null", "the time; null unless right and timed")
REASON = field("reason", "text", "why it is not `ok`, or what was noted; empty otherwise")
STATUS = field("status", "text", "`ok`, `wrong`, `compile_error`, `out_of_resources` and so on")
UNIT_SHAPES = field("shapes", "list of text or null", "the sizes of its problems")
SUBJECT = (KERNEL, ARCH, DEVICE, KIND, SHAPE, ROUTING, LAYOUT)
DTYPES = (IN_DTYPE, FP8_DTYPE, SCALE_MODE)
VERSIONS = (field("torch", "text", "torch's version"), field("triton", "text", "Triton's version"))
N = field("n", "integer", "processes that the time rests on")
NOISE = field("noise_floor", "number or null", "how far the default was from itself in the finals", PORTION)
VERDICT = field("verdict", "text or null", "what is known of the pick; null for published rows")
SHARE = field("ceiling_share", "number or null", "of what the hardware gives")
BOUND = field("bound", "text or null", "what the share is of: `memory` or `compute`")
FLOPS = field("flops", "integer or null", "operations of the problem, where its kernel declares them", "flop")
PEAK = field("peak_flop_per_s", "number or null", "a dense GEMM of the input dtype in the same run")
CHECK = field("check", "text", "by which check outputs were right")
NOTE = field("note", "text", "what the source adds")
SOURCE = field("source", "text", "the publication")


def _row(value: str) -> Field:
    return field("row", "text", f"`{value}`")


def _config(meaning: str) -> Field:
    return field("config", INTS_OR_NULL, meaning)


TIMED = (TIME, replace(REASON, meaning="why there is no time, or why it does not count"))

WRONG_SHARES = (
    field("wrong_codes_share", "number or null", "of FP8 codes that differ from the reference"),
    field("wrong_scales_share", "number or null", "of scales that differ"),
)

WINNER = (
    *SUBJECT,
    *DTYPES,
    _config("the pick; null where a source names none"),
    replace(STATUS, meaning="`ok`"),
    TIME,
    replace(REASON, meaning="empty"),
    SHARE,
    N,
    replace(SOURCE, type="text or null", meaning="the publication; null for rows of our own"),
    VERDICT,
    NOISE,
    field("runner_up", INTS_OR_NULL, "the next best config that was timed; it may be faster than the pick"),
    field("runner_up_us", "number or null", "its time"),
    field("runner_up_stage", "text or null", "the stage that timed it beside the pick: `final` or `screen`"),
    field(
        "why_not_runner_up",
        "text",
        "`tied`, `default stays`, `committed stays`, `too short` or `coarse pass`; empty where it is slower in finals",
    ),
    field("today", INTS_OR_NULL, "the config that a launch uses without the pick"),
    field("today_origin", "text or null", "its source: `own table`, `shipped table`, `recording` or `default`"),
    field("speedup", "number or null", "its time over the pick's; 1 where the pick is in use", "ratio"),
    field("timing", "text", "`gated`, or `events` for rows of fp8tune 0.2; empty where no GPU was timed"),
    field("codegen", "text", "settings that change machine code, such as `fp_fusion=1`"),
)

PROTOCOL = (
    field("screen_rounds", "integer", "rounds of the screen"),
    field("screen_band", "number", "finalists lie within this of the apparent best", PORTION),
    field("screen_sigmas", "number", "or within so many standard deviations"),
    field("finalists", "integer", "how many go to the finals at most"),
    field("processes", "integer", "fresh processes before the first decision"),
    field("rounds", "integer", "rounds in each process"),
    field("more_processes", "list of integers", "processes in all at the later decisions"),
    field("tie_band", "number", "configs this close are equally fast", PORTION),
    field("keep_band", "number", "the incumbent stays until it is slower by more", PORTION),
    field("alpha", "number", "chance of a false proof in one row", PORTION),
    field("fastest", "integer", "finalists that are in for their times alone"),
    field("screen_error", "number", "standard deviation of a screened log time"),
    field("edge_sigmas", "number", "this near to the tie band's edge more processes follow", "standard errors"),
)

RIVAL = (TIME, field("ratio", "number or null", "its time over ours; null where an output is wrong"), REASON)

STEP = (
    field("contender", "text", "whose step"),
    field("step", "text", "what was timed, such as `fwd+bwd`"),
    *TIMED,
)

SIDE = (
    field("name", "text", "the revision as it was given"),
    field("commit", "text", "its commit; empty where it has none"),
)

EXPORTED = (
    DEVICE,
    SHAPE,
    CONFIG,
    field("time_us", "number or null", "its time"),
    VERDICT,
    CHECK,
    field("evidence", "text", "what the pick rests on, as exported files say it"),
)

FILE = (
    field("path", "text", "where it is"),
    field("state", "text", "`written`, `would be written`, `stale` or `unchanged`"),
)

FEWEST = (
    field("within", "number", "how much slower a problem may become", PORTION),
    field("configs", "list of objects of integers", "the configs that suffice"),
    field("worst_loss", "number", "of the problem that loses most", PORTION),
    field("mean_loss", "number", "over all problems", PORTION),
)

COVERING = (
    *FEWEST,
    field("before", "integer", "configs that the kernel declares"),
    field("others", "list of objects", "the same for other bounds", of=FEWEST),
    field(
        "wrong",
        "list of objects",
        "configs whose output was wrong, in no list",
        of=(CONFIG, field("problems", "integer", "on how many problems")),
    ),
)

SUMMARY = (
    field("format", "text", "the format"),
    KERNEL,
    ARCH,
    field("devices", "list of texts", "whose picks they are"),
    field("problems", "list of objects", "each with its config", of=EXPORTED),
    field("files", "list of objects", "what was written", of=FILE),
    field("notices", "list of texts", "what was left out, and why"),
    field("next", "text", "what to do with the files"),
)

RECORDED_KERNEL = (
    KERNEL,
    field("launches", "integer", "all launches"),
    field("distinct", "integer", "launches that differ in more than values"),
    field("keys", "integer", "distinct keys of `@triton.autotune`"),
    field("configs", "integer", "configs that it declares"),
    field("gpu_share", "number or null", "of the GPU time of all recorded kernels"),
    field("tuning_s", "number", "spent tuning at run time, over all processes"),
    field("refusal", "text", "why it cannot be swept; empty if it can be"),
    field("skipped", "integer", "launches that were only counted"),
)

COMPARED = (
    KERNEL,
    replace(ARCH, meaning="the GPU arch; empty without rows"),
    SHAPE,
    field("before_us", "number or null", "the first side's time"),
    field("after_us", "number or null", "the second side's time"),
    field("ratio", "number or null", "after over before: above 1 is slower"),
    field("verdict", "text", "`CLEAR`, `REGRESSION`, `IMPROVEMENT`, `SAME-CODE` and so on"),
    ROUTING,
    LAYOUT,
    SCALE_MODE,
    replace(DEVICE, type="text or null"),
    field("reason", "text", "why there is no verdict on the times; empty otherwise"),
    field("interval", "list of numbers or null", "95 % interval of the ratio", "ratio"),
    field("smallest_detectable", "number or null", "the least ratio called a regression in 95 % of runs", "ratio"),
    field("n", "integer", "rounds that the verdict rests on; of recorded rows processes"),
    field("control", "number or null", "ratio of the control arm, which runs the first side again"),
    field("control_quiet", "boolean or null", "whether the control arm moved by no more than chance"),
    field("blocks", "integer", "timed blocks of those rounds"),
    field("ungated_blocks", "integer", "of these, timed with the host's time, because the launch waits for the GPU"),
    field("throttled_blocks", "integer", "of these, timed while the device was throttled"),
    field("throttle_reasons", "list of texts", "why it was"),
    field("before_config", INTS_OR_NULL, "the first side's config"),
    field("after_config", INTS_OR_NULL, "the second side's config"),
)

INTERVAL = field("interval", "list or null", "its lower and upper bound, each one-sided and a number or null", "ratio")

TRIED = (
    _config("null where a source names none"),
    STATUS,
    field("stage", "text", "`final` or `screen`: times of one are not compared with those of the other"),
    TIME,
    field("slowdown", "number or null", "its time over the pick's in the same stage"),
    INTERVAL,
    replace(REASON, meaning="why it has no time; empty where it has"),
)

PAIR = (
    CONFIG,
    field("rival", INTS, "the config it is compared with"),
    field("slowdown", "number", "time of the config over that of the rival"),
    replace(INTERVAL, type="list"),
)

LOOKUP = (
    field("key", INTS, "what the table is asked for"),
    field("passed", "list of texts", "steps that had no row: `key`, `nearest`, `fallback`"),
    field("step", "text", "where the config comes from: one of these, or `default`"),
    replace(CONFIG, meaning="what is launched"),
    field("row_key", INTS_OR_NULL, "the key of the row that was taken; null for the fallback row and the default"),
    field("row_device", "text", "the device that the row is for; empty for any of the arch"),
    field("is_own", "boolean", "whether the row is of your own table"),
)

QUEUED_UNIT = (
    field("sweep", "text", "the key of the sweep it is of"),
    field("command", "text", "what queued it, without passwords"),
    replace(DEVICE, meaning="the device name that it is for"),
    field("unit", "text", "the unit's key"),
    KERNEL,
    replace(UNIT_SHAPES, type="list of text"),
    field("state", "text", "`waiting`, `running`, `done` or `failed`"),
    field("worker", "text", "who has it or had it last: host, process and the GPU's first digits"),
    field("attempts", "integer", "how often it was taken, but for those that gave it back in order"),
    field("since_s", "number or null", "since it was taken; null while it waits"),
    field("seconds", "number or null", "that it took; null unless done", "s"),
    field("lease_left_s", "number or null", "until its lease ends; null unless running"),
    field("reason", "text", "why it failed or came back, or that no config is right on a problem; empty otherwise"),
    field("expected_s", "number", "about what it takes on one device"),
)

DOCUMENTS: Mapping[str, Document] = {
    "trial": Document(
        "sweep",
        "One trial, on one line.",
        (
            *SUBJECT,
            *DTYPES,
            CONFIG,
            STATUS,
            TIME,
            REASON,
            field("stage", "text", "`screen`, `final`, or `duplicate`: the default under its second name"),
            field("round", "integer", "counted from 0 within a process"),
        ),
    ),
    "worker_event": Document(
        "worker",
        "What became of a unit of work or of the worker, on one line; what does not apply is null.",
        (
            field(
                "event",
                "text",
                "`started`, `taken`, `done`, `failed`, `given back`, `refused`, `waiting` or `ended`",
            ),
            field("worker", "text or null", "host, process and the GPU's first digits"),
            field("unit", "text or null", "the unit's key"),
            field("sweep", "text or null", "the key of the sweep it is of"),
            replace(KERNEL, type="text or null"),
            UNIT_SHAPES,
            field("reason", "text", "why it failed, went back or ended; what was found when done"),
            field("attempt", "integer or null", "counted from 1"),
            field("seconds", "number or null", "that the unit took", "s"),
            field("trials", "integer or null", "of the unit, stored by this worker"),
            field("done", "integer or null", "units that this worker did"),
            field("failed", "integer or null", "units that failed here"),
            field("running", "integer or null", "units that other workers have"),
            field("waiting", "integer or null", "units that wait for this device name"),
        ),
    ),
    "queue": Document(
        "queue",
        "What is queued.",
        (field("units", "list of objects", "every unit of work", of=QUEUED_UNIT),),
    ),
    "winner": Document("show", "The pick of one problem.", WINNER),
    "bounded_winner": Document(
        "show, where a kernel declares operations or another check than exact",
        "The same, with what the share is of.",
        (*WINNER, BOUND, FLOPS, PEAK, CHECK),
    ),
    "explanation": Document(
        "explain",
        "How the pick of one problem came about.",
        (
            field("winner", "object", "the pick, as `show` prints it", of=(*WINNER, BOUND, FLOPS, PEAK, CHECK)),
            field("configs", "list of objects", "every config tried: the pick, then by stage and time", of=TRIED),
            field("processes", "integer", "fresh processes of the finals; 0 without finals"),
            field("pairs", "list of objects", "every finalist against every other", of=PAIR),
            field("why", "list of texts", "how the verdict follows, a sentence each"),
            field("lookup", "object or null", "what a lookup gives; null where rows name no key", of=LOOKUP),
        ),
    ),
    "tally": Document(
        "show --failed, show --arch interpreter",
        "The configs of one problem, counted by outcome.",
        (
            *SUBJECT,
            FP8_DTYPE,
            SCALE_MODE,
            field("configs", "integer", "all of them"),
            field("ok", "integer", "right"),
            field("wrong", "integer", "wrong outputs"),
            field("other", "integer", "failed in another way"),
            field("pruned", "integer", "not tried, for a hardware reason"),
            _config("the first that failed, wrong ones first"),
            replace(STATUS, type="text or null", meaning="how that one ended"),
            replace(REASON, meaning="why"),
        ),
    ),
    "published": Document(
        "show --op, bench --op",
        "What others published of a whole operation.",
        (
            _row("published"),
            field("operation", "text", "`grouped-mm`"),
            SOURCE,
            DEVICE,
            ARCH,
            field("recipe", "text", "what the scaled times are of, such as `mxfp8`"),
            SHAPE,
            field("bf16_fwd_us", "number", "forward in bf16"),
            field("scaled_fwd_us", "number", "forward in the recipe"),
            field("bf16_fwd_bwd_us", "number", "forward and backward in bf16"),
            field("scaled_fwd_bwd_us", "number", "forward and backward in the recipe"),
            field("speedup_fwd_bwd", "number", "bf16 over the recipe", "ratio"),
            NOTE,
            field("impossible", "text", "why it cannot be right as printed; empty otherwise"),
        ),
    ),
    "calibration": Document(
        "calibrate",
        "The noise of this device, and what its finals go by from now on.",
        (
            ARCH,
            DEVICE,
            field("measured", "object of numbers", "name -> value; the unit ends the name"),
            field("protocol", "object", "the numbers of its finals", of=PROTOCOL),
        ),
    ),
    "variation": Document(
        "lint",
        "One argument that a lookup key leaves out, varied.",
        (
            KERNEL,
            field("key", INTS, "the lookup key"),
            field("argument", "text", "what was varied"),
            field("value", "integer or text", "to what"),
            SHAPE,
            ROUTING,
            LAYOUT,
            SCALE_MODE,
            SEED,
            replace(CONFIG, meaning="the key's pick"),
            field("best_config", INTS, "the best of the variation"),
            field("slowdown", "number or null", "the pick's time over the best one's"),
            field("allowed", "number", "what it may be", "ratio"),
            field("processes", "integer", "fresh processes that timed both again; 0 for none"),
            field("verdict", "text", "`holds`, `unclear` or `moves`"),
        ),
    ),
    "finding": Document(
        "doctor",
        "One thing that was looked at.",
        (
            field("level", "text", "`ok`, `warning` or `error`"),
            field("what", "text", "what was found"),
            field("fix", "text", "what to do; empty for nothing"),
        ),
    ),
    "bench_row": Document(
        "bench",
        "One problem.",
        (
            _row("problem"),
            KERNEL,
            ARCH,
            DEVICE,
            *VERSIONS,
            SHAPE,
            ROUTING,
            LAYOUT,
            *DTYPES,
            SEED,
            _config("the exported config"),
            field("bytes_moved", "integer", "the least that any implementation moves", "bytes"),
            *TIMED,
            *WRONG_SHARES,
            field("gb_per_s", "number or null", "the rate", "GB/s"),
            field("ceiling_us", "number or null", "the time at the ceiling"),
            field("ceiling_gb_per_s", "number or null", "what memory gives"),
            SHARE,
            BOUND,
            FLOPS,
            PEAK,
            field("ceiling_reason", "text", "why there is no ceiling; empty otherwise"),
            field(
                "rivals",
                "object of objects",
                "`torch.compile`, `torchao` -> theirs",
                of=(*RIVAL, *WRONG_SHARES),
                keyed=True,
            ),
        ),
    ),
    "bench": Document(
        "bench, at the end",
        "One kernel.",
        (
            _row("kernel"),
            KERNEL,
            CHECK,
            field("geomean_ratio", "object of numbers", "rival -> geometric mean of the ratios, or null", "ratio"),
            field("host", "object of objects", "whose call -> host time on a 64x64 input", of=TIMED, keyed=True),
        ),
    ),
    "grouped_row": Document(
        "bench --op",
        "One layer of an operation.",
        (
            field("row", "text", "the operation"),
            field("recipe", "text", "`fp8` or `mxfp8`"),
            field("emulated", "boolean", "whether a bf16 GEMM stands in: its times say nothing of the recipe"),
            ARCH,
            DEVICE,
            *VERSIONS,
            field("layer", "text or null", "its name in the shape set"),
            SHAPE,
            ROUTING,
            SEED,
            field("groups", "list of integers or null", "rows of each group, where they were given"),
            field("padded", "boolean", "whether our groups had to be padded, inside what is timed"),
            field("steps", "list of objects", "what was timed", of=STEP),
            field("fwd_bwd_us", "object of numbers", "contender -> forward and backward, or null"),
            field("speedups_fwd_bwd", "object of numbers", "contender -> bf16 over it, or null", "ratio"),
            field("auto", "text or null", 'what `precision="auto"` took: `fp8` or `bf16`'),
            field("sqnr_db", "object of objects", "contender -> result -> SQNR; null is exact"),
            field("speedup_fwd", "number or null", "bf16 over ours, forward alone", "ratio"),
            field("speedup_fwd_bwd", "number or null", "with both gradients", "ratio"),
            field("torchao_speedup_fwd_bwd", "number or null", "bf16 over torchao", "ratio"),
            field("gemms_us", "number or null", "the three GEMMs alone"),
            field("bound", "number or null", "bf16 over those: the speedup if casts were free", "ratio"),
            field("bound_share", "number or null", "how much of that is reached"),
            field("parts", "object of objects", "kernel of our step -> its time alone", of=TIMED, keyed=True),
            field("rest_us", "number or null", "what the parts do not explain"),
            field("peak_bytes", "object of integers", "contender -> memory beyond operands, or null"),
        ),
    ),
    "grouped_means": Document(
        "bench --op, at the end",
        "A geometric mean over the layers.",
        (
            _row("mean"),
            field("operation", "text", "the operation"),
            field("what", "text", "such as `fp8 over bf16`: above 1 the first is faster"),
            field("geomean", "number", "over the rows", "ratio"),
            field("rows", "integer", "how many"),
            field("worst", "number", "the least", "ratio"),
            field("worst_layer", "text or null", "of which layer"),
            field("worst_shape", INTS, "and which sizes"),
        ),
    ),
    "comparison": Document(
        "compare",
        "Two revisions.",
        (
            field("before", "object", "the first side", of=SIDE),
            field("after", "object", "the second side", of=SIDE),
            field("rows", "list of objects", "one for each problem: the next table"),
            field("geomean", "number or null", "of all ratios", "ratio"),
            field("geomean_interval", "list of numbers or null", "its 95 % interval", "ratio"),
            field("control", "number or null", "the same of the control arm"),
            field("control_quiet", "boolean or null", "whether that moved by no more than chance"),
            field("exit_code", "integer", "what the command ends with"),
        ),
    ),
    "imported": Document(
        "import",
        "What became of one file, on one line.",
        (
            field("path", "text", "the file"),
            field("added", "integer", "rows that were new"),
            field("already_there", "integer", "rows that were there before"),
        ),
    ),
    "forgotten": Document(
        "forget",
        "What was removed.",
        (
            field("database", "text", "the database, without a password"),
            field("rows", "list of texts", "the rows that were named, such as `results:17`"),
            field("removed", "object of integers", "table -> how many rows of it went"),
        ),
    ),
    "exported_table": Document(
        "export",
        "What became of the table.",
        (
            field("path", "text", "the module"),
            field("state", "text", "`written`, `unchanged`, `stale` or `up to date`"),
            field("added", "integer", "rows that are new"),
            field("changed", "integer", "rows with another config"),
            field("unchanged", "integer", "rows that stay"),
            field("removed", "integer", "rows that went: `--prune`"),
            field("prunable", "integer", "of those that stay, rows that the database could give and does not"),
        ),
    ),
    "compared": Document("compare, in rows", "One row of a comparison.", COMPARED),
    "summary": Document("export --for FORMAT", "What was exported.", SUMMARY),
    "shrunk_summary": Document(
        "export --for diff",
        "The same, with the fewest configs that suffice.",
        (*SUMMARY, field("covering", "object", "the fewest configs", of=COVERING)),
    ),
    "compacted": Document(
        "compact",
        "What became of a database.",
        (
            field("path", "text", "the file that was written"),
            field("bytes_before", "integer", "the size of the database"),
            field("bytes_after", "integer", "the size of the file that was written"),
            field("results_removed", "integer", "configs of a problem that are gone"),
            field("trials_removed", "integer", "timed blocks and failed attempts that are gone"),
            field("results_kept", "integer", "configs of a problem that remain"),
            field("archive", "text or null", "the archive; null if none was asked for"),
            field("archive_bytes", "integer or null", "its size"),
        ),
    ),
    "recording": Document(
        "record, show --recording",
        "The kernels that a program ran.",
        (
            field("recording", "text", "the file"),
            replace(DEVICE, meaning="the device's name; empty on the interpreter"),
            ARCH,
            field("processes", "integer", "processes of the program that ran kernels"),
            field("kernels", "list of objects", "those that take most of the GPU's time first", of=RECORDED_KERNEL),
            field("next", "text or null", "the command to run next; null where nothing can be swept"),
        ),
    ),
}
"""The name of the function that makes an object -> what it holds."""

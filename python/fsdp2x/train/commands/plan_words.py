"""What `fsdp2x plan` says next to its table: rows in words (`--explain`), and the options for float32 parameters."""

from __future__ import annotations

from fsdp2x.plan.bound import MemoryBound
from fsdp2x.plan.report import MemoryReport, columns, readable

WORDS = {
    "shards": "this rank's rows of all parameters, in the dtype that the optimizer updates; its share of everything",
    "gradients": "the same of the gradients, in the parameters' dtype: they are there from a backward to the step",
    "optimizer": "its state, two moments for AdamW, of this rank's rows",
    "buffers, unsharded parameters": "what every rank has whole: buffers and ignored parameters",
    "rows kept after forward": "with a number for reshard_after_forward: rows of a smaller world, until backward",
    "copies of shards on the device": "of units whose shards are the host's, with offload gradients",
    "kept for wire formats": "this rank's encoded rows, and what int8 has rounded away of the whole model's gradients",
    "at rest": "the sum of the rows above: what lies there between two steps",
    "gather slots": "whole parameters of the units that are gathered at once, in the dtype of computation",
    "slots and staging": "one pool over a process group: slots, what gathers receive, what reductions send",
    "scratch": "what ranks that share memory hand their gradients over in",
    "waiting for the all-reduce": "gradients that are summed over the shards, not yet over the replicas (HSDP)",
    "gradients on their way to the host": "blocks of the host that casts them, with offload",
    "gradients of autograd": "whole gradients that backward has made and nobody has reduced yet",
    "of slots to autograd at once, beyond gradients": "on a device the last rows take turns: the most at any moment",
    "moments of a step": "what the optimizer brings to the device while it steps, with offload optimizer",
    "peak, without activations": "the most at any moment of a step; activations come on top",
    "of it in host memory": "the part that the host holds, with offload",
    "of it on the device": "the rest",
    "sent in a step": "bytes that leave this rank: gathers of forward and backward, reductions of backward",
}
BOUND = "what any engine needs that gathers and reduces one unit at a time, from the parameters and settings alone"
COLUMNS = {
    "elements": "numbers of the whole unit",
    "shard": "bytes of this rank's rows",
    "pad": "bytes of padding in them: rows that do not divide by the ranks",
    "slot": "bytes of the whole unit while it is gathered",
    "scratch": "bytes that a reduction of the unit takes",
    "reshard": "whether it is freed after its forward, and gathered again in backward",
}


def remark_on_dtype(dtype: str, param_dtype: str | None) -> list[str]:
    """A line where parameters are counted in the 16 bits that the model's config has, which are its files'.

    Training as `fsdp2x train` does keeps float32 parameters, and computes in fewer bits.
    """
    if dtype not in ("bfloat16", "float16"):
        return []
    options = f"--dtype float32 --param-dtype {param_dtype or dtype}"
    return [
        f"parameters are counted in {dtype}, as the config says; fsdp2x train keeps float32 ones by default: {options}"
    ]


def above_bound(report: MemoryReport, bound: MemoryBound) -> list[str]:
    """Lines that say what a plan holds above its lower bound, and why."""
    at_rest = report.resting_bytes - bound.resting_bytes
    in_step = report.peak_bytes - bound.peak_bytes - at_rest
    use = "to run next to the compute" if report.step_bytes is not None else "that stay for the next step"
    return [
        f"{readable(at_rest)} above the bound at rest: 64-byte alignment, uneven rows, and rows without a bound",
        f"{readable(max(in_step, 0))} more at the peak: buffers of gathers and reductions {use}",
    ]


def explanation(report: MemoryReport) -> str:
    """The rows of this report, and the columns of its units, in words."""
    names = [name for name, size, note in report.sizes() if size or note or name == "at rest"]
    rows = [*((name, WORDS[name]) for name in names), ("lower bound", BOUND)]
    heads = list(COLUMNS.items())
    return "\n".join(["columns of units", *columns(heads, {0, 1}), "", "rows", *columns(rows, {0, 1})])

"""The paper's claims and our runs: `python -m analysis.make claims --runs DIR ... --out DIR`.

Writes claims.md: for each claim the paper's number, ours with an interval over seeds, the margin,
and a verdict. All our numbers are computed from the runs and benchmark lines below the folders.
Claims are judged by runs at mini scale, or at true size where they say so; no row judges runs at
paper scale. Exploratory rows and checks without runs are left out. A last table scores the
predictions of experiments/PROTOCOL.md.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from analysis import cli, evidence, judges, naming, paper, size_judges, spike_judges, spike_marks
from analysis.evidence import HIGHEST, LARGE, MINI, SPIKES, TIMES, TRUE_SIZE, Evidence, Finding
from analysis.load import NoRunsError
from analysis.run_files import as_path
from lowprec.runs import durable

VERDICTS = {  # worst first
    evidence.NOT: "fails",
    evidence.UNDECIDED: "open",
    evidence.NO_RUNS: "open",
    evidence.REPRODUCED: "holds",
}
NEEDED = {  # at true size, for claims that cannot be judged yet
    "C4": "needs a run in which that fp8 fails",
    **dict.fromkeys(("C9", "C10", "C11"), "needs all 30 runs of ViT-L/14"),
    "C12": "needs 4 runs",
}


@dataclass(frozen=True)
class Claim:
    """A statement, the paper's number, a margin and the judge.

    `margin` puts into words the numbers that the judge applies; they are in `analysis/evidence.py`,
    `size_judges.py` (true size) and `paper.py`. `short` names what the row decides in the table of
    verdicts, which leaves out rows without it (exploratory ones and checks). The judge sees the
    runs at `scale`, once those have ended that `needs` names (see `Evidence.need_all`).
    """

    number: str
    text: str
    paper: str
    margin: str
    judge: Callable[..., Finding]
    short: str = ""
    scale: str = MINI
    needs: tuple = ()


SIZES = ("accuracy_vs_size", "loss_curves")
ONE_PRODUCT = ("one_product", "accuracy_vs_size")  # the second has bf16
CLIPPING = ("stability", "update_clipping")
SAME = partial(judges.same, varied="precision.label", studies=SIZES)
AT_BEST_RATE = {"varied": "precision.label", "studies": (size_judges.EQUALITY,)}
PRECISION = partial(judges.higher, varied="precision.label", studies=SIZES)
OPTIMIZERS = partial(judges.higher, varied="optimizer.name", studies=CLIPPING)
BETA2 = partial(judges.higher, varied="optimizer.beta2", studies=CLIPPING)
STABLE = partial(
    spike_judges.fewer,
    varied="optimizer.name",
    optimizers=("stable_adamw", "adamw"),
    least_beta2=0.99,
)
BY_EYE = "(read from draft plots, +-0.2)"
TREND = (
    f"one-sided Page test over the levels that the study's file names, within seeds: p below "
    f"{evidence.ALPHA:g} after Holm's correction for the four settings; not reproduced if they "
    "fall likewise (rule of 2026-11-26, after these runs)"
)
ABOVE_0 = "interval above 0"
REMAINS = (
    "; not reproduced if the interval of the number that remains is above 0 (rule made after the "
    "runs; without it, undecided)"
)
MATCHES = f"90% interval within +-{evidence.MARGIN:g} points; the validation loss is not judged"


def _papers(precision: str) -> str:
    """Returns the paper's accuracy for a precision minus that for bf16, by model."""
    parts = []
    for model, value in paper.ACCURACY_BY_SIZE[precision].items():
        base = paper.ACCURACY_BY_SIZE["bf16"][model]
        difference = "diverged" if value is None else f"{value - base:+.1f}"
        parts.append(f"{naming.MODELS[model]} {difference}")
    return f"{'; '.join(parts)} {BY_EYE}"


_H14 = {name: values[paper.ACCURACY_MODEL] for name, values in paper.ACCURACY_BY_SIZE.items()}
_ACC = paper.ACCURACY
_LOW, _HIGH = paper.END_TO_END
_SAVES = f"saves {_LOW:g} to {_HIGH:g}% of the time (A100, fp16)"
_NUM, _OF = paper.FOLLOWING
_NATS = f"{spike_marks.LARGE:g} nat"
_TESTED = (
    "one-sided t tests at 5%, Holm's correction for four comparisons of recipes (PROTOCOL.md, true "
    "size)"
)
_SIZE = partial(size_judges.compare, how=size_judges.HIGHER)
ALONE = {  # what only the weight gradient in int8 costs: the runs compared with it, the margin
    "alone in int8 costs accuracy": ("bf16", "interval of bf16's accuracy minus its above 0"),
    "in int8 costs more accuracy than the output in int8": ("output int8", ABOVE_0),
    "in int8 costs more accuracy than the input gradient in int8": ("grad_input int8", ABOVE_0),
}
# of ViT-L/14: all 30 runs of its study, by the rules of experiments/PROTOCOL.md
WATCHED = {
    "scale": TRUE_SIZE,
    "needs": ("stability", "optimizer.name", ("adamw", "adamw_clip", "stable_adamw")),
}
STABLE_AT_SIZE = partial(STABLE, least_beta2=0.98)
CLAIMS = (
    Claim("C1", "SwitchBack int8 matches bf16's accuracy, mini scale",
          f"within {paper.EQUAL:g} point; {_papers('switchback')}", MATCHES,
          partial(SAME, one="switchback", other="bf16", planned=size_judges.EQUALITY),
          short="equal to bf16"),
    Claim("C1", "SwitchBack int8 matches bf16's validation loss, true size",
          f"accuracy within {paper.EQUAL:g} point; {_papers('switchback')}",
          f"loss within +-{size_judges.MARGIN:g}%: {_TESTED}",
          partial(size_judges.compare, one="switchback", other="bf16", how=size_judges.EQUAL),
          short="loss equal to bf16's", scale=TRUE_SIZE),
    Claim("C1", "SwitchBack int8 matches bf16's R@1, true size",
          f"accuracy within {paper.EQUAL:g} point; {_papers('switchback')}",
          f"90% interval within +-{evidence.MARGIN:g} points",
          partial(judges.same, one="switchback", other="bf16", **AT_BEST_RATE),
          short="R@1 equal to bf16's", scale=TRUE_SIZE),
    Claim("C1", "SwitchBack int8 beats LLM.int8() training, mini scale",
          f"{_H14['switchback'] - _H14['llm_int8']:+.1f} points {BY_EYE}", ABOVE_0,
          partial(PRECISION, one="switchback", other="llm_int8"), short="above LLM.int8()"),
    Claim("C1", "SwitchBack int8 has a lower validation loss than LLM.int8(), true size",
          f"accuracy {_H14['switchback'] - _H14['llm_int8']:+.1f} points {BY_EYE}",
          f"above 0: {_TESTED}", partial(_SIZE, one="llm_int8", other="switchback"),
          short="loss below LLM.int8()'s", scale=TRUE_SIZE),
    Claim("C1", "SwitchBack int8 has a higher R@1 than LLM.int8(), true size",
          f"accuracy {_H14['switchback'] - _H14['llm_int8']:+.1f} points {BY_EYE}", ABOVE_0,
          partial(judges.higher, one="switchback", other="llm_int8", **AT_BEST_RATE),
          short="R@1 above LLM.int8()'s", scale=TRUE_SIZE),
    Claim("C2", "LLM.int8() training loses accuracy, mini scale", _papers("llm_int8"),
          "interval of bf16's accuracy minus LLM.int8()'s above 0",
          partial(PRECISION, one="bf16", other="llm_int8"),
          short="loses accuracy"),
    Claim("C2", "LLM.int8() has a higher validation loss than bf16, true size",
          _papers("llm_int8"), f"above 0: {_TESTED}",
          partial(_SIZE, one="llm_int8", other="bf16"), short="higher loss", scale=TRUE_SIZE),
    Claim("C2", "LLM.int8() training loses more accuracy at larger models, mini scale",
          _papers("llm_int8"),
          "interval of the largest model's difference minus the smallest's above 0",
          partial(PRECISION, one="bf16", other="llm_int8", by_size=True),
          short="more in larger models"),
    Claim("C2", "LLM.int8() loses more at larger models, true size", _papers("llm_int8"),
          "one-sided Page test at 5% over three sizes, within seeds", size_judges.penalty_by_size,
          short="more in larger models", scale=TRUE_SIZE),
    Claim("C3", "fp8 tensor-wise fails where bf16 trains, true size", _papers("fp8_tensorwise"),
          f"two of two seeds {size_judges.FAILS:g} nat above the best bf16 run",
          size_judges.fails, short="tensor-wise fails", scale=TRUE_SIZE),
    Claim("C3", f"fp8 tensor-wise ends more than {size_judges.MARGIN:g}% above bf16's validation "
          "loss, true size", "diverges",
          f"90% interval above {size_judges.MARGIN:g}%; not reproduced if equality within it is "
          f"shown: {_TESTED}",
          partial(size_judges.compare, one=size_judges.FP8, other="bf16", how=size_judges.WORSE),
          short=f"loss ends over {size_judges.MARGIN:g}% above bf16's", scale=TRUE_SIZE),
    Claim("C3", "fp8 tensor-wise loses accuracy, mini scale", _papers("fp8_tensorwise"),
          "interval of bf16's accuracy minus fp8's above 0; a diverged run counts as 0%",
          partial(PRECISION, one="bf16", other="fp8_tensorwise",
                  studies=(*SIZES, "fp8_fixes")),
          short="tensor-wise fails"),  # which has a larger model
    Claim("C3", "SwitchBack fp8 matches bf16's accuracy, mini scale", "about equal", MATCHES,
          partial(SAME, one="fp8_switchback", other="bf16", studies=SIZES[::-1]),
          short="SwitchBack fp8 equal"),  # whose miniature has it, too
    Claim("C5", "E[abs(x_k)] grows with depth and training", "no number",
          "both ratios above 1 in every run, two seeds", judges.features, short="growth"),
    Claim("C5", "E[abs(x_k)] grows with depth and training, true size", "no number",
          "both ratios above 1 in every run, two seeds",
          partial(judges.features, studies=("weight_gradient",)),
          short="growth", scale=TRUE_SIZE),
    Claim("C5", "zero-init layer-scale stops the growth with training, true size", "no number",
          "less growth with training than in any run without it, two seeds",
          partial(judges.features, stopped="training", studies=("interventions",)),
          short="zero-init stops it with training", scale=TRUE_SIZE),
    *(Claim("C5", f"zero-init layer-scale stops the growth with {what}", "no number",
            f"less growth with {what}{measures} than in any run without it, two seeds",
            partial(judges.features, stopped=what), short=f"zero-init stops it with {what}")
      for what, measures in (("depth", ", as a ratio and in absolute terms,"), ("training", ""))),
    Claim("C6", "quantization noise of a dot product grows with its inner dimension K",
          "variance proportional to K",
          f"exponent at least 1, less a tolerance of {evidence.SLOPE:g}; a check, no verdict",
          judges.noise, scale=TIMES),
    Claim("C6", "the weight gradient must stay in 16 bits: SwitchBackQ is more accurate than "
          "LLM.int8(), which differs only in that product, mini scale", "no number", ABOVE_0,
          partial(PRECISION, one="switchback_q", other="llm_int8",
                  studies=("weight_gradient",)),
          short="weight gradient costs most"),
    Claim("C6", "the weight gradient alone in int8 raises the validation loss, true size",
          "no number", "above 0: one-sided t test at 5%",
          partial(_SIZE, one=size_judges.INT8_GRADIENT, other="bf16"),
          short="weight gradient costs most", scale=TRUE_SIZE),
    *(Claim("C6", f"the weight gradient {text}, mini scale", "no number", margin,
            partial(PRECISION, one=one, other="grad_weight int8",
                    studies=ONE_PRODUCT),
            short="weight gradient costs most")
      for text, (one, margin) in ALONE.items()),
    Claim("C6", "an int8 weight gradient in blocks of 32 x 32 costs accuracy, mini scale "
          "(exploratory)", "no number", "interval of bf16's accuracy minus its above 0",
          partial(judges.costs, recipe="grad_weight e1m6", study=size_judges.EQUALITY)),
    Claim("C7", "SwitchBack is faster end to end for ViT-H/14 than nn.Linear in the same model",
          _SAVES, f"{_LOW:g}% or more at every shape",
          partial(judges.end_to_end, baseline="high", case="switchback"),
          short="forward and backward", scale=TIMES),
    Claim("C7", "the same for whole training steps, with data, optimizer and record",
          _SAVES, f"{_LOW:g}% or more at every shape",
          partial(judges.end_to_end, baseline="high", case="switchback", slug="step"),
          short="whole steps", scale=TIMES),
    Claim("C7", "the same, compared with linear layers as an autograd function (algorithm 5)",
          _SAVES, f"{_LOW:g}% or more at every shape",
          partial(judges.end_to_end, baseline="autograd_high", case="switchback"),
          short="forward and backward", scale=TIMES),
    Claim("C7", "the same, compared with open_clip's model with compiled blocks",
          _SAVES, f"{_LOW:g}% or more at every shape",
          partial(judges.end_to_end, baseline="open_clip", case="switchback"), scale=TIMES),
    Claim("C7", "quantization is a small share of a layer's time, and a smaller one at larger dim",
          f"less than about {paper.LARGEST_SHARE:g}% of the time",
          f"at most {paper.LARGEST_TIMED_SHARE:g}%, the largest share in the paper's own timings, "
          "falling with dim",
          judges.quantize_share, short="share of quantization", scale=TIMES),
    Claim("C8", "LLM.int8() gives no speed-up for ViT-H/14", "none",
          f"saves at most {evidence.NO_GAIN:g}% of the time of algorithm 5",
          partial(judges.end_to_end, baseline="autograd_high", case="llm_int8"),
          short="no time saved", scale=TIMES),
    *(Claim("C9", f"{subject} grow{'s' * (value == HIGHEST)} with {cause}{more}", "no number",
            TREND, partial(spike_judges.trend, cause=cause, value=value),
            short=cause.removeprefix("the ") if value == SPIKES else "")
      for value, subject, more in ((SPIKES, "loss spikes", ""),
                                   (HIGHEST, "the highest loss spike", " (exploratory)"))
      for cause in spike_judges.CAUSES),
    *(Claim("C9", f"{subject} with beta2, true size{more}", "no number",
            "one-sided Page test at 5% within seeds",
            partial(spike_judges.trend, cause="beta2", value=value), short=short, **WATCHED)
      for value, subject, more, short in (
          (SPIKES, "loss spikes grow", "", "beta2"),
          (HIGHEST, "the highest loss spike grows", " (exploratory)", ""))),
    Claim("C9", "loss spikes grow with the learning rate, true size", "no number", ABOVE_0,
          partial(spike_judges.fewer, varied="optimizer.lr", least_beta2=0.99),
          short="learning rate", **WATCHED),
    *(Claim("C10", f"a loss spike follows an RMS spike of the patch embedding by 1 to 8 steps{at}",
            f"{_NUM} of {_OF} ({_NUM / _OF:.0%}), by chance about {paper.BY_CHANCE:.0%}",
            f"{evidence.SHARE:.0%} or more, with its interval above {evidence.SURE:.0%} and above "
            "chance, both from detection and from the onset",
            spike_judges.follow, short="lag of 1 to 8", **of_scale)
      for at, of_scale in (("", {}), (", true size", WATCHED))),
    Claim("C11", "StableAdamW removes the spikes, true size", "none",
          "no spikes where AdamW has some, with an interval above 0 over pairs",
          partial(STABLE_AT_SIZE, gone=True), short="StableAdamW removes", **WATCHED),
    Claim("C11", "the highest loss spike is lower with StableAdamW, true size (exploratory)",
          "none", ABOVE_0, partial(STABLE_AT_SIZE, value=HIGHEST), **WATCHED),
    Claim("C11", "a lower beta2 also removes spikes, true size", "none",
          "no spikes at the lowest beta2, with an interval above 0",
          partial(spike_judges.fewer, varied="optimizer.beta2", gone=True),
          short="lower beta2 removes", **WATCHED),
    Claim("C11", "loss spikes are rarer with gradient clipping at norm 1, true size", "none",
          ABOVE_0, partial(spike_judges.fewer, varied="optimizer.name",
                           optimizers=("adamw_clip", "adamw")),
          short="rarer with clipping", **WATCHED),
    Claim("C11", "StableAdamW removes the spikes", "none",
          f"no spikes where AdamW has some, with an interval above 0 over pairs{REMAINS}",
          partial(STABLE, gone=True),
          short="StableAdamW removes"),
    Claim("C11", f"StableAdamW removes the spikes over {_NATS} (exploratory)", "none",
          f"as above, for spikes over {_NATS}", partial(STABLE, gone=True, value=LARGE)),
    Claim("C11", f"loss spikes over {_NATS} are rarer with StableAdamW (exploratory)", "none",
          ABOVE_0, partial(STABLE, value=LARGE)),
    Claim("C11", "the highest loss spike is lower with StableAdamW (exploratory)", "none", ABOVE_0,
          partial(STABLE, value=HIGHEST)),
    Claim("C11", "KQ layer norm lowers the highest loss spike at each beta2 (exploratory)", "none",
          f"{ABOVE_0} at each beta2", spike_judges.kq_norm,
          needs=("kq_norm", "intervention.name", ("kq_norm",))),
    Claim("C11", "StableAdamW beats gradient clipping at beta2 0.99, mini scale",
          f"{_ACC['stable_adamw'][0.99] - _ACC['adamw_clip'][0.99]:+.1f} points {BY_EYE}", ABOVE_0,
          partial(OPTIMIZERS, one="stable_adamw", other="adamw_clip",
                  only={"optimizer.beta2": 0.99}),
          short="beats clipping"),
    Claim("C11", "a lower beta2 also removes spikes", "none",
          f"no spikes at the lowest beta2, with an interval above 0{REMAINS}",
          partial(spike_judges.fewer, varied="optimizer.beta2", gone=True),
          short="lower beta2 removes"),
    Claim("C11", "a beta2 that is too low costs accuracy, mini scale",
          f"0.9 minus 0.5: {_ACC['adamw'][0.9] - _ACC['adamw'][0.5]:+.1f} points {BY_EYE}", ABOVE_0,
          partial(BETA2, one=0.9, other=0.5, only={"optimizer.name": "adamw"}),
          short="too low costs"),
    Claim("C12", "a dynamic loss scale falls at spikes", "no number",
          "share of falls at loss spikes: interval above chance", spike_judges.scale_falls,
          short="falls at spikes"),
    Claim("C12", "with a fixed loss scale that skips single tensors, training continues",
          "no number", "every run reaches its end, single tensors are skipped, two seeds, and not "
          "every run with a dynamic scale reaches its end",
          spike_judges.tensor_skips, short="fixed is safe"),
)  # fmt: skip
HEADER = ("", "claim", "the paper", "our runs", "margin", "verdict")
NOTE = (
    "The paper is arXiv:2304.13013. Intervals are 95% unless stated, over seeds (Student's t) or "
    "for a share (Wilson; for C10 also over resampled runs). Accuracy is the mean R@1 of both "
    "directions. Our largest model is judged. Margins are ours. Runs are compared if they agree in "
    "every setting that affects the weights except the one named. "
    f"{evidence.UNDECIDED.capitalize()} means that the evidence allows either verdict, or has one "
    "seed. To count the seeds that would decide a row, the standard deviation over seeds is taken "
    f"at its upper {evidence.UPPER:.0%} confidence limit. Spikes are counted by each run's own "
    "thresholds. Benchmark rows (C6 to C8) have no interval: each number is a single measurement. "
    "The paper makes no claim about C13, the schedule of beta2, that could be judged. C4, what "
    "rescues fp8 with one scale per tensor, is not judged: no run of ours with it fails."
)

IN_SHORT = (
    "True size: models of the paper. Mini: models that one GPU trains in minutes. Holds: "
    "reproduced; fails: not reproduced; open: undecided. Exploratory rows and checks are left out."
)

PREDICTED = "Fixed on 2026-11-26, before any run at true size; a score may change as runs come in."


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    about = "Judge the paper's claims."
    parser = cli.Parser(prog="python -m analysis.make claims", description=about)
    text = "folders of runs and lines, or their URLs [runs]"
    parser.add_argument("--runs", nargs="+", default=["runs"], help=text)
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder [figures]")
    options = parser.parse_args(arguments)
    absent = [root for root in options.runs if not as_path(root).is_dir()]
    if absent:
        parser.error(f"no folder {', '.join(absent)}")
    records = Evidence(options.runs)
    rows = [(claim, judge(claim, records)) for claim in CLAIMS]
    rows = [row for row in rows if row[0].short or row[1].verdict != evidence.NO_RUNS]
    options.out.mkdir(parents=True, exist_ok=True)
    sources = f"{len(records.summaries)} runs and the benchmark lines below "
    text = markdown(rows, sources + ", ".join(options.runs), size_judges.predictions(records))
    durable.replace(options.out / "claims.md", text.encode())
    for claim, finding in rows:
        print(f"{claim.number:4}{finding.verdict:32}{claim.text}")
    print(f"Wrote {options.out}/claims.md")
    return 0


def judge(claim: Claim, records: Evidence) -> Finding:
    """Returns the claim's finding; without evidence, it names the command to run."""
    records = records.at(claim.scale)
    try:
        if claim.needs:
            records.need_all(*claim.needs)
        return claim.judge(records)
    except NoRunsError as error:
        return Finding("", evidence.NO_RUNS, str(error))


def summary(rows: list[tuple[Claim, Finding]]) -> str:
    """Returns a table in Markdown with a row for each of C1 to C12, and a column for each size."""
    lines = ["| | the paper's claim | true size | mini |", "|---|---|---|---|"]
    for number, statement in paper.STATEMENTS.items():
        large, mini = {}, {}  # verdicts by what they decide
        for claim, finding in rows:
            if claim.number == number and claim.short:
                cell = mini if claim.scale == MINI else large
                cell.setdefault(claim.short, []).append(finding.verdict.partition(" at ")[0])
        needed = f"open: {NEEDED.get(number, 'no runs')}"
        cells = _in_short(large, mini) or needed, _in_short(mini, large) or "open: no runs"
        lines.append(f"| {number} | {statement} | {cells[0]} | {cells[1] if mini else '-'} |")
    return "\n".join(lines) + "\n"


def _in_short(verdicts: dict[str, list[str]], elsewhere: dict[str, list[str]]) -> str:
    """`holds`, or `holds: one thing; open: another`; of several rows of one thing, the worst.

    "" without a row that has runs.

    A bare word stands for the whole statement: nothing that is judged `elsewhere` is left out.
    """
    worst = {name: next(v for v in VERDICTS if v in each) for name, each in verdicts.items()}
    if set(worst.values()) <= {evidence.NO_RUNS}:
        return ""
    parts: dict[str, list[str]] = {}
    for word in ("holds", "fails", "open"):
        parts[word] = [name for name, verdict in worst.items() if VERDICTS[verdict] == word]
    is_whole = elsewhere.keys() <= worst.keys()
    if is_whole and len(worst) in (len(parts["holds"]), len(parts["fails"])):
        return "holds" if parts["holds"] else "fails"
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in parts.items() if names)


def markdown(rows: list[tuple[Claim, Finding]], sources: str, predictions: list[tuple]) -> str:
    """Returns the tables as Markdown, with commands formatted as code."""
    lines = ["# Claims", "", f"From {sources}. {NOTE}", "", "## Verdicts", "", IN_SHORT, ""]
    lines += [summary(rows), "## All rows", "", f"| {' | '.join(HEADER)} |"]
    lines.append("|" + "---|" * len(HEADER))
    for claim, finding in rows:
        why = re.sub(r"(python -m \S+( -m \S+)?( \S+=\S+)*)", r"`\1`", finding.why)
        verdict = f"**{finding.verdict}**" + (f" ({why})" if why else "")
        cells = (claim.number, claim.text, claim.paper, finding.ours, claim.margin, verdict)
        lines.append(f"| {' | '.join(cell.replace('|', '/') or '-' for cell in cells)} |")
    if predictions:
        lines += ["", "## Predictions", "", PREDICTED, "", "| prediction | our runs | score |"]
        lines += ["|---|---|---|", *(f"| {' | '.join(cells)} |" for cells in predictions)]
    return "\n".join(lines) + "\n"

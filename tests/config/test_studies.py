"""Every figure of runs has a study at paper scale and one for a single GPU; both compose."""

import re

import pytest

from analysis import figures
from lowprec.config.compose import CONF, compose_command
from lowprec.runs.identity import identity

MINI = ("mini_b", "mini_l", "mini_h")
TRUE_SIZE = {  # model: width and blocks of both towers, which are the paper's
    "vit_b14": (768, 12, 512, 12),
    "vit_l14": (1024, 24, 768, 12),
    "vit_h14": (1280, 32, 1024, 24),
}
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
FIGURES = [each for each in figures.FIGURES.values() if not each.lines]
STUDIES = {figure.studies[0] for figure in FIGURES}
SWEPT = {  # study at paper scale: its values, which are the paper's
    "spikes_vs_size": (lambda c: c.model.name, ["vit_b32", "vit_l14", "vit_h14"]),
    "spikes_vs_batch": (lambda c: c.batch_size, [4096, 16384, 65536]),
    "spikes_vs_lr": (lambda c: c.optimizer.lr, [5e-4, 2e-3, 5e-3]),
    "beta2_schedule": (lambda c: c.optimizer.beta2_decay, [None, 0.45, 0.5, 0.65]),
    "update_clipping": (lambda c: c.optimizer.name, ["adamw", "adamw_clip", "stable_adamw"]),
}


def test_each_figure_of_runs_has_a_study_at_both_scales():
    ours = {"stability", "formats", "point_of_no_return", "rounding"}  # not in the paper
    ours |= {"one_product", "spikes_vs_precision", "weight_gradient", "lr_map", "interventions"}
    ours |= {"branches", "kq_norm"}
    papers = STUDIES - ours
    minis = {figure.studies[0 if figure.same_but else -1] for figure in FIGURES}
    minis -= {"lr_map", "equality", "interventions", "branches"}
    assert papers | {f"{slug}_mini" for slug in minis} <= set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_into_the_distinct_runs_of_its_header_and_protocol(name):
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    header = "".join(re.findall(r"^#.*", text, re.M))
    count = int(re.search(r"(\d+) runs?\b", header).group(1))
    scales = ("mini", "demo", "true_size")
    scale = next((s for s in scales if name.endswith(f"_{s}")), "paper")
    slug = name.removesuffix(f"_{scale}")
    words = [f"experiment={name}", "data.train=-", "data.val=-"]
    configs = [run.config for run in compose_command(words, multirun=True)]
    assert len({repr(identity(config)) for config in configs}) == len(configs) == count
    table = (CONF.parent / "experiments" / "README.md").read_text()
    names = (f"`{name}`", f"`{name.removesuffix('_mini')}`")
    cells = [row.split("|") for row in table.splitlines() if row.startswith("| `")]
    [counts] = [row[3] for row in cells if any(study in row[1] for study in names)]
    assert str(count) in re.findall(r"\d+", counts)
    assert {(config.experiment, config.scale) for config in configs} == {(slug, scale)}
    for config in configs:
        if scale == "mini":
            assert config.model.name in MINI and config.num_steps <= 2000
        elif scale == "true_size":
            check_true_size(config)
        elif scale == "paper" and slug in STUDIES:
            check_protocol(slug, config)
    if name in SWEPT:
        value, values = SWEPT[name]
        assert list(dict.fromkeys(map(value, configs))) == values
    if name == "spikes_vs_size":
        beta2 = {config.optimizer.beta2 for config in configs}
        assert beta2 == {0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995}


def check_true_size(config):
    """Fails unless a run at true size has the settings that PROTOCOL.md fixes for all of them."""
    model, optimizer = config.model, config.optimizer
    sizes = (model.vision_width, model.vision_layers, model.text_width, model.text_layers)
    assert sizes == TRUE_SIZE[model.name]
    assert (model.patch_size, model.image_size, model.context_length) == (14, 84, 32)
    assert (model.patch_dropout, config.batch_size, config.num_steps) == (0.5, 1024, 1500)
    assert (config.schedule.name, config.schedule.warmup_steps) == ("cosine", 375)
    assert (optimizer.beta1, optimizer.eps, optimizer.weight_decay) == (0.9, 1e-6, 0.2)
    assert config.seed >= 1 and config.eval_every == 750


def check_protocol(slug, config):
    """Fails unless a run at paper scale has the paper's settings."""
    assert (config.num_steps, config.schedule.warmup_steps) == (20000, 5000)
    assert config.model.patch_dropout == 0.5
    assert config.checkpointing
    assert config.data.resampled and config.data.classnames == "imagenet"
    optimizer = config.optimizer
    assert (optimizer.beta1, optimizer.eps, optimizer.weight_decay) == (0.9, 1e-6, 0.2)
    assert optimizer.lr == 2e-3 or "_lr" in slug
    assert config.batch_size == 16384 or "_batch" in slug
    unclipped = optimizer.name == "stable_adamw" and slug != "update_clipping"
    assert optimizer.clip_weight_decay is not unclipped

"""Every figure of runs has a study at paper scale and one for a single GPU; both compose."""

import functools
import re

import pytest
from omegaconf import OmegaConf

from analysis import figures, make, study
from lowprec.config.compose import CONF, compose_command

SHARDS = ["data.train=train.tar", "data.val=val.tar"]
MINI = ("mini_b", "mini_l", "mini_h")
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
FIGURES = {slug: figures.load(slug) for slug in figures.slugs()}
OF_RUNS = [slug for slug, figure in FIGURES.items() if not hasattr(figure, "LINES")]
STUDIES = sorted({make.experiment_of(FIGURES[slug]) for slug in OF_RUNS})


@functools.cache
def runs_of(name):
    """The checked configs of all runs of an experiment file."""
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    shards = SHARDS if "/data: shards" in text else []
    runs = compose_command([f"experiment={name}", *shards], multirun=True)
    return [run.config for run in runs]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_into_distinct_runs_as_many_as_its_header_says(name):
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    header = "".join(re.findall(r"^#.*", text, re.M))
    count = int(re.search(r"(\d+) runs?\b", header).group(1))
    assert len(runs_of(name)) == count
    scale = next((s for s in ("mini", "demo") if name.endswith(f"_{s}")), "paper")
    planned = study.planned(name.removesuffix(f"_{scale}"), scale)
    assert len({tuple(run.items()) for run in planned}) == len(planned) == count
    table = (CONF.parent / "experiments" / "README.md").read_text()
    assert f"| `{name}` |" in table or f"| `{name.removesuffix('_mini')}` |" in table


@pytest.mark.parametrize("slug", STUDIES)
def test_a_mini_study_trains_mini_models_for_at_most_2000_steps(slug):
    for config in runs_of(f"{slug}_mini"):
        assert (config.experiment, config.scale) == (slug, "mini")
        assert config.model.name in MINI and config.num_steps <= 2000


@pytest.mark.parametrize("slug", STUDIES)
def test_a_study_at_paper_scale_follows_the_protocol_of_the_paper(slug):
    for config in runs_of(slug):
        assert (config.experiment, config.scale) == (slug, "paper")
        assert (config.num_steps, config.schedule.warmup_steps) == (20000, 5000)
        assert config.model.patch_dropout == 0.5
        assert config.checkpointing is (config.intervention.name != "kq_norm")
        assert config.data.resampled and config.data.classnames == "imagenet"
        optimizer = config.optimizer
        assert (optimizer.beta1, optimizer.eps, optimizer.weight_decay) == (0.9, 1e-6, 0.2)
        assert optimizer.lr == 2e-3 or "_lr" in slug
        assert config.batch_size == 16384 or "_batch" in slug
        unclipped = optimizer.name == "stable_adamw" and slug != "update_clipping"
        assert optimizer.clip_weight_decay is not unclipped


def test_sweeps_have_the_values_of_the_paper():
    swept = {
        "spikes_vs_size": lambda c: c.model.name,
        "spikes_vs_batch": lambda c: c.batch_size,
        "spikes_vs_lr": lambda c: c.optimizer.lr,
        "beta2_schedule": lambda c: c.optimizer.beta2_decay,
        "update_clipping": lambda c: c.optimizer.name,
    }
    values = {slug: list(dict.fromkeys(map(value, runs_of(slug)))) for slug, value in swept.items()}
    assert values == {
        "spikes_vs_size": ["vit_b32", "vit_l14", "vit_h14"],
        "spikes_vs_batch": [4096, 16384, 65536],
        "spikes_vs_lr": [5e-4, 2e-3, 5e-3],
        "beta2_schedule": [None, 0.45, 0.5, 0.65],
        "update_clipping": ["adamw", "adamw_clip", "stable_adamw"],
    }
    beta2 = {config.optimizer.beta2 for config in runs_of("spikes_vs_size")}
    assert beta2 == {0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995}


@pytest.mark.parametrize("scale", ["paper", "mini"])
def test_without_runs_a_figure_names_the_command_for_them(scale, tmp_path, capsys):
    for slug in OF_RUNS:
        assert make.main([slug, "--scale", scale, "--runs", str(tmp_path)]) == 2
        name = capsys.readouterr().err.strip().rpartition("experiments.train -m experiment=")[2]
        planned = make.experiment_of(FIGURES[slug])
        assert OmegaConf.load(CONF / "experiment" / f"{name}.yaml").experiment == planned
        assert name == (planned if scale == "paper" else f"{planned}_mini")

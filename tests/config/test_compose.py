"""Tests what refused commands name, which are accepted, and every file in `conf/`."""

import shutil
import sys
from dataclasses import asdict

import pytest

from experiments import entry
from experiments.evaluate import EvaluateConfig
from lowprec.config import compose
from lowprec.config.check import ConfigError, RunError
from lowprec.config.schema import Config
from lowprec.train.preflight import preflight

CONF = compose.CONF
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
GROUP_FILES = [
    f"{group}={path.stem}"
    for group in GROUPS
    if group not in ("experiment", "hydra", "launcher")
    for path in sorted((CONF / group).glob("*.yaml"))
]
SHARDS = "data.train=train.tar data.val=val.tar"

BAD = {  # command: parts of its message
    # keys
    "data=shards data.train=": ("data.train is required: glob of training shards",),
    "sede=1": ("sede: no such key", "the root has", "nearest: seed"),
    # choices
    "model=nanoo": ("model=nanoo: no such choice; nearest: nano (conf/model has", "vit_h14"),
    "model=ViT-B-32": (
        "no such choice; nearest: model=vit_b32 or model=open_clip model.name=ViT-B-32 (",
    ),
    "model=rn50_X4": ("no such choice; nearest: model=open_clip model.name=RN50x4 (",),
    "model=mini-B": ("no such choice; nearest: model=mini_b (",),
    "experiment=losscurves": ("nearest: loss_curves (", "loss_curves_mini", " more, see --help)"),
    "model.name=mini_h": ("model.name=mini_h", "use model=mini_h"),
    "model.image_size=null": ("model.image_size=null", "preset nano needs a number"),
    "model=open_clip": ("model.name=null", "open_clip"),
    # recipes and backends
    "precision.recipe=custom": ("precision.recipe=custom needs precision.products",),
    "accumulate=3": ("batch_size=128 is not a multiple of accumulate=3",),
    "distributed=fsdp2 diagnostics.recorder.enabled=true": ("recorder.enabled=true", "use ddp"),
    "resume=false": ("resume=false: a group of", "; to start a run over, delete its directory"),
    "resume.from=x": ("resume.from: no such key",),
    # combinations
    "precision=fp16": ("autocast=fp16", "scaler=none", "scaler=dynamic or scaler=fixed"),
    "schedule.warmup_steps=2000": ("schedule.warmup_steps=2000", "num_steps=1000"),
    "optimizer.clip_norm=1": ("optimizer.clip_norm=1", "needs optimizer=adamw_clip"),
    "optimizer=adamw_clip optimizer.clip_norm=null": ("optimizer=adamw_clip needs", "clip_norm"),
    # a change of the precision
    "precision_change.recipe=high": ("precision_change.recipe=high needs precision_change.step",),
    "precision_change.step=1001 precision_change.recipe=switchback": (
        "precision_change.step=1001 is more than num_steps=1000",
    ),
    "precision_change.step=1 precision_change.recipe=switchback": ("step=1", ">= 2"),
    "precision_change.step=9": ("step=9 changes nothing", "recipe=high and autocast=bf16"),
    "precision_change={step:9,autocast:fp16}": ("precision_change.autocast=fp16", "scaler=none"),
    "precision=pure_bf16 precision_change={step:9,autocast:fp32}": ("weights are 16-bit",),
    "distributed=fsdp2 precision_change={step:9,recipe:switchback}": ("use ddp",),
    "precision=llm_int8 precision.outlier_threshold=6 precision_change={step:9,recipe:high}": (
        "step=9 does not work with precision.outlier_threshold",
    ),
    # keys without effect
    "precision.backend=triton": ("precision.backend=triton does nothing without",),
    "data.cache=s3://b/c": ("data.cache=s3://b/c: a local folder is expected, not a URL",),
    "data.augment=crop_flip data.cache=c": ("data.augment=crop_flip cannot use",),
    "data=stream data.train=http://h/a.tar data.allow_remote=[http] data.cache=c data.val=null": (
        "data.cache=c does nothing without data=shards or shapes",
    ),
    "optimizer=muon distributed=fsdp2": ("optimizer=muon does not work with distributed=fsdp2",),
    "optimizer=muon optimizer.beta2_decay=0.5": ("does nothing without optimizer=adamw",),
    "optimizer.optim_bits=8 distributed=fsdp2": ("optim_bits=8 does not work with", "use ddp"),
    "optimizer.paged=true distributed=fsdp2": ("paged=true does not work with", "use ddp"),
    "optimizer.paged=true device=cpu": ("paged=true does not work with device=cpu",),
    "optimizer=muon optimizer.paged=true": ("does nothing without optimizer=adamw or stable",),
    "optimizer.skip_sigmas=6": (
        "needs optimizer=adamw_skip_step or stable_adamw",
        "muon, not adamw",
    ),
    "optimizer=muon optimizer.zclip=2 optimizer.clip_norm=1": (
        "optimizer.clip_norm, optimizer.zclip: only one of them can be set",
    ),
    "optimizer.stable_embedding=true": ("optimizer.stable_embedding: no such key",),
    "data.val=null": ("evaluation=zero_shot needs data.val", "evaluation=none"),
    # models
    "model.image_size=30": ("model.image_size=30", "patch_size=8", "nearest: model.image_size=32"),
    "model=open_clip model.name=ViT-B-33": ("ViT-B-33", "nano, mini_b", "nearest: ViT-B-32"),
    "model=open_clip model.name=ViT-B-32 model.heads=64": ("model.heads is fixed", "null"),
    "model=open_clip model.name=RN50 intervention=kq_norm": ("intervention=kq_norm", "RN50"),
    "model=open_clip model.name=roberta-ViT-B-32": ("roberta-ViT-B-32", "downloaded"),
    # what cannot be
    "-m seed=range(0,1000000000)": ("more than 1,000 runs",),
    "name=sweeps": ("name=sweeps: must be a folder name", "not 'sweeps'"),
    'run_dir=""': ("run_dir=: a folder is expected", "run_dir=runs"),
    f"seed={'9' * 5000}": ("seed=999", "cannot be parsed"),
    "run_dir=/proc/x": ("run_dir=/proc/x", "not writable"),
    'run_dir="~/runs"': ("run_dir=~/runs: ~ is not expanded: write /",),
    'run_dir="~"': ("run_dir=~: ~ is not expanded: write /",),
    'data.cache="~/cache" remark="~/x"': ("data.cache=~/cache: ~ is not expanded",),
    # Hydra's own keys
    "hydra.run.dir=x": ("hydra.run.dir is not allowed", "hydra.launcher.*"),
    "hydra/launcher=slurm": ("hydra/launcher=slurm", "submitit_slurm"),
    # sweeps and syntax
    "seed=1,2": ("this is a sweep", "-m seed=1,2"),
    "experiment=loss_curves_demo": ("experiments.train -m experiment=loss_curves_demo",),
    "-m experiment=loss_curves,loss_curves_demo": ("only one experiment",),
    "-m optimizer.lr=interval(1e-4,1e-3)": ("interval", "use choice or range"),
    "data.train=a-{0..9}.tar": ("cannot be parsed", "'data.train=\"a-{0..9}.tar\"'"),
    "seed=${nope}": ("seed", "nope"),
    'remark=a"b': ("cannot be parsed", """'remark="a\\"b"'"""),
    "optimizer.lr_scale={'conv*':0}": ("no quotes: 'optimizer.lr_scale={conv*:0}'",),
    "remark=it's": ("cannot be parsed", """'remark="it'"'"'s"'"""),
    'remark="a;b" seed=1,2': ("-m 'remark=\"a;b\"' seed=1,2",),
}
GOOD = {  # command: number of runs
    "": 1,
    "optimizer=muon optimizer.skip_sigmas=6": 1,
    "optimizer=stable_adamw optimizer.optim_bits=8 optimizer.override_32bit=[visual.proj]": 1,
    "optimizer.paged=true optimizer.optim_bits=8 distributed=ddp": 1,
    "data.val=null evaluation=none": 1,
    "precision=switchback precision_change={step:1000,autocast:fp32,recipe:high}": 1,
    "-m precision_change={step:9,recipe:custom} precision.products={output:high} seed=1,2": 2,
    "model=open_clip model.name=ViT-B-16 intervention=kq_norm model.patch_dropout=0.5": 1,
    'data=shards data.train="a-{0..9}.tar" data.val=b.tar': 1,
    "-m seed=range(1,4) optimizer.beta2=0.9,0.95": 6,
    "-m distributed=ddp,fsdp2 accumulate=1,4 compile=true": 4,
    "-m experiment=loss_curves_demo optimizer=adamw seed=1,2": 6,
    "-m hydra/launcher=submitit_slurm hydra.launcher.comment=${hydra.job.name} seed=1,2": 2,
    "-m experiment=fp8_fixes_mini intervention=zero_init": 3,
}


def configs_of(command, preflight=lambda config: None):
    words = command.split()
    multirun = words[:1] == ["-m"]
    runs = compose.compose_command(words[multirun:], multirun=multirun, preflight=preflight)
    return [run.config for run in runs]


def faults_of(command, preflight=lambda config: None):
    with pytest.raises(ConfigError) as error:
        configs_of(command, preflight)
    return error.value.faults


@pytest.mark.parametrize("command", BAD)
def test_a_bad_command_is_refused_with_its_key_and_a_hint(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults = faults_of(command, preflight)
    assert not list(tmp_path.iterdir())
    assert any(all(part in fault for part in BAD[command]) for fault in faults), faults


@pytest.mark.parametrize("command", GOOD)
def test_a_good_command_is_accepted(command):
    assert len(configs_of(command)) == GOOD[command]


def test_all_faults_of_a_command_are_reported_at_once():
    faults = faults_of("sede=1 seed=-1 optimizer.lr=fast model=nanoo accumulate=0")
    named = ("sede", "seed=-1", "optimizer.lr='fast'", "model=nanoo", "accumulate=0")
    assert len(faults) == 5
    assert all(sum(fault.startswith(name) for fault in faults) == 1 for name in named)


def test_a_fault_of_some_runs_of_a_sweep_is_reported_once():
    faults = faults_of("-m precision=bf16,fp16 num_steps=0,5 scaler=nope")
    named = ("num_steps=0", "autocast=fp16", "scaler=nope")
    assert len(faults) == 3 and all(any(name in fault for fault in faults) for name in named)


def test_a_further_command_takes_the_place_of_swept_values():
    runs = compose.compose_command(["experiment=fp8_fixes_mini", "seed=0"], multirun=True)
    configs = [run.config for run in runs]
    choices = [(config.intervention.name, config.optimizer.clip_norm) for config in configs]
    assert choices == [("none", None), ("zero_init", None), ("kq_norm", None), ("none", 1.0)]
    words = ["experiment=fp8_fixes_mini", "seed=0", "intervention=kq_norm"]
    assert len(compose.compose_command(words, multirun=True)) == 1


def test_a_sweep_continues_after_a_failed_run_and_exits_with_1(monkeypatch, capsys):
    seeds = []

    def task(config):
        seeds.append(config.seed)
        if config.seed < 2:
            raise [RunError("told"), KeyError("bug")][config.seed]

    monkeypatch.setattr(sys, "argv", ["train", "-m", "seed=0,1,2"])
    with pytest.raises(SystemExit, match="1"):
        entry.run_command(task, "train")
    printed = capsys.readouterr().err
    assert seeds == [0, 1, 2] and printed.startswith("run 1 failed: told\nrun 2 failed: Traceback")
    assert printed.endswith("KeyError: 'bug'\n")


def test_a_chosen_file_changes_only_keys_that_files_of_its_group_set():
    base = asdict(configs_of("optimizer=adamw_clip optimizer.lr=7e-3")[0])
    words = ["optimizer=stable_adamw", "seed=3"]
    [run] = compose.compose_command(words, "replay", base=base)
    changed = {"name": "stable_adamw", "clip_norm": None, "clip_threshold": 1.0}
    assert asdict(run.config)["optimizer"] == base["optimizer"] | changed
    assert run.config.seed == 3 and base["optimizer"]["name"] == "adamw_clip"


def test_a_map_takes_the_place_of_the_maps_in_a_file_or_a_run(monkeypatch, capsys):
    new = "precision.products={output:{format:int8,x:rowwise,w:tensorwise}}"
    products = {"output": {"format": "int8", "x": "rowwise", "w": "tensorwise"}}
    words = ["experiment=fp8_fixes_mini", "seed=0", "intervention=zero_init"]
    [old] = compose.compose_command(words, multirun=True)
    runs = compose.compose_command([*words, new], multirun=True)
    runs += compose.compose_command([new], base=asdict(old.config))
    assert len(old.config.precision.products) == 3
    assert [run.config.precision.products for run in runs] == [products] * 2
    text = "experiment=fp8_code_books_mini seed=0 precision.products={output:high}"
    monkeypatch.setattr(sys, "argv", ["train", "--cfg", "job", *text.split()])
    entry.run_command(None, "train")
    assert "products:\n    output: high\n  where" in capsys.readouterr().out


@pytest.mark.parametrize("choice", GROUP_FILES)
def test_every_group_file_composes(choice):
    needs = {"precision=fp16": "scaler=dynamic", "precision=pure_fp16": "scaler=fixed"}
    needs |= {"scaler=dynamic": "precision=fp16", "scaler=fixed": "precision=fp16"}
    needs |= {"data=shards": SHARDS, "data=stream": SHARDS}
    needs |= {"model=open_clip": "model.name=ViT-B-32"}
    assert configs_of(f"{choice} {needs.get(choice, '')}")


def test_a_typo_in_an_experiment_file_is_named(tmp_path, monkeypatch):
    shutil.copytree(CONF, tmp_path / "conf")
    file = tmp_path / "conf" / "experiment" / "loss_curves_demo.yaml"
    text = file.read_text().replace("{beta2: 0.99}", "{beta_2: 0.99}")
    file.write_text(text.replace("fp32,switchback", "fp32,switchbak"))
    monkeypatch.setattr(compose, "CONF", tmp_path / "conf")
    faults = faults_of("-m experiment=loss_curves_demo")
    for parts in (("switchbak", "nearest: switchback"), ("beta_2", "nearest: optimizer.beta2")):
        assert any(all(part in fault for part in parts) for fault in faults), faults


HEADER = "# @package _global_\n"
BAD_STUDIES = {  # text of an experiment's file: parts of the message
    "seed: 1": ("its first line must be `# @package _global_`",),
    f"# of mine\n{HEADER}seed: 1": ("its first line must be",),
    f"{HEADER}seed: [": ("no map of keys", "line 2"),
    f"{HEADER}- seed": ("no map of keys",),
    f"{HEADER}hydra: {{sweeper: {{params: ['seed=0,1']}}}}": ("sweeper.params: a map is expected",),
    f"{HEADER}further_commands: 'seed=0 optimizer=muon'": ("further_commands: a list is expected",),
    f"{HEADER}further_commands: [{{seed: 0}}]": ("further_commands: a list is expected",),
    f"{HEADER}further_commands: ['seed=${{batch_size}}']": ("seed=${batch_size}", "not resolved"),
}


@pytest.mark.parametrize("text", BAD_STUDIES)
def test_an_experiment_file_that_is_no_study_is_refused(text, tmp_path, monkeypatch):
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(text)
    monkeypatch.setattr(compose, "CONF", tmp_path / "conf")
    [fault] = faults_of("-m experiment=own")
    assert all(part in fault for part in BAD_STUDIES[text]), fault


@pytest.mark.parametrize("header", ["#@package _global_", "\n # @package  _global_ "])
def test_headers_that_hydra_reads_are_read(header, tmp_path, monkeypatch):
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(f"{header}\nseed: 3\n")
    monkeypatch.setattr(compose, "CONF", tmp_path / "conf")
    [run] = compose.compose_command(["experiment=own"], "train")
    assert run.config.seed == 3


def test_a_recorded_path_below_a_folder_called_tilde_is_kept():
    [plain] = compose.compose_command([])
    base = asdict(plain.config) | {"run_dir": "~/runs"}
    [run] = compose.compose_command(["seed=3"], "train", base=base)
    assert run.config.run_dir == "~/runs"


REFUSED = {  # command line: a part of the message
    "--config-name=evaluate": "--config-name: only configs in conf/ are read",
    "--experimental-rerun=x": "--experimental-rerun: only configs",  # a pickle
    "--cfg job hydra.run.dir=x": "hydra.run.dir is not allowed",
    "--num-steps 5": "--num-steps: no such flag (--help, -m, --cfg); a key is written num_steps=",
    "-m --cfg job": "--multirun and --cfg: only one of them can be given",
    "-m seed=0,1": "experiments.sweep submit ... launcher.gpus=2",  # in two processes
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_flag_or_launcher_that_does_not_fit_is_refused(command, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train", *command.split()])
    with pytest.raises(SystemExit, match="2"):
        entry.run_command(None, "train")
    assert REFUSED[command] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seeds", "printed"),
    [("1", ["ran []"]), ("1,2", ["[1] seed=1", "ran [seed=1]", "[2] seed=2", "ran [seed=2]"])],
)
def test_a_run_of_a_sweep_prints_only_what_differs(monkeypatch, capsys, tmp_path, seeds, printed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entry, "sweep", entry.Sweep())
    monkeypatch.setattr(sys, "argv", ["train", "num_steps=2", "-m", f"seed={seeds}"])
    entry.run_command(lambda config: print(f"ran [{entry.sweep.own}]"), "train")
    assert capsys.readouterr().out.splitlines() == printed


def test_help_explains_each_key_with_its_default():
    text = compose.explain("train", Config)
    assert "\noptimizer.beta2=0.98  decay rate of the second moment\n" in text
    assert "\nlogger.name=none  dashboard (none | tensorboard | wandb | trackio)" in text


def test_an_entry_with_fewer_keys_offers_and_takes_only_the_files_that_fit_them():
    offered = compose.explain("evaluate", EvaluateConfig)
    assert "precision: bf16, fp16, fp32\n" in f"{offered}\n"
    assert "evaluation: both, retrieval, zero_shot\n" in f"{offered}\n"
    with pytest.raises(ConfigError, match=r"precision=switchback: no such choice \(precision has"):
        compose.compose_command(["run=x", "precision=switchback"], "evaluate", EvaluateConfig)
    [run] = compose.compose_command(["run=x", "precision=fp16"], "evaluate", EvaluateConfig)
    assert run.config.precision.autocast == "fp16"

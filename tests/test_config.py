"""Configurations: every fault is found, named and listed at once; every key of ours has an effect."""

import pytest

from regdrop_titan.config import ConfigError, load_config, model_args
from regdrop_titan.models import FAMILIES
from regdrop_titan.models.positions import Yarn

from .packed_sets import write_packed


def faults(args=(), toml=None, tmp_path=None, **kwargs) -> list[str]:
    args = list(args)
    if toml is not None:
        file = tmp_path / "run.toml"
        file.write_text(toml)
        args = ["--job.config_file", str(file), *args]
    with pytest.raises(ConfigError) as caught:
        load_config(args, **kwargs)
    return caught.value.faults


def test_toml_then_command_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[dropout]\nplacement = 'vpad'\np = 0.1\n[training]\nseq_len = 64\n")
    config = load_config(["--job.config_file", str(file), "--dropout.p", "0.2", "--training.local-batch-size=4"])
    assert (config.dropout.placement, config.dropout.p) == ("vpad", 0.2)
    assert (config.training.seq_len, config.training.local_batch_size) == (64, 4)
    assert (config.validation.seq_len, config.validation.local_batch_size) == (64, 4)  # as training


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (["--compile.enable"], True),
        (["--compile.enable", "true"], True),
        (["--compile.enable=false"], False),
        (["--compile.no-enable"], False),
        (["--no-compile.enable"], False),
    ],
)
def test_flags(args, value):
    assert load_config(args).compile.enable is value


@pytest.mark.parametrize(("args", "value"), [([], True), (["true"], True), (["False"], False)])
def test_optional_flags(args, value):
    assert load_config(["--architecture.document_mask", *args]).architecture.document_mask is value


@pytest.mark.parametrize(
    ("toml", "fault"),
    [
        ("[optimizer]\nlr = '6e-4'", "optimizer.lr = '6e-4': must be a number"),
        ("[training]\nsteps = 100.5", "training.steps = 100.5: must be an integer"),
        ("[training]\nseq_len = '2048'", "training.seq_len = '2048': must be an integer"),
        ("[compile]\nenable = 'false'", "compile.enable = 'false': must be true or false"),
        ("[training]\nsteps = true", "training.steps = True: must be an integer"),
        ("[training]\nsteps = -5", "training.steps = -5: must be at least 1"),
        ("[dropout]\np = '0.1'", "dropout.p = '0.1': must be a number"),
        ("[dropout]\np = 1.0", "dropout.p = 1.0: must be in [0, 1)"),
        ("[dropout]\np = -0.1", "dropout.p = -0.1: must be in [0, 1)"),
        ("[dropout]\np = nan", "dropout.p = nan: must be in [0, 1)"),
        (
            "[lr_scheduler]\ndecay_type = 'wsd'",
            "lr_scheduler.decay_type = 'wsd': must be one of 'linear', 'sqrt', 'cosine'",
        ),
        ("[dropout]\nplacment = 'vpad'", "dropout.placment: unknown key; did you mean dropout.placement?"),
        ("[dropot]\np = 0.1", "dropot: unknown section; did you mean dropout?"),
        ("dropout = 0.1", "dropout = 0.1: is a section, write [dropout]"),
        ("[validation]\nsteps = 0", "[validation]: validation steps must be positive or -1"),
        ("[architecture]\nsliding_window = 0", "architecture.sliding_window = 0: must be at least 1"),
        ("[architecture]\nalibi_cutoff = -1.0", "architecture.alibi_cutoff = -1.0: must be a number of nats"),
        ("[architecture]\nn_heads = 3\ndim = 96\nn_kv_heads = 3", "needs an even number of heads, got n_heads = 3"),
        ("[model]\nflavor = '7B'", "model.flavor = '7B': must be one of debug, 150M"),
        ("[model]\nname = 'llama'", "model.name = 'llama': must be one of nape_llama3"),
        ("[debug]\nseed = 7", "debug.seed = 7: set training.seed instead"),
        ("[checkpoint]\nkeep_latest_k = 1", "checkpoint.keep_latest_k = 1: must be 0"),
        ("[model]\nconverters = ['float8']", "model.converters: quantized training is not supported"),
        ("[parallelism]\ncontext_parallel_degree = 2", "context_parallel_degree: not supported: its load balancer"),
        ("[optimizer]\nname = 'SGD'", "optimizer.name = 'SGD': must be one of Adam, AdamW"),
        ("[training]\ndataset = 'imagenet'", "training.dataset = 'imagenet': must be one of packed"),
        ("[training]\nstate_passing = true", "training.state_passing = true: needs Mamba2 layers, the model has"),
        (
            "[model]\nname = 'mamba2'\n[training]\nstate_passing = true\n[layer_dropout]\np_max = 0.2",
            "training.state_passing = true: not with layer dropout (layer_dropout.p_max = 0.2)",
        ),
        (
            "[architecture]\nlayers = 'mamba,lstm'",
            "architecture.layers = 'mamba,lstm': 'lstm' is none of attention, nope, mamba",
        ),
        ("[training]\nmax_skips = 0", "training.max_skips = 0: must be at least 1"),
        ("[training]\nprefetch = -1", "training.prefetch = -1: must be at least 0"),
        ("[training]\nloss_chunks = -1", "training.loss_chunks = -1: must be at least 0"),
        (
            "[training]\nloss_chunks = 257\nseq_len = 128\nlocal_batch_size = 2",
            "training.loss_chunks = 257: must be at most the 256 tokens of a forward",
        ),
        ("[compile]\ncomponents = ['optimizer']", "compile.components: unknown optimizer"),
        ("[activation_checkpoint]\nselective_ac_option = 'x'", "selective_ac_option = 'x': must be 'op' or"),
    ],
)
def test_one_fault(toml, fault, tmp_path):
    (found,) = faults(toml=toml, tmp_path=tmp_path)
    assert fault in found


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--training.stps", "3"], "--training.stps: unknown key; did you mean training.steps?"),
        (["--training.lr", "3"], "--training.lr: unknown key; did you mean optimizer.lr?"),
        (["--training.steps", "3.5"], "--training.steps 3.5: must be an integer"),
        (["--dropout.placement=middle"], "--dropout.placement middle: must be one of 'none', 'pre_norm'"),
        (["--dropout.p"], "--dropout.p: must be a number"),
        (["--compile.enable", "maybe"], "--compile.enable maybe: must be true or false"),
        (["stray"], "'stray': unexpected argument; write --section.key value"),
    ],
)
def test_command_line_faults(args, fault):
    (found,) = faults(args)
    assert fault in found


def test_all_faults_at_once(tmp_path):
    found = faults(
        ["--dropout.placement", "middle", "--training.stps", "3"],
        "[optimizer]\nlr = '6e-4'\n[dropout]\np = 1.5\n[parallelism]\ntensor_parallel_degree = 3\n",
        tmp_path,
        world_size=2,
    )
    for part in (
        "optimizer.lr",
        "--dropout.placement",
        "--training.stps",
        "dropout.p = 1.5",
        "does not fit 2 processes",
    ):
        assert sum(part in fault for fault in found) == 1, found


@pytest.mark.parametrize(
    ("args", "world_size", "fault"),
    [
        (["--parallelism.tensor_parallel_degree", "3"], None, "must divide the model's n_heads = 4"),
        (["--parallelism.tensor_parallel_degree", "2", "--architecture.n_kv_heads", "1"], 2, "n_kv_heads = 1"),
        (
            ["--parallelism.tensor_parallel_degree", "3", "--model.name", "mamba2"],
            3,
            "must divide the model's Mamba2 heads, 2 x 128 / 64 = 4",
        ),
        (
            ["--parallelism.tensor_parallel_degree", "2", "--model.name", "mamba2", "--architecture.n_groups", "2"],
            2,
            "Mamba2 layers need architecture.n_groups = 1, got 2",
        ),
        (["--parallelism.tensor_parallel_degree", "2", "--training.seq_len", "63"], 2, "seq_len = 63"),
        (["--parallelism.tensor_parallel_degree", "2"], 3, "does not fit 3 processes"),
        (["--parallelism.data_parallel_shard_degree", "4"], 2, "does not fit 2 processes"),
        (["--training.global_batch_size", "12"], 2, "a multiple of local_batch_size 8 x data-parallel degree 2"),
        (["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1",
          "--parallelism.tensor_parallel_degree", "2"], 4, "cannot be combined with TP or PP"),
        (["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "2F2B"], 2,
         "no such schedule"),
        (["--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "1"], 2, "than the 2 stages"),
        (["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "3"], 2,
         "must divide training.local_batch_size = 8"),
        (["--parallelism.pipeline_parallel_degree", "8"], 8, "pipeline_parallel_degree = 8"),
        (["--parallelism.pipeline_parallel_degree", "2", "--architecture.tied_embeddings"], 2, "different pipeline"),
        (["--parallelism.pipeline_parallel_degree", "2", "--validation.enable", "--validation.seq_len", "64"], 2,
         "must equal training's under pipeline parallel"),
    ],
)  # fmt: skip
def test_impossible_layouts(args, world_size, fault):
    assert any(fault in found for found in faults(args, world_size=world_size))


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--activation_checkpoint.no-preserve_rng_state"], "preserve_rng_state = false"),
        (["--activation_checkpoint.mode", "memory_budget", "--compile.enable"], "mode = 'memory_budget'"),
    ],
)
def test_recomputation_that_would_draw_other_masks(args, fault):
    dropout = ["--dropout.placement", "pre_linear", "--dropout.p", "0.1"]
    assert any(fault in found for found in faults([*args, *dropout]))
    load_config(args)  # without dropout they are allowed
    load_config([*args, "--dropout.placement", "pre_linear", "--dropout.p", "0"])


@pytest.mark.parametrize("content", [None, b"a = [", b"\xff\xfe"])
def test_unreadable_toml(content, tmp_path):
    file = tmp_path / "x.toml"
    if content is not None:
        file.write_bytes(content)
    (found,) = faults(["--job.config_file", str(file)])
    assert str(file) in found


# Files --------------------------------------------------------------------------------------------------------


def run_with(data, *args):
    return ["--training.dataset_path", str(data), "--training.seq_len", "32", *args]


def test_good_inputs(packed, tmp_path):
    load_config(run_with(packed / "train", "--job.dump_folder", str(tmp_path / "new" / "run")), inputs=True)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda d: (d / "manifest.json").unlink(), "has no manifest.json"),
        (lambda d: (d / "manifest.json").write_text("{"), "unreadable"),
        (lambda d: (d / "manifest.json").write_text("{}"), "not a packed-set manifest of format 1"),
        (lambda d: (d / "shard-00000.tokens").unlink(), "missing, manifest.json lists it"),
        (lambda d: (d / "shard-00000.tokens").write_bytes(b"12"), "2 bytes, manifest.json says"),
    ],
)
def test_damaged_data(packed, tmp_path, damage, fault):
    import shutil

    data = tmp_path / "data"
    shutil.copytree(packed / "train", data)
    damage(data)
    (found,) = faults(run_with(data), inputs=True)
    assert found.startswith("training.dataset_path: ") and fault in found


def test_missing_small_and_foreign_data(packed, tmp_path):
    (found,) = faults(run_with(tmp_path / "nowhere"), inputs=True)
    assert "nowhere: no such folder" in found
    write_packed(tmp_path / "tiny", [[1, 2, 3]], 256)
    (found,) = faults(run_with(tmp_path / "tiny"), inputs=True)
    assert "4 tokens, but one sample of seq_len 32 needs 33" in found
    (found,) = faults(run_with(packed / "train", "--architecture.vocab_size", "100"), inputs=True)
    assert "has 256 tokens, the model a vocabulary of 100" in found
    (found,) = faults(run_with(packed / "train", "--validation.enable"), inputs=True)
    assert "validation.dataset_path: must name a packed set" in found


def test_tokenizer_of_torchtitans_own_data_sets(tmp_path):
    found = faults(["--training.dataset", "c4_test", "--model.hf_assets_path", str(tmp_path / "no")], inputs=True)
    assert any("no such folder (it must hold the tokenizer's files)" in fault for fault in found)
    found = faults(["--training.dataset", "c4_test", "--model.hf_assets_path", str(tmp_path)], inputs=True)
    assert any("no usable tokenizer" in fault for fault in found)


def test_unwritable_dump_folder(packed, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    (found,) = faults(run_with(packed / "train", "--job.dump_folder", str(file / "run")), inputs=True)
    assert "job.dump_folder" in found and "not a writable folder" in found


# Effects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position", "rope"), ("slopes", "exp2"), ("rope_theta", 1e4), ("sliding_window", 4), ("document_mask", True),
        ("alibi_cutoff", 20.0),
        ("dim", 64), ("n_layers", 2), ("n_heads", 8), ("n_kv_heads", 2), ("ffn_dim", 100), ("vocab_size", 3000),
        ("norm_eps", 1e-3), ("tied_embeddings", True), ("layers", "mamba"), ("expand", 3), ("ssm_head_dim", 32),
        ("state_size", 64), ("n_groups", 2), ("conv_width", 3), ("chunk_size", 32), ("embedding_std", 0.1),
    ],
)  # fmt: skip
def test_every_architecture_key_reaches_the_model(key, value):
    default, changed = load_config([]), load_config([f"--architecture.{key}", str(value)])
    assert getattr(model_args(changed), key) == value != getattr(model_args(default), key)
    from dataclasses import fields

    from regdrop_titan.config import Architecture

    assert key in {field.name for field in fields(Architecture)}


def test_yarn_reaches_the_model_whole_or_is_refused():
    options = {"position": "rope", "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_context": 64}
    args = [arg for key, value in options.items() for arg in (f"--architecture.{key}", str(value))]
    assert model_args(load_config(args)).yarn == Yarn(4.0, 64)
    assert faults(["--architecture.rope_factor", "4"]) == [
        "architecture.rope_factor = 4.0: needs rope_scaling = 'yarn'"
    ]
    assert faults(["--architecture.rope_scaling", "yarn"]) == [
        "architecture.rope_scaling = 'yarn': needs attention layers with position = 'rope'"
    ]
    found = faults([*args, "--architecture.rope_factor", "inf", "--architecture.rope_original_context", "6",
                    "--architecture.rope_theta", "1"])  # fmt: skip
    assert [fault.partition(" = ")[0] for fault in found] == [
        "architecture.rope_theta", "architecture.rope_factor", "architecture.rope_original_context"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [("placement", "vpad"), ("p", 0.25), ("mask", "per_linear"), ("vpad_stop_gradient", True)],
)
def test_every_dropout_key_reaches_the_model(key, value):
    changed = model_args(load_config([f"--dropout.{key}", str(value)]))
    assert getattr(changed, key) == value != getattr(model_args(load_config([])), key)


@pytest.mark.parametrize(
    ("key", "value"), [("unit", "sublayer"), ("scale_placement", "block"), ("skip_compute", False)]
)
def test_layer_dropout_keys_reach_the_model(key, value):
    changed = model_args(load_config([f"--layer_dropout.{key}", str(value)]))
    assert getattr(changed, key) == value != getattr(model_args(load_config([])), key)


@pytest.mark.parametrize(
    ("args", "first", "last"),
    [
        ([], [0, 0.2, 0.4, 0.6], [0, 0, 0, 0]),
        (["--layer_dropout.distribution", "uniform"], [0.6] * 4, [0] * 4),
        (["--layer_dropout.distribution", "alternating"], [0, 0.6, 0, 0.6], [0] * 4),
        (["--layer_dropout.schedule", "constant"], [0, 0.2, 0.4, 0.6], [0, 0.2, 0.4, 0.6]),
        (["--layer_dropout.schedule", "increasing"], [0, 0, 0, 0], [0, 0.2, 0.4, 0.6]),
        (["--layer_dropout.total_steps", "19"], [0, 0.2, 0.4, 0.6], [0, 0.1, 0.2, 0.3]),
    ],
)
def test_layer_dropout_rates_follow_the_keys(args, first, last):
    config = load_config(["--layer_dropout.p_max", "0.6", "--training.steps", "10", *args])
    for t, expected in ((0, first), (9, last)):
        assert config.layer_dropout.rates(config, 4, t).tolist() == pytest.approx(expected)


def test_eval_density_is_the_final_density():
    skips = ["--layer_dropout.p_max", "0.6", "--layer_dropout.schedule", "constant"]
    assert model_args(load_config(skips)).eval_scale is None
    assert model_args(load_config([*skips, "--layer_dropout.scale", "none"])).eval_scale is None
    density = model_args(load_config([*skips, "--layer_dropout.scale", "eval_density"])).eval_scale
    assert density == pytest.approx([1.0, 0.8, 0.6, 0.4])


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--layer_dropout.p_max", "1"], "layer_dropout.p_max = 1.0: must be in [0, 1)"),
        (["--layer_dropout.p_max", "-0.1"], "layer_dropout.p_max = -0.1: must be in [0, 1)"),
        (["--layer_dropout.distribution", "linear"], "must be one of 'uniform', 'increasing', 'alternating'"),
        (["--layer_dropout.schedule", "cosine"], "must be one of 'constant', 'increasing', 'decreasing'"),
        (["--layer_dropout.sampling", "balanced", "--layer_dropout.granularity", "batch"], "granularity = 'batch'"),
        (["--layer_dropout.unit", "sublayer", "--layer_dropout.scale_placement", "block"], "needs unit = 'layer'"),
        (["--layer_dropout.total_steps", "-1"], "layer_dropout.total_steps = -1: must be at least 0"),
    ],
)
def test_layer_dropout_faults(args, fault):
    (found,) = faults(args)
    assert fault in found


def test_the_seed_reaches_the_model():
    assert model_args(load_config(["--training.seed", "7"])).seed == 7


def test_flavors_are_fresh():
    """TorchTitan changes model arguments in place; a second look-up must not see it."""
    from regdrop_titan.models import Flavors

    flavors = Flavors("nape_llama3")
    flavors["debug"].p = 0.9
    assert flavors["debug"].p == 0.0
    assert set(flavors) == set(FAMILIES["nape_llama3"]) and len(flavors) == len(FAMILIES["nape_llama3"])


# Data ---------------------------------------------------------------------------------------------------------

COPYING = ["--training.dataset", "copying", "--training.seq_len", "305"]


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--training.dataset_path", "a:0.7,b"], "training.dataset_path: mixture 'a:0.7,b': 'b' must be PATH:WEIGHT"),
        (["--training.dataset", "pile"], "training.dataset = 'pile': must be one of packed, copying, c4"),
        ([*COPYING, "--training.copying_lengths", "9", "5"], "training.copying_lengths = [9, 5], training.seq_len: "),
        ([*COPYING, "--training.seq_len", "304"], "seq_len must be at least 305"),
        ([*COPYING, "--architecture.vocab_size", "28"], "architecture.vocab_size = 28: the copying task has 30 tokens"),
        ([*COPYING, "--validation.enable", "--validation.steps", "1"], "validation.dataset = 'packed': has other"),
        ([*COPYING, "--validation.enable", "--validation.dataset", "copying", "--validation.steps", "-1"],
         "validation.steps = -1: copying has no end"),
        ([*COPYING, "--validation.context_multiples", "2"], "needs training.dataset = 'packed', got 'copying'"),
        (["--validation.context_multiples", "2", "2"], "validation.context_multiples = [2, 2]: must be different"),
        (["--validation.context_multiples", "0"], "validation.context_multiples = [0]: must be different integers of"),
        (["--validation.context_documents", "0"], "validation.context_documents = 0: must be at least 1"),
        (["--validation.enable", "--validation.context_multiples", "2", "--parallelism.pipeline_parallel_degree", "2"],
         "validation.context_multiples = [2]: not under pipeline parallel"),
    ],
)  # fmt: skip
def test_data_faults(args, fault):
    assert any(fault in found for found in faults(args))


def test_copying_runs_are_accepted():
    config = load_config([*COPYING, "--training.copying_lengths", "5", "10", "--validation.enable",
                          "--validation.dataset", "copying", "--validation.steps", "2"])  # fmt: skip
    assert config.training.copying_lengths == [5, 10]


def test_sets_that_do_not_fit_together(packed, tmp_path):
    """A mixture, validation and model.hf_assets_path must all have the tokenizer of the training data."""
    train = str(packed / "train")
    write_packed(tmp_path / "other", [[1, 2, 3] * 30], 256, tokenizer="another")
    load_config(run_with(f"{train}:0.5,{packed / 'validation'}:0.5"), inputs=True)
    for args in (
        run_with(f"{train}:0.5,{tmp_path / 'other'}:0.5"),
        run_with(train, "--validation.enable", "--validation.dataset_path", str(tmp_path / "other")),
    ):
        (found,) = faults(args, inputs=True)
        assert "other was tokenized by another" in found and "train by stand-in" in found
    (tmp_path / "tokenizer.json").write_text("{}")
    (found,) = faults(run_with(train, "--model.hf_assets_path", str(tmp_path)), inputs=True)
    assert "has another tokenizer than" in found and "tokenized by stand-in" in found
    (tmp_path / "tokenizer.json").write_text("stand-in")  # whose hash the sets have
    load_config(run_with(train, "--model.hf_assets_path", str(tmp_path)), inputs=True)
    (found,) = faults(run_with(f"{train}:0.5,{tmp_path / 'nowhere'}:0.5"), inputs=True)
    assert "training.dataset_path: " in found and "nowhere: no such folder" in found


def test_documents_for_long_context_validation(packed):
    """Documents of 101 tokens: long enough for 3 contexts of 32, not for 4."""
    args = run_with(packed / "train", "--validation.enable", "--validation.dataset_path", str(packed / "validation"))
    load_config([*args, "--validation.context_multiples", "1", "3"], inputs=True)
    (found,) = faults([*args, "--validation.context_multiples", "4"], inputs=True)
    assert "no document of" in found and "129 tokens" in found and "validation.context_dataset_path" in found
    (found,) = faults(
        [*args, "--validation.context_multiples", "2", "--validation.context_dataset_path", "nowhere"], inputs=True
    )
    assert "validation.context_dataset_path: nowhere: no such folder" in found

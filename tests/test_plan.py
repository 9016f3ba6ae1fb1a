import pytest

from regdrop_titan.config import forward_tokens, load_config, loss_pieces
from regdrop_titan.plan import default_world_size, learning_rates, memory_bytes, plan

ARGS = ["--model.flavor", "400M", "--training.global_batch_size", "256", "--training.steps", "76294",
        "--lr_scheduler.warmup_steps", "1907", "--optimizer.lr", "6e-4"]  # fmt: skip


def test_numbers_of_the_400m_run():
    text = plan(load_config(ARGS), 8, mfu=0.5, peak_tflops=1000)
    assert "423.5 M, 226.5 M without embeddings" in text
    assert "40.00 B" in text and "524,288 (256 sequences of 2048)" in text
    # 6 x (423.5 - 98.5) M + 12 x 24 x 768 x 2048 FLOPs a token, by hand
    per_token = 6 * (423_531_264 - 128256 * 768) + 12 * 24 * 768 * 2048
    flops = per_token * 76294 * 524288
    assert f"{flops:.3e}" in text
    assert f"{flops / (8 * 1000e12 * 0.5) / 3600:,.1f} at an MFU of 0.5" in text


def test_learning_rates_are_those_of_the_optimizer():
    """Against the schedule stepped for real."""
    import torch
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import OptimizersContainer

    config = load_config(
        ["--training.steps", "20", "--lr_scheduler.warmup_steps", "4", "--lr_scheduler.decay_ratio", "0.5",
         "--lr_scheduler.min_lr_factor", "0.1"]
    )  # fmt: skip
    optimizers = OptimizersContainer([torch.nn.Linear(1, 1)], torch.optim.SGD, {"lr": config.optimizer.lr})
    schedulers = build_lr_schedulers(optimizers, config.lr_scheduler, 20)
    used = []
    for _ in range(20):
        used.append(schedulers.schedulers[0].get_last_lr()[0])
        optimizers.step()
        schedulers.step()
    assert learning_rates(config, list(range(1, 21))) == pytest.approx(used)
    assert max(used) == config.optimizer.lr and used[0] == config.optimizer.lr / 4


def test_default_world_size():
    assert default_world_size(load_config([])) == 8
    assert default_world_size(load_config(["--training.global_batch_size", "16"])) == 2
    assert default_world_size(load_config(["--parallelism.tensor_parallel_degree", "4"])) == 8
    fixed = ["--parallelism.data_parallel_shard_degree", "4", "--parallelism.tensor_parallel_degree", "2"]
    assert default_world_size(load_config(fixed)) == 8


def test_memory_falls_with_what_saves_memory():
    def total(*extra):
        return memory_bytes(load_config([*ARGS, *extra]), 8, 423_531_264)

    base = total("--activation_checkpoint.mode", "none")
    assert base["weights, gradients, optimizer"] == 16 * 423_531_264 / 8
    assert total("--activation_checkpoint.mode", "full")["activations"] < base["activations"] / 2
    whole = total("--training.loss_chunks", "1")["logits"]
    assert whole == 8 * 2048 * 128256 * (2 * 4 + 2)
    assert total("--training.loss_chunks", "1", "--training.local_batch_size", "1")["logits"] == whole / 8
    assert base["logits"] == whole / 16 + 128256 * 768 * (4 + 2)  # in pieces, by size


def test_pieces_of_the_loss():
    """By size, at most 2^27 logits a rank are made at a time; a number is taken as it is."""

    def pieces(*args):
        config = load_config(list(args))
        return loss_pieces(config, forward_tokens(config))

    debug = ["--training.seq_len", "512", "--training.local_batch_size", "8"]
    large = ["--architecture.vocab_size", str(2**17), "--training.seq_len", "512", "--training.local_batch_size"]
    assert pieces(*debug) == 1
    assert pieces(*debug, "--training.loss_chunks", "7") == 7
    assert [pieces(*large, batch) for batch in ("2", "3", "8")] == [1, 2, 4]
    assert pieces(*large, "8", "--training.loss_chunks", "1") == 1
    assert pieces(*large, "8", "--parallelism.tensor_parallel_degree", "4") == 1
    # a forward is of one micro-batch there
    pipelined = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size"]
    assert [pieces(*large, "8", *pipelined, n) for n in ("1", "4")] == [1, 2]


def test_layer_dropout():
    """ILD + DTS of 0.4 saves 0.1 of the layers' FLOPs; Bernoulli draws give little of it in time on 8 ranks."""
    skips = ["--layer_dropout.p_max", "0.4"]
    text = plan(load_config([*ARGS, *skips]), 8, mfu=0.4, peak_tflops=989)
    assert "0.1000 of the layers' FLOPs saved" in text and "0.000, 0.209, 0.400" in text
    layers = 24 * (6 * 9_438_720 + 12 * 768 * 2048)
    share = layers / (layers + 6 * (128256 * 768 + 768))
    dense = 76294 * 524288 * (layers + 6 * (128256 * 768 + 768))
    assert f"{dense * (1 - 0.1 * share):.3e} of {dense:.3e} dense" in text
    assert "layers' time, balanced   0.900 of dense" in text
    masked = plan(load_config([*ARGS, *skips, "--layer_dropout.no-skip_compute"]), 8, mfu=0.4, peak_tflops=989)
    assert f"{dense:.3e} of {dense:.3e} dense" in masked

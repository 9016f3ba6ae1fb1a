"""What must stay fp32 inside of a block whose parameters and inputs are bf16 under FSDP2."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from .ranks import Ranks

# what each layer reads beside its input, by family and options
MODELS = {
    "nape": ("nape_llama3", {"scaling": "adaptive"}),
    "rope": ("nape_llama3", {"position": "rope"}),
    "hybrid": ("mamba2", {"layers": "mamba,attention", "position": "alibi", "document_mask": True, "eos_id": 3}),
}


def floats(value, seen=None):
    """The dtypes of all floating tensors in a value, whatever it is made of; parameters of the model aside."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return set()
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return {value.dtype} if value.is_floating_point() else set()
    if isinstance(value, dict):
        return set().union(*(floats(each, seen) for each in value.values()), set())
    if isinstance(value, list | tuple):
        return set().union(*(floats(each, seen) for each in value), set())
    return floats(vars(value), seen) if hasattr(value, "__dict__") else set()


def look(rank: int, file: Path) -> int:
    """Write the dtypes that each block's context and layer-dropout factor have in its forward, and its logits."""
    from torch.distributed.device_mesh import init_device_mesh

    from regdrop_titan.distributed.parallelize import shard_parameters
    from regdrop_titan.models import build_model

    torch.distributed.init_process_group("gloo")
    config = SimpleNamespace(
        training=SimpleNamespace(
            mixed_precision_param="bfloat16", mixed_precision_reduce="float32", enable_cpu_offload=False
        ),
        parallelism=SimpleNamespace(fsdp_reshard_after_forward="default"),
    )
    found: dict[str, dict[str, list[str]]] = {}
    for name, (family, options) in MODELS.items():
        sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 64, "vocab_size": 64}
        mamba = {"ssm_head_dim": 16, "state_size": 8} if family == "mamba2" else {}
        model = build_model(family, "debug", **{**sizes, **mamba, **options})
        shard_parameters(model, init_device_mesh("cpu", (2,)), False, config)
        for number, block in model.layers.items():

            def seen(module, args, kwargs, name=name, number=number):
                x, context, kept = args
                assert x.dtype == torch.bfloat16
                found[f"{name} {number}"] = {
                    "context": sorted(map(str, floats(context))), "kept": sorted(map(str, floats(kept))),
                }  # fmt: skip

            # behind FSDP2's own hook, which comes first
            block.register_forward_pre_hook(seen, with_kwargs=True)
        model(torch.randint(0, 64, (2, 12)), keep=torch.tensor([[True, False], [True, True]]), scale=[1 / 0.9, 2.0])
    if rank == 0:
        file.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked")
def test_what_blocks_read_stays_fp32(tmp_path):
    """FSDP2 casts floating tensors in tuples, dicts and dataclasses among the arguments; ours are in none of them."""
    ranks = Ranks(2, partial(look, file=tmp_path / "found.json"), tmp_path / "output")
    assert ranks.wait(120) == [0, 0], (tmp_path / "output.0").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 6
    for name, dtypes in found.items():
        assert dtypes == {"context": ["torch.float32"], "kept": ["torch.float32"]}, name

"""Everything that spreads a decoder over devices, in the order it must be applied: tensor parallel with sequence
parallel, activation checkpointing, compile, then FSDP2, HSDP or DDP. Pipeline stages come here one by one from
TorchTitan's `pipeline_llm`.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.tensor_parallel import maybe_enable_async_tp
from torchtitan.models.llama3.infra.parallelize import (
    _op_sac_save_list,
    apply_compile,
    apply_ddp,
    apply_fsdp,
    disable_fsdp_gradient_division,
)
from torchtitan.tools.utils import device_type

from ..adapters.balcony import DecoderWithExits
from ..config import JobConfig
from ..models.attention import Attention
from ..models.block import Block, Residual
from ..models.decoder import Decoder
from ..models.mamba2 import Mamba2, StateSpace


def parallelize(model: Decoder, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Apply every parallelism but the pipeline's to `model` (on the meta device) and return it."""
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if parallel_dims.tp_enabled:
        tp_mesh = parallel_dims.get_mesh("tp")
        apply_tensor_parallel(model, tp_mesh, not job_config.parallelism.disable_loss_parallel)
        maybe_enable_async_tp(job_config, tp_mesh)
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=_op_sac_save_list | {torch.ops.regdrop_titan.gated_linear_attention.default},
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        apply_compile(model, job_config.compile)
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        shard_parameters(model, parallel_dims.get_mesh(names), parallel_dims.pp_enabled, job_config)
    elif parallel_dims.dp_replicate_enabled:
        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=compiled)
    model.keep_on_cpu()
    return model


def sublayer_plan(name: str, residual: Residual) -> dict:
    """The tensor-parallel plan of one residual sublayer.

    The residual stream, and with it the norm and every dropout placement, is split along the sequence
    (plain local tensors of (B, S/tp, d)); the inner layer gathers its input and reduce-scatters its output.
    """
    inner = residual.inner
    masks_input = residual.placement in ("pre_linear", "vpad")
    n_inputs = residual.n_masks if masks_input else 1
    if isinstance(inner, Mamba2):
        # B and C, read by the heads of all ranks, are made whole on each
        projections = {"in_proj.z": ColwiseParallel(), "in_proj.x": ColwiseParallel(), "in_proj.dt": ColwiseParallel(),
                       "in_proj.bc": Replicated(), "out_proj": RowwiseParallel(output_layouts=Shard(1))}  # fmt: skip
    else:
        (output,) = {child for child, module in inner.named_children() if isinstance(module, nn.Linear)} - set(
            inner.input_projections
        )
        projections = {projection: ColwiseParallel() for projection in inner.input_projections}
        projections |= {output: RowwiseParallel(output_layouts=Shard(1))}
        if isinstance(inner, Attention) and inner.scaling is not None and inner.scaling.adaptive:
            projections |= {"scaling.beta": ColwiseParallel(), "scaling.gamma": ColwiseParallel()}
    return {
        # local output: DTensor's own random generator, which dropout would then use, does not support CPU
        f"{name}.norm": SequenceParallel(use_local_output=True),
        f"{name}.inner": PrepareModuleInput(
            input_layouts=(Shard(1),) * n_inputs, desired_input_layouts=(Replicate(),) * n_inputs
        ),
        **{f"{name}.inner.{projection}": style for projection, style in projections.items()},
    }


class VocabularyParallel(ColwiseParallel):
    """The head's: its vocabulary is sharded, and a loss in place of logits is every rank's already."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        if not isinstance(outputs, DTensor):
            return outputs
        return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)


class Replicated(ParallelStyle):
    """A linear layer whose weight every rank holds whole, on replicated DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


def distribute_parameters(module: nn.Module, tp_mesh: DeviceMesh, placement: Placement) -> None:
    """Make DTensors of `module`'s own parameters, which its forward reads as local tensors."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, tp_mesh, [placement])))


def shard_mamba2(inner: Mamba2, tp_mesh: DeviceMesh) -> None:
    """Split the heads: their channels of the convolution and the norm, and their decays. What goes from the replicated
    B and C to this rank's heads comes back as a part of a gradient, and is summed; so is the gated norm's sum of
    squares, forward and backward."""
    inner.heads //= tp_mesh.size()
    for module in (inner.conv_x, inner.norm, inner.ssm):
        distribute_parameters(module, tp_mesh, Shard(0))
    distribute_parameters(inner.conv_bc, tp_mesh, Replicate())
    group = tp_mesh.get_group()
    inner.to_heads = lambda t: _SumGradient.apply(t, group)
    inner.sum_over_ranks = lambda t: _SumGradient.apply(_Sum.apply(t, group), group)


class _Sum(torch.autograd.Function):
    """The sum over ranks; the gradient is passed on as it is."""

    @staticmethod
    def forward(ctx, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(t, "sum", group))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return funcol.wait_tensor(funcol.all_reduce(gradient.contiguous(), "sum", ctx.group)), None


def apply_tensor_parallel(model: Decoder, tp_mesh: DeviceMesh, loss_parallel: bool) -> None:
    """Shard heads, feed-forward channels and vocabulary; split the residual stream along the sequence."""
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": VocabularyParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    model.tie_embeddings()  # parallelize_module made two parameters of the tied one
    model.sequence_shards = tp_mesh.size()
    if model.tok_embeddings is not None:
        # torch 2.12 to 2.15: an AsyncCollectiveTensor that enters a compiled block breaks its backward. A copy
        # waits for it and stays in the autograd graph, which .wait() leaves.
        model.tok_embeddings.register_forward_hook(
            lambda module, inputs, output: output.clone() if isinstance(output, AsyncCollectiveTensor) else output
        )
    for block in model.layers.values():
        assert isinstance(block, Block)
        mixer = block.mixer.inner
        if isinstance(mixer, Mamba2):
            shard_mamba2(mixer, tp_mesh)
        else:
            assert isinstance(mixer, Attention)
            mixer.shard_heads(tp_mesh.get_local_rank(), tp_mesh.size())
            if mixer.scaling is not None:  # of its own parameters; its linear layers are in the plan
                distribute_parameters(mixer.scaling, tp_mesh, Shard(0))
        plan: dict = {}
        for name, residual in block.named_children():
            assert isinstance(residual, Residual)
            plan |= sublayer_plan(name, residual)
        parallelize_module(block, tp_mesh, plan)


def shard_parameters(model: Decoder, mesh: DeviceMesh, pp_enabled: bool, job_config: JobConfig) -> None:
    """FSDP2 (1-D mesh) or HSDP (2-D mesh)."""
    param_dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    reduce_dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce]
    policy = job_config.parallelism.fsdp_reshard_after_forward
    cpu_offload = job_config.training.enable_cpu_offload
    offload: dict = {"offload_policy": CPUOffloadPolicy()} if cpu_offload else {}
    for module in model.modules():
        if isinstance(module, StateSpace):
            # fp32 all through; small, so gathered once a step. The decoder calls it outside of the block
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=False, **offload)
    if model.args.tied_embeddings or isinstance(model, DecoderWithExits):
        # A tied weight must lie in one FSDP group, and a head that exits share must stay gathered while they read it:
        # the root's group holds embedding, norm and head.
        fsdp_config: dict = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
            **offload,
        }
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            fully_shard(block, **fsdp_config, reshard_after_forward=policy != "never")
        fully_shard(model, **fsdp_config)
        disable_fsdp_gradient_division(model)
    else:
        apply_fsdp(
            model,
            mesh,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            pp_enabled=pp_enabled,
            cpu_offload=cpu_offload,
            reshard_after_forward_policy=policy,
        )
    if device_type == "cpu":
        # gloo has no PREMUL_SUM, which FSDP2 picks for TorchTitan's gradient divide factor of 1
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

"""RegDrop-Titan's attention models for `transformers`, as its exports carry them beside their weights.

It reads torch and transformers alone: `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`.

A pre-norm decoder: every layer adds attention, then a feed-forward, each by a factor; all numbers are in the config.
"""

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

BIAS_NUMBERS = 2**28  # of one bias, 1 GiB: where queries times keys are more, queries are attended to in blocks

# transformers called the cache `past_key_values` in calls and outputs, later `cache`
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


class RegDropConfig(PreTrainedConfig):
    """Sizes, and what the model computes with, as numbers.

    Args:
        layer_kinds: of each layer, "attention", or "nope": without positions and without a window.
        slopes: m_h of each query head's bias `-m_h (i - j)`, 0 for none. None: no head has one.
        rotary_theta: base of the rotary embedding, of halves of a head. None: there is none.
        rotary_yarn: YaRN's factor and original context (arXiv 2309.00071). None: the rotary positions as they are.
        attention_window: keys that a query sees, its own included. None: all. (Not `sliding_window`, by which the
            library's caches would drop keys that "nope" layers need.)
        attention_multiplier: of the scores.
        scaling: factor of each query: "none", "adaptive" `delta + beta (ln n)^gamma`, "ssmax" `s ln n`.
        scaled_layers, scaled_heads: whether each of them has it.
        scaling_delta: delta.
        ffn: "swiglu", or "relu2": a squared ReLU without a gate.
        norm: "rmsnorm" or "layernorm".
        use_bias: in the linear layers of attention and feed-forward.
        residual_multiplier: of what attention and feed-forward add.
        layer_factors: one more for each layer. None: 1.
        factor_of_layer: whether the layer's factor multiplies what the layer adds in all; else attention's and the
            feed-forward's part, each where it is added.
        logits_divisor: of the logits.
    """

    model_type = "regdrop"

    def __init__(
        self,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        intermediate_size: int = 256,
        vocab_size: int = 256,
        layer_kinds: list[str] | None = None,
        slopes: list[float] | None = None,
        rotary_theta: float | None = None,
        rotary_yarn: tuple[float, int] | None = None,
        attention_window: int | None = None,
        attention_multiplier: float = 0.25,
        scaling: str = "none",
        scaled_layers: list[bool] | None = None,
        scaled_heads: list[bool] | None = None,
        scaling_delta: float = 1.0,
        ffn: str = "swiglu",
        norm: str = "rmsnorm",
        norm_eps: float = 1e-5,
        use_bias: bool = False,
        residual_multiplier: float = 1.0,
        layer_factors: list[float] | None = None,
        factor_of_layer: bool = False,
        logits_divisor: float = 1.0,
        tie_word_embeddings: bool = False,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.intermediate_size = intermediate_size
        self.vocab_size = vocab_size
        self.layer_kinds = layer_kinds or ["attention"] * num_hidden_layers
        self.slopes = slopes
        self.rotary_theta = rotary_theta
        self.rotary_yarn = rotary_yarn
        self.attention_window = attention_window
        self.attention_multiplier = attention_multiplier
        self.scaling = scaling
        self.scaled_layers = scaled_layers or [scaling != "none"] * num_hidden_layers
        self.scaled_heads = scaled_heads or [scaling != "none"] * num_attention_heads
        self.scaling_delta = scaling_delta
        self.ffn = ffn
        self.norm = norm
        self.norm_eps = norm_eps
        self.use_bias = use_bias
        self.residual_multiplier = residual_multiplier
        self.layer_factors = layer_factors
        self.factor_of_layer = factor_of_layer
        self.logits_divisor = logits_divisor
        self.use_cache = use_cache
        # no default of the library's: they differ by its version
        kwargs |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        kwargs["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**kwargs)


def wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def yarn_scaling(head_dim: int, theta: float, factor: float, original_context: int) -> tuple[list[float], float]:
    """YaRN's factor of each pair of channels' frequency, and that of cos and sin: a ramp from 1 to 1/factor between the
    pairs that turn 32 times and once over the original context."""

    def pair(turns: float) -> float:
        return head_dim * math.log(original_context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(32.0)), 0), min(math.ceil(pair(1.0)), head_dim - 1)
    ramp = [min(max((c - low) / max(high - low, 0.001), 0.0), 1.0) for c in range(head_dim // 2)]
    return [1 - share + share / factor for share in ramp], 0.1 * math.log(factor) + 1.0


def rotary_table(
    positions: Tensor, head_dim: int, theta: float, yarn: tuple[float, int] | None
) -> tuple[Tensor, Tensor]:
    """cos and signed sin at positions (B or 1, S): each (B or 1, 1, S, head_dim) fp32. sin is negative in the first
    half, so that `x cos + roll(x, head_dim/2) sin` is the rotation."""
    channels = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
    frequencies, temperature = theta ** (-channels / head_dim), 1.0
    if yarn is not None:
        scales, temperature = yarn_scaling(head_dim, theta, *yarn)
        frequencies = frequencies * torch.tensor(scales, device=positions.device, dtype=torch.float64)
    angles = positions[:, None, :, None].double() * frequencies
    cos, sin = (angles.cos() * temperature).float(), (angles.sin() * temperature).float()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, S, head_dim)"""
    return torch.addcmul(wide(x) * cos, wide(x).roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def attention_bias(
    slopes: list[float] | None, window: int | None, attention_mask: Tensor | None, device: Any, past: int, n: int
) -> Tensor:
    """What is added to the scores of the n queries after `past` keys: (B or 1, H or 1, n, past + n).

    `-m_h (i - j)` where a query sees a key, -inf elsewhere; fp32, since bf16 cannot hold distances past 256. Padding
    is on one side, so that places in the batch are as far from each other as positions.
    """
    keys = torch.arange(past + n, device=device)
    distance = keys[past:, None] - keys  # (n, past + n): i - j
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    seen = seen[None, None]
    if attention_mask is not None:  # a padding token sees itself: without any key it would be NaN
        seen = seen & (attention_mask[:, None, None, : past + n].bool() | (distance == 0))
    slope = torch.tensor([0.0] if slopes is None else slopes, device=device)
    return torch.where(seen, -slope[:, None, None] * distance.float(), -torch.inf)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = wide(q @ k.transpose(-1, -2)) * scale + bias
    return scores.softmax(dim=-1).to(v.dtype) @ v


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if bias is None:  # plain causal; a single query is the last one and sees all
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale)
    # in fp32 as the bias: not every kernel takes a bias that is wider than the queries
    q, k, v, dtype = wide(q), wide(k), wide(v), v.dtype
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), scale=scale).to(dtype)


ATTENTION: dict[str, Callable[..., Tensor]] = {"eager": eager_attention, "sdpa": sdpa_attention}


class RegDropQueryScaling(nn.Module):
    """The factor of each query: (B, S, d) -> (B, S, H), by `ln n` with `n = i + 2`."""

    def __init__(self, config: RegDropConfig) -> None:
        super().__init__()
        self.adaptive = config.scaling == "adaptive"
        self.delta = config.scaling_delta
        self.heads = config.scaled_heads
        if self.adaptive:
            self.beta = nn.Linear(config.hidden_size, config.num_attention_heads)
            self.gamma = nn.Linear(config.hidden_size, config.num_attention_heads)
        else:
            self.s = nn.Parameter(torch.ones(config.num_attention_heads))

    def forward(self, x: Tensor, log_n: Tensor) -> Tensor:
        log_n = log_n[..., None]  # (B or 1, S, 1)
        if self.adaptive:
            exponent = 2.0 * torch.tanh(wide(self.gamma(x)))
            factor = self.delta + F.softplus(wide(self.beta(x))) * log_n**exponent
        else:
            factor = wide(self.s) * log_n
        return torch.where(torch.tensor(self.heads, device=x.device), factor, 1.0)


class RegDropAttention(nn.Module):
    def __init__(self, config: RegDropConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.head_dim = config.hidden_size // config.num_attention_heads
        kv_dim = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=config.use_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=config.use_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.scaling = RegDropQueryScaling(config) if config.scaled_layers[layer] else None

    def forward(
        self,
        x: Tensor,
        bias_of: Callable[..., Tensor] | None,
        rows: int,
        rotary: tuple[Tensor, Tensor] | None,
        log_n: Tensor,
        cache: Any,
    ) -> Tensor:
        B, S, d = x.shape
        H, H_kv = self.config.num_attention_heads, self.config.num_key_value_heads
        q = self.q_proj(x).view(B, S, H, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, S, H_kv, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, S, H_kv, self.head_dim).transpose(1, 2)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.scaling is not None:
            q = (q * self.scaling(x, log_n).transpose(1, 2)[..., None]).to(q.dtype)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if H_kv < H:
            k, v = (t.repeat_interleave(H // H_kv, dim=1) for t in (k, v))
        attend, scale = ATTENTION[self.config._attn_implementation], self.config.attention_multiplier
        if bias_of is None:
            out = attend(q, k, v, None, scale)
        else:
            past, blocks = k.shape[2] - S, []
            for start in range(0, S, rows):
                queries = q[:, :, start : start + rows]
                n = queries.shape[2]
                seen = past + start + n  # keys of the block's last query
                bias = bias_of(past + start, n)
                blocks.append(attend(queries, k[:, :, :seen], v[:, :, :seen], bias, scale))
            out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
        return self.o_proj(out.transpose(1, 2).reshape(B, S, d))


class RegDropMLP(nn.Module):
    def __init__(self, config: RegDropConfig) -> None:
        super().__init__()
        self.gated = config.ffn == "swiglu"
        if self.gated:
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(F.relu(self.up_proj(x)).square())


def build_norm(config: RegDropConfig) -> nn.Module:
    return (nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps)


class RegDropLayer(nn.Module):
    def __init__(self, config: RegDropConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config)
        self.self_attn = RegDropAttention(config, layer)
        self.post_attention_layernorm = build_norm(config)
        self.mlp = RegDropMLP(config)
        factor = 1.0 if config.layer_factors is None else config.layer_factors[layer]
        self.inside = config.residual_multiplier * (1.0 if config.factor_of_layer else factor)
        self.outside = factor if config.factor_of_layer else 1.0

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        update = self.inside * self.self_attn(self.input_layernorm(x), **context)
        update = update + self.inside * self.mlp(self.post_attention_layernorm(x + update))
        return x + self.outside * update


class RegDropPreTrainedModel(PreTrainedModel):
    config_class = RegDropConfig
    base_model_prefix = "model"
    _no_split_modules = ["RegDropLayer"]  # noqa: RUF012 (transformers declares it)
    _supports_sdpa = True


class RegDropModel(RegDropPreTrainedModel):
    """The decoder without its head."""

    def __init__(self, config: RegDropConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([RegDropLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = build_norm(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Final hidden states (B, S, d) of the tokens after those of the cache, which `cache` and `past_key_values`
        both mean.

        Args:
            attention_mask: (B, past + S), 0 where a token is padding.
            position_ids: (B or 1, S); counted from each sequence's first real token when None.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if output_attentions:
            raise ValueError("output_attentions: this model does not return attention weights")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        S = x.shape[1]
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        if getattr(cache, "is_compileable", False):
            raise ValueError("static caches are not supported, whose keys are more than there are tokens")
        past = 0 if cache is None else int(cache.get_seq_length())
        if attention_mask is not None and tuple(attention_mask.shape[1:]) != (past + S,):
            raise ValueError(
                f"attention_mask must be (batch, {past + S}): {past} tokens of the cache and {S} new ones, got "
                f"{tuple(attention_mask.shape)}"
            )
        if position_ids is None:
            if attention_mask is None:
                position_ids = torch.arange(past, past + S, device=x.device)[None]
            else:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
        padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
        rows = max(1, BIAS_NUMBERS // (x.shape[0] * self.config.num_attention_heads * (past + S)))
        contexts = {
            kind: self.context(kind, past, position_ids, padding, rows) for kind in set(self.config.layer_kinds)
        }
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [x]
        n_layers = self.config.num_hidden_layers  # assistant_early_exit lowers it while it drafts
        for kind, layer in zip(self.config.layer_kinds[:n_layers], self.layers[:n_layers], strict=True):
            x = layer(x, cache=cache, **contexts[kind])
            states.append(x)
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x, hidden_states=(*states[:-1], x) if wanted else None, **{CACHE: cache}
        )

    def context(self, kind: str, past: int, position_ids: Tensor, padding: Tensor | None, rows: int) -> dict[str, Any]:
        """What attention layers of a kind read beside their input and cache. `rows`: queries of a block."""
        config, S = self.config, position_ids.shape[1]
        positional = kind != "nope"
        slopes = config.slopes if positional else None
        window = config.attention_window if positional else None
        rotary = None
        if positional and config.rotary_theta is not None:
            head_dim = config.hidden_size // config.num_attention_heads
            rotary = rotary_table(position_ids, head_dim, config.rotary_theta, config.rotary_yarn)
        plain = slopes is None and window is None and padding is None and (past == 0 or S == 1)
        bias_of: Callable[..., Tensor] | None = None
        if not plain or config._attn_implementation == "eager":
            bias_of = partial(attention_bias, slopes, window, padding, position_ids.device)
            if rows >= S:  # all at once, the same for every layer
                bias = bias_of(past, S)
                bias_of = lambda past, n: bias  # noqa: E731
        return {"bias_of": bias_of, "rows": rows, "rotary": rotary, "log_n": (position_ids + 2).float().log()}


class RegDropForCausalLM(RegDropPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers declares it)

    def __init__(self, config: RegDropConfig) -> None:
        super().__init__(config)
        self.model = RegDropModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, S, vocabulary), of the last `logits_to_keep` positions (0: all) or of those it lists; `labels`
        (B, S) are shifted here, -100 counts for nothing."""
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept] / self.config.logits_divisor)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=out.hidden_states, **{CACHE: getattr(out, CACHE)}
        )

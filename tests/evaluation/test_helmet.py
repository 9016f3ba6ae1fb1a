"""What HELMET's loader asks of a model (docs/helmet.md), of our exports: no code of HELMET is here."""

import copy
import importlib.util
import json

import pytest
import torch
import transformers

from regdrop_titan.checkpoints.hf_tokenizer import write_tokenizer
from regdrop_titan.checkpoints.huggingface import export_huggingface, import_huggingface
from regdrop_titan.data.tokenizers import load_tokenizer, train_tokenizer
from regdrop_titan.models import build_model

ATTENTION = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
MODELS = {
    "nape": ("nape_llama3", ATTENTION),
    "smollm3": ("smollm3", ATTENTION | {"sliding_window": 9}),
    "mamba2": ("mamba2", {"dim": 32, "n_layers": 2, "ssm_head_dim": 16, "state_size": 8, "chunk_size": 8}),
}
TEXT = "label: 3\n\nthe quick brown fox, naïve 日本 12345\nlabel:"


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory):
    """A model, its export with the bytes as tokenizer, and both sides of it loaded as HELMET does."""
    family, options = MODELS[request.param]
    model = build_model(family, "debug", **options, vocab_size=257, eos_id=256).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    export_huggingface(model, folder)
    write_tokenizer(load_tokenizer("bytes"), folder)
    return model, folder


def load(folder, **options):
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, torch_dtype=torch.float32, trust_remote_code=True, **options
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@torch.no_grad()
def test_prefix_caches(exported):
    """The body's cache of all tokens but the last gives the logits and the answer of our own forwards. Mamba2's body is
    called `backbone`, where HELMET does not look for it and generates from the whole prompt; its cache is
    `cache_params` to it, a `past_key_values` it takes and does not read."""
    model, folder = exported
    theirs, tokenizer = load(folder)
    inputs = tokenizer([TEXT], return_tensors="pt")
    ids, mask = inputs.input_ids, inputs.attention_mask
    assert ids[0].tolist() == list(TEXT.encode())
    answer = ids
    for _ in range(6):
        answer = torch.cat([answer, model(answer)[:, -1:].argmax(-1)], dim=1)
    options = {
        "max_new_tokens": 6, "min_new_tokens": 0, "do_sample": False, "temperature": 0.0, "top_p": 1.0,
        "eos_token_id": [999], "pad_token_id": tokenizer.pad_token_id, "return_dict_in_generate": True,
    }  # fmt: skip
    mamba2 = theirs.config.model_type == "mamba2"
    assert hasattr(theirs, "model") != mamba2
    body = theirs.backbone if mamba2 else theirs.model
    prefill = body(input_ids=ids[..., :-1], attention_mask=mask[..., :-1])
    cache = prefill.cache_params if mamba2 else prefill.past_key_values
    assert cache is not None
    name = "cache_params" if mamba2 else "past_key_values"
    logits = theirs(ids[:, -1:], attention_mask=mask, **{name: copy.deepcopy(cache)}).logits
    torch.testing.assert_close(logits, model(ids)[:, -1:], rtol=1e-4, atol=1e-4)
    for prefix in [{}] if mamba2 else [{}, {"past_key_values": cache}]:
        sequences = theirs.generate(input_ids=ids, attention_mask=mask, **prefix, **options)["sequences"]
        assert torch.equal(sequences, answer)


def test_flash_attention_is_refused_by_name(exported):
    """Which HELMET asks for: an error, no other computation."""
    _, folder = exported
    if "smollm3" in str(folder) and importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn is installed, which this class can use")
    with pytest.raises((ValueError, ImportError), match=r"Flash ?Attention ?2"):
        load(folder, attn_implementation="flash_attention_2")


def test_newlines_and_cutting_by_offsets(tmp_path):
    """HELMET stops at the token of a newline by its name, and cuts a context that is too long by offsets of tokens."""
    trained = train_tokenizer([TEXT * 20], 280)
    trained.save(str(tmp_path / "tokenizer.json"))
    for ours in (load_tokenizer("bytes"), load_tokenizer(tmp_path)):
        folder = tmp_path / ours.kind
        folder.mkdir()
        write_tokenizer(ours, folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.is_fast and tokenizer.padding_side in ("left", "right")
        assert tokenizer.convert_tokens_to_ids("Ċ") == ours.encode("\n")[0]
        assert tokenizer.convert_tokens_to_ids("<0x0A>") is None
        encoded = tokenizer([TEXT], return_offsets_mapping=True)
        n = encoded["offset_mapping"][0][-10][0]
        assert 0 < n < len(TEXT)
        kept = ours.encode(TEXT[:n]).tolist()
        assert kept == encoded.input_ids[0][: len(kept)] and len(kept) <= len(encoded.input_ids[0]) - 10


def test_exports_for_it(tmp_path, script, capsys):
    """Tokenizers of all kinds, one that does not fit, and a path that HELMET would send to an API."""
    model = build_model("nape_llama3", "debug", **ATTENTION, vocab_size=300)
    export_huggingface(model, tmp_path / "hf")
    import_huggingface(tmp_path / "hf", tmp_path / "run")
    (tmp_path / "bare").mkdir()
    train_tokenizer([TEXT * 20], 280).save(str(tmp_path / "bare/tokenizer.json"))

    def export(name, tokenizer):
        status = script("export_hf", "--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / name),
                        "--tokenizer", str(tokenizer))  # fmt: skip
        return status, capsys.readouterr().err

    assert export("bytes", "bytes") == (0, "")
    status, said = export("gpt2/bare", tmp_path / "bare")
    assert status == 0 and "warning" in said and "'gpt' in it: HELMET would take it for a model behind an API" in said
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>", "chat_template": "{{ 1 }}"}
    (tmp_path / "bare/tokenizer_config.json").write_text(json.dumps(own))
    assert export("own", tmp_path / "bare") == (0, "")
    assert json.loads((tmp_path / "own/tokenizer_config.json").read_text()) == own
    assert export("from_file", tmp_path / "bare/tokenizer.json") == (0, "")
    for name, wanted in (("bytes", "bytes"), ("gpt2/bare", tmp_path / "bare"), ("from_file", tmp_path / "bare")):
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / name, trust_remote_code=True)
        assert loaded(TEXT).input_ids == load_tokenizer(wanted).encode(TEXT).tolist()
        assert loaded.chat_template is None
    train_tokenizer([" ".join(map(str, range(999)))], 301).save(str(tmp_path / "bare/tokenizer.json"))
    status, said = export("large", tmp_path / "bare")
    assert status == 2 and "has 301 tokens, the model's vocabulary 300" in said
    status, said = export("none", tmp_path / "nowhere")
    assert status == 2 and "nowhere': no such file or folder" in said
    assert not (tmp_path / "large").exists() and not (tmp_path / "none").exists()

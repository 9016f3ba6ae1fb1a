"""A run's folder without a run: a small model with a tokenizer, as training would leave it."""

import dataclasses
import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from regdrop_titan.data.tokenizers import load_tokenizer, train_tokenizer
from regdrop_titan.models import Decoder, build_model

# what RULER's prompts are made of, so that its smallest samples have few tokens
TEXT = [
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "One of the special magic numbers for tall-tree is: 8314265. A special magic number is hidden within the following",
    "text. Make sure to memorize it. I will quiz you about the number afterwards. What is the special magic number for",
    "Memorize and track the chain(s) of variable assignment hidden in the following text. VAR ABCDE = 12345",
    "VAR KLMNO Question: Find all variables that are assigned the value 12345 in the text above. Answer: According to",
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that",
    "most often. 1. stone 2. river 3. mountain 4. table. Question: What are the 10 most common words in the list?",
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared",
    "coded words. Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most",
]
SMALL = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 48}


def write_run(folder: Path, context: int = 64, family: str = "nape_llama3", **overrides) -> Decoder:
    """Leave `checkpoint/step-1`, `config.json` and `data/tokenizer.json` in `folder`; returns the model."""
    data = folder / "data"
    data.mkdir(parents=True)
    tokenizer = train_tokenizer(TEXT, 500)
    tokenizer.save(str(data / "tokenizer.json"))
    model = build_model(family, "debug", **{**SMALL, "vocab_size": 512, "eos_id": 0, **overrides}).eval()
    with torch.no_grad():  # far from uniform, so that no two tokens are nearly as likely
        model.output.weight *= 20
    write_checkpoint(model, folder, context, data / "tokenizer.json")
    return model


def write_checkpoint(model: Decoder, folder: Path, context: int, tokenizer: Path) -> None:
    loaded = load_tokenizer(tokenizer)
    dcp.save(model.state_dict(), checkpoint_id=str(folder / "checkpoint/step-1"), no_dist=True)
    config = {
        "model": {"name": "nape_llama3", "flavor": "debug"},
        "model_args": dataclasses.asdict(model.args),
        "tokenizer": {"name": loaded.name, "kind": loaded.kind, "file": tokenizer.name, "sha256": loaded.sha256},
        "training": {"seq_len": context, "dataset": "packed", "dataset_path": str(tokenizer.parent)},
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_questions(folder: Path) -> Path:
    """Leave questions in the form of ARC's in `folder`, as the hub's command line leaves a data set; returns it."""
    arc = folder / "allenai/ai2_arc"
    (arc / "ARC-Easy").mkdir(parents=True)
    labels = ["A", "B", "C", "D"]
    for split, n in (("train", 3), ("validation", 2), ("test", 6)):
        lines = [
            {
                "id": f"{split} {i}",
                "question": "What is " + "green and blue and yellow " * i + "?",
                "choices": {"text": ["the grass", "the tall sky " * (i + 1), "a stone", "one number"], "label": labels},
                "answerKey": labels[i % 4],
            }
            for i in range(n)
        ]
        (arc / f"ARC-Easy/{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = "".join(f"  - split: {s}\n    path: ARC-Easy/{s}.jsonl\n" for s in ("train", "validation", "test"))
    (arc / "README.md").write_text(f"---\nconfigs:\n- config_name: ARC-Easy\n  data_files:\n{files}---\n")
    return folder

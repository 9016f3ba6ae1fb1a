"""Our checkpoints as a model of lm-evaluation-harness.

    python -m regdrop_titan.evaluation.lm run --model regdrop --model_args checkpoint=outputs/RUN/checkpoint \\
        --tasks arc_easy

is the harness's own command line, which then knows this model. `scripts/evaluate.py lm-eval` needs no more than names.

Batches are padded on the right, where no layer reads the padding, so that a sample's result does not depend on what is
beside it. Nothing is cut silently: with `truncation=false` a prompt that is too long is an error before anything is
computed, with true the tokens cut are counted.
"""

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from torch import Tensor
from torchtitan.tools.logging import logger
from tqdm import tqdm

from ..checkpoints import CheckpointError
from ..data.tokenizers import HuggingFaceTokenizer
from ..generation import chosen_layers, generate, logits_at
from .subjects import InputError, Subject, checkpoint_subject, huggingface_subject, tell

HEAD = 8  # tokens of the first prompt that are logged
MAX_NEW_TOKENS = 256  # of tasks that do not say


@register_model("regdrop")
class RegDropLM(TemplateLM):
    """A checkpoint behind the harness.

    Args:
        checkpoint: `…/checkpoint/step-N`, `…/checkpoint`, or the subject that `scripts/evaluate.py` found.
        hf: a Hugging Face folder instead, of a format that ours reads.
        tokenizer: folder, file or "bytes"; default: the one kept beside the training data.
        batch_size: samples side by side.
        max_length: tokens of prompt and answer together, at most; default: the training context; 0: no limit.
        truncation: cut what is longer from the left, and count it, instead of refusing it.
        bos_token: a special token of the tokenizer to begin every text with, once; "none": none. Default: the one that
            the tokenizer of a Hugging Face folder begins with; of our runs none, as their data are prepared. An empty
            context is then the end-of-text token, which in training comes before every document.
        exit_layer: only the first so many layers, 0 ... L.
        skip_layers: layers that are left out, as "3+5".
        device: as torch names it; default: this process's GPU if there is one, else the CPU.
    """

    def __init__(
        self,
        checkpoint: str | Subject | None = None,
        hf: str | None = None,
        tokenizer: str | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        truncation: bool = False,
        bos_token: str | None = None,
        exit_layer: int | None = None,
        skip_layers: str | int | Sequence[int] = (),
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if (checkpoint is None) == (hf is None):
            raise InputError("name one model, by checkpoint or by hf")
        if isinstance(checkpoint, Subject):
            self.subject = checkpoint
        elif checkpoint is not None:
            self.subject = checkpoint_subject(checkpoint, tokenizer=tokenizer)
        else:
            self.subject = huggingface_subject(str(hf), tokenizer=tokenizer, context=max_length)
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise InputError(f"batch_size {batch_size!r}: must be a number of at least 1")
        self.batch_size = int(batch_size)
        self.layers = layers_of(self.subject, exit_layer, skip_layers)
        self.text = self.subject.tokenizer
        self.bos_token = begin_of_text(self.subject) if bos_token is None else bos_token
        if self.bos_token == "none":
            self.bos_token = None
        if self.bos_token is not None and self.bos_token not in self.text.special_ids:
            known = ", ".join(self.text.special_ids)
            raise InputError(f"bos_token {bos_token!r}: not a special token of {self.text.name}; there are {known}")
        self.bos_id = None if self.bos_token is None else self.text.special_ids[self.bos_token]
        self.max_length = self.subject.context if max_length is None else max_length
        self.truncation = truncation
        self.cut = 0  # samples that were truncated
        self.head: list[int] | None = None  # the first tokens of the first prompt
        self._init_ranks()
        self.model = self.subject.load(device or self._default_device())
        self._device = next(self.model.parameters()).device

    # Ranks: the harness gives each its share of the samples ------------------------------------------------------

    def _init_ranks(self) -> None:
        self._rank, self._world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self._world_size > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")

    def _default_device(self) -> str:
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = [torch.zeros_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return torch.stack(gathered)

    def gather_object(self, obj, dst: int = 0):
        if self.world_size == 1:
            return [obj]
        gathered = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, gathered, dst=dst)
        return gathered

    def barrier(self) -> None:
        dist.barrier()

    # Text ---------------------------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        return self.text.sha256

    @property
    def eot_token_id(self) -> int:
        return self.text.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Stands for an empty context."""
        return self.eot_token_id if self.bos_id is None else self.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """The ids of a text, behind exactly one BOS where there is one: that of a template is taken for it."""
        if self.bos_token is not None and self.bos_id is not None:
            string = string.removeprefix(self.bos_token)
        ids = self.text.encode(string).tolist()
        return ids if self.bos_id is None or add_special_tokens is False else [self.bos_id, *ids]

    def _log_head(self, ids: Sequence[int]) -> None:
        if self.head is None:
            self.head = list(ids[:HEAD])
            logger.info(f"first prompt begins with {self.head}: {self.text.decode(self.head)!r}")

    def _check_lengths(self, needed: Sequence[int]) -> None:
        """Raise InputError where requests need more tokens than `max_length`, unless they may be cut."""
        longer = [n for n in needed if n > self.max_length]
        if not longer or self.max_length == 0:
            return
        if not self.truncation:
            raise InputError(
                f"{len(longer)} of {len(needed)} requests need more than max_length = {self.max_length} tokens, the "
                f"longest {max(longer)}; give a larger max_length (0: no limit), or truncation=true to cut prompts "
                "from the left"
            )
        self.cut += len(longer)
        logger.warning(
            f"{len(longer)} of {len(needed)} prompts are cut from the left to {self.max_length} tokens (the longest "
            f"has {max(longer)})"
        )

    # Requests -----------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
        """The log-likelihood in nats of each continuation behind its context, and whether it is the greedy one."""
        self._check_lengths([len(context) + len(continuation) - 1 for _, context, continuation in requests])
        if requests:
            self._log_head(requests[0][1])
        ordered = Collator(requests, sort_fn=lambda r: (-len(r[1]) - len(r[2]), (*r[1], *r[2])))
        found = []
        bar = tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm or self.rank > 0)
        for batch in ordered.get_batched(n=self.batch_size):
            found += self._score(batch)
            for (text, _, _), result in zip(batch, found[-len(batch) :], strict=True):
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, result)
            bar.update(len(batch))
        bar.close()
        return ordered.get_original(found)

    def _score(self, batch: Sequence[tuple]) -> list[tuple[float, bool]]:
        inputs, targets = [], []
        for _, context, continuation in batch:
            if not context or not continuation:
                raise ValueError("a context and its continuation must have at least one token each")
            kept = (context + continuation)[-self.max_length - 1 if self.max_length else 0 :]
            inputs.append(torch.tensor(kept[:-1]))
            targets.append(torch.tensor(continuation[-len(inputs[-1]) :]))
        most = max(map(len, targets))
        at = torch.stack([
            (torch.arange(most) + len(tokens) - len(target)).clamp(max=len(tokens) - 1)
            for tokens, target in zip(inputs, targets, strict=True)
        ])  # fmt: skip
        log_p = logits_at(self.model, inputs, at, self.layers).log_softmax(-1).cpu()  # (B, most, vocab)
        return [
            (
                row[range(len(target)), target].double().sum().item(),
                torch.equal(row[: len(target)].argmax(-1), target),
            )
            for row, target in zip(log_p, targets, strict=True)
        ]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood in nats of whole texts, in windows of `max_length` tokens that each predict what the one
        before did not reach (0: in one)."""
        windows, owners = [], []
        for i, (text,) in enumerate(request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            width = self.max_length or max(1, len(ids))
            for window in utils.get_rolling_token_windows(ids, self.prefix_token_id, width, context_len=1):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += log_likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, up to and without a stop string or the end of text."""
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        options = [self._options(request.args[1]) for request in requests]
        self._check_lengths([len(p) + most for p, (_, most) in zip(prompts, options, strict=True)])
        if requests:
            self._log_head(prompts[0])
        ordered = Collator(
            list(zip(prompts, options, requests, strict=True)),
            sort_fn=lambda r: (-len(r[0]), r[0]),
            group_by="gen_kwargs",
            group_fn=lambda r: {"until": r[1][0], "max_gen_toks": r[1][1]},
        )
        found = []
        bar = tqdm(total=len(requests), desc="answers", disable=disable_tqdm or self.rank > 0)
        for batch in ordered.get_batched(n=self.batch_size):
            until, most = batch[0][1]
            for answer, (_, _, request) in zip(self._answers([r[0] for r in batch], until, most), batch, strict=True):
                found.append(answer)
                self.cache_hook.add_partial("generate_until", request.args, answer)
                bar.update(1)
        bar.close()
        return ordered.get_original(found)

    def _options(self, given: dict) -> tuple[list[str], int]:
        """Stop strings, and the most tokens to write. Raises InputError for answers that are not greedy."""
        options = normalize_gen_kwargs(given, MAX_NEW_TOKENS)
        if options.get("do_sample"):
            raise InputError(f"generation of {given}: only greedy answers are evaluated (do_sample false)")
        most = options["max_gen_toks"]
        if self.max_length and most >= self.max_length:
            raise InputError(f"max_length = {self.max_length}: leaves no prompt beside {most} new tokens")
        return handle_stop_sequences(options["until"], eos=None), most

    def _answers(self, prompts: list[list[int]], until: list[str], most: int) -> list[str]:
        room = self.max_length - most if self.max_length else 0

        def finished(row: int, new: list[int]) -> bool:
            return new[-1] == self.eot_token_id or any(stop and stop in self.text.decode(new) for stop in until)

        texts = [torch.tensor(prompt[-room:] if room else prompt) for prompt in prompts]
        answers = []
        L = self.subject.args.n_layers
        skipped = [] if self.layers is None else sorted(set(range(L)) - set(self.layers))
        for ids in generate(self.model, texts, most, skip_layers=skipped, finished=finished)[0]:
            new = ids.tolist()
            if new[-1] == self.eot_token_id:
                new = new[:-1]
            answers.append(postprocess_generated_text(self.text.decode(new), until, None))
        return answers

    def get_model_info(self) -> dict:
        """What the harness writes into its results of the model."""
        return {
            "checkpoint": str(self.subject.source),
            "model_num_parameters": self.subject.args.n_parameters(),
            "layers": self.layers,
            "max_length": self.max_length,
            "truncated": self.cut,
        }


def begin_of_text(subject: Subject) -> str | None:
    """The special token that the tokenizer of a Hugging Face folder puts before every text, if it does."""
    text = subject.tokenizer
    if subject.config or not isinstance(text, HuggingFaceTokenizer):
        return None
    first = text.tokenizer.encode("a", add_special_tokens=True).ids[0]
    return next((name for name, i in text.special_ids.items() if i == first), None)


def layers_of(
    subject: Subject, exit_layer: int | None, skip_layers: str | int | Sequence[int] = ()
) -> list[int] | None:
    """The layers that are computed, None for all. Raises InputError for indices that there are not."""
    try:
        skipped = (
            [int(layer) for layer in str(skip_layers).split("+")]
            if isinstance(skip_layers, str | int)
            else list(skip_layers)
        )
    except ValueError:
        raise InputError(f"skip_layers {skip_layers!r}: give indices joined by +, as 3+5") from None
    try:
        return chosen_layers(subject.args.n_layers, exit_layer, skipped)
    except ValueError as faults:
        raise InputError(str(faults)) from None


def main() -> int:
    """The harness's command line, with status 2 and no traceback for what a user can mend."""
    try:
        cli_evaluate()
    except (InputError, CheckpointError) as error:
        return tell(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The decoder: embedding, blocks, norm, head. Every model family is arguments of this one class."""

import torch
from torch import Tensor, nn
from torchtitan.protocols.model import ModelProtocol

from .args import DecoderArgs
from .block import Block
from .initialization import initialize
from .positions import document_ids


class Decoder(ModelProtocol):
    """A decoder-only language model.

    Its children are those that TorchTitan's pipeline split expects (`tok_embeddings`, `layers`, `norm`,
    `output`); a pipeline stage has None for the ones it does not hold.
    """

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args)
        self.args = args
        self.sequence_shards = 1  # tensor-parallel ranks that a sequence is split over between blocks
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): Block(args) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.tie_embeddings()

    def tie_embeddings(self) -> None:
        """Make the head read the embedding's own weight, where the flavor ties them."""
        if self.args.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Draw the initial weights from `args.seed`: the same for every parallel layout."""
        self.tie_embeddings()
        initialize(self, self.args)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits of every position.

        Args:
            tokens: (B, S) int64; on later pipeline stages the activations (B, S, d) of the stage before.
            documents: (B, S) int32, the document of each token, for `document_mask`; found from the tokens'
                end-of-text ids when None (a later pipeline stage must be given it).

        Returns:
            (B, S, vocab_size); activations (B, S, d) on a pipeline stage without the head.
        """
        if self.tok_embeddings is not None:
            seq_len = tokens.shape[1]
            if self.args.document_mask and documents is None:
                documents = document_ids(tokens, self.args.eos_id)
            h = self.tok_embeddings(tokens)
        else:
            h = tokens
            seq_len = h.shape[1] * self.sequence_shards
        for block in self.layers.values():
            h = block(h, block.context(seq_len, h.device, documents))
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h

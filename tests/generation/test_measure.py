"""What is measured of a draft."""

import math

import pytest

from regdrop_titan.generation import Draft, generate
from regdrop_titan.generation.drafts import flops_share, read_draft, write_draft
from regdrop_titan.generation.measure import (
    Acceptance,
    compare,
    relative_cost,
    speed_up_by_share,
    speed_up_by_tokens,
)
from regdrop_titan.models import flavor_args

from ..models.test_cache import model_and_tokens


def test_formulas():
    """Against the sum that they come from: the expected number of tokens a pass, each drafted token accepted with alpha
    independently."""
    for alpha, gamma, c in ((0.7, 5, 0.3), (0.0, 3, 0.1), (0.99, 4, 0.0)):
        written = sum(alpha**k for k in range(gamma + 1))  # the k-th token is written if k before it were accepted
        assert speed_up_by_tokens(alpha, gamma, c) == pytest.approx(written / (1 + gamma * c))
        share = sum(alpha**k for k in range(1, gamma + 1)) / gamma
        assert speed_up_by_share(share, gamma, c) == pytest.approx(written / (1 + gamma * c))
    assert speed_up_by_tokens(1.0, 4, 0.5) == 5 / 3


def test_acceptance_of_counts():
    """Three passes of drafts of 4 tokens: 4, 1 and 0 accepted."""
    stats = {"tokens": 8, "passes": 3, "verified": 3, "drafted": 12, "accepted": 5, "tested": 4 + 2 + 1}
    found = Acceptance.of(stats)
    assert found == Acceptance(accepted_share=5 / 12, alpha=5 / 7, draft_length=4.0, tokens_a_pass=8 / 3)
    assert found.speed_up(0.25) == pytest.approx((8 / 3) / (1 + 4 * 0.25))
    assert Acceptance.of(stats | {"drafted": 0, "accepted": 0, "tested": 0}).alpha == 0


def test_counts_of_a_known_draft():
    """A draft of all layers: every drafted token is tested and accepted, but for what lies behind the end."""
    model, tokens = model_and_tokens("nape", 2, 30)
    prompt = tokens[0, :20]
    _, stats = generate(model, [prompt], 12, draft_layers=[0, 1, 2], draft_length=3)
    assert (stats["tested"], stats["accepted"], stats["verified"]) == (9, 9, 3)
    _, cut = generate(
        model, [prompt], 12, draft_layers=[0, 1, 2], draft_length=5, finished=lambda row, ids: len(ids) == 3
    )
    assert (cut["tokens"], cut["accepted"], cut["tested"], cut["drafted"]) == (3, 3, 3, 5)


def test_share_of_flops():
    """Against the layer's own arithmetic, for whole layers and sublayers, attention and Mamba2."""
    args = flavor_args("nape_llama3", "debug")
    d, f, V, S, L = args.dim, args.ffn_dim, args.vocab_size, 300, args.n_layers
    attention, feed_forward = 4 * d * d + d + 2 * d * S, 3 * d * f + d
    total = L * (attention + feed_forward) + V * d + d
    assert flops_share(args, [0, 2], S) == pytest.approx((2 * (attention + feed_forward) + V * d + d) / total)
    assert flops_share(args, [(1, "attention")], S) == pytest.approx((attention + V * d + d) / total)
    assert flops_share(args, [(1, "feed_forward"), 3], S) == pytest.approx(
        (attention + 2 * feed_forward + V * d + d) / total
    )
    assert flops_share(args, range(L), S) == 1
    mamba = flavor_args("mamba2", "debug")
    assert flops_share(mamba, [0], S) < flops_share(mamba, [0, 1], S) < 1


def test_a_paired_comparison():
    """All layers as a draft: all is accepted, c is about 1, nothing is gained. The clock's figures are loose bounds."""
    model, tokens = model_and_tokens("nape", 2, 30)
    rounds = []
    draft = Draft((0, 1, 2), 3)
    found = compare(model, [row[:20] for row in tokens], draft, 13, rounds=3, progress=lambda: rounds.append(1))
    assert found.same_tokens and len(rounds) == 4 and found.rounds == 3
    assert found.acceptance == Acceptance(accepted_share=1.0, alpha=1.0, draft_length=9 / 4, tokens_a_pass=13 / 4)
    assert 0.5 < found.c < 2
    low, high = found.speed_up_quartiles
    assert low <= found.speed_up <= high and 0 < found.speed_up < 2
    assert found.speed_up_by_share == pytest.approx((1 + 9 / 4) / (9 / 4 * found.c + 1))
    assert found.to_dict()["acceptance"]["alpha"] == 1.0
    assert math.isfinite(found.tokens_per_second) and math.isfinite(found.plain_tokens_per_second)
    hybrid, tokens = model_and_tokens("hybrid", 2, 30)
    prompts = [row[:n] for row, n in zip(tokens, (20, 9), strict=True)]
    assert 0.1 < relative_cost(hybrid, prompts, [0], rounds=5) < 1


def test_files(tmp_path):
    draft = Draft((0, (2, "attention"), (3, "feed_forward")), 4, "adaptive")
    write_draft(tmp_path / "draft.json", draft, {"method": "by hand"})
    assert read_draft(tmp_path / "draft.json") == draft
    (tmp_path / "other.json").write_text('{"layers": ["x"], "length": 4, "exit": null}')
    with pytest.raises(ValueError, match=r"other.json: holds no draft .* 'x' is neither a layer"):
        read_draft(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"none.json: No such file"):
        read_draft(tmp_path / "none.json")

import pytest
import torch

from regdrop_titan.models import alibi_slopes, nape_slopes
from regdrop_titan.models.positions import attention_bias, document_ids, head_slopes, head_windows, rotary_table

CPU = torch.device("cpu")


def test_nape_slopes_of_the_paper():
    expected = [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6, 0, 0, 0, 0, 0, 0]
    assert nape_slopes(12).tolist() == pytest.approx(expected)
    assert nape_slopes(12).dtype == torch.float32
    assert nape_slopes(8, "exp2").tolist() == [1, 1 / 2, 1 / 4, 1 / 8, 0, 0, 0, 0]
    assert nape_slopes(8, "press").tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 0, 0, 0, 0]


def test_press_slopes():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    # 12 heads: the 8 of the power of two below, then every second one of the 16 above
    assert alibi_slopes(12).tolist() == pytest.approx(
        [2.0**-h for h in range(1, 9)] + [2.0 ** -(h / 2) for h in (1, 3, 5, 7)]
    )


@pytest.mark.parametrize(("n_heads", "kind"), [(7, "inverse"), (0, "inverse"), (4, "linear")])
def test_impossible_slopes_are_refused(n_heads, kind):
    with pytest.raises(ValueError, match=r"even number|one of inverse"):
        nape_slopes(n_heads, kind)


def test_bias_is_minus_slope_times_distance():
    bias = attention_bias((0.5, 0.0), None, 600, CPU)
    assert bias.shape == (1, 2, 600, 600) and bias.dtype == torch.float32
    assert bias[0, 0, 599, 0] == -0.5 * 599  # exact past 256, where bf16 is not
    assert bias[0, 0, 7, 7] == 0 and bias[0, 0, 7, 8] == -torch.inf
    assert (bias[0, 1][bias[0, 1] != -torch.inf] == 0).all()


@pytest.mark.parametrize("window", [1, 4, 8, 100])
def test_window_counts_its_own_key(window):
    """Query i sees min(i+1, W) keys (report A1)."""
    visible = (attention_bias(None, window, 8, CPU)[0, 0] > -torch.inf).sum(1)
    assert visible.tolist() == [min(i + 1, window) for i in range(8)]


def test_heads_see_what_the_cutoff_leaves():
    """A key at distance d iff slope d <= cutoff: with the inverse slopes no head looks back further than 240 tokens."""
    windows = head_windows(head_slopes("nape", "inverse", 12), 40.0, None)
    assert windows == (41, 81, 121, 161, 201, 241) + 6 * (None,)
    assert head_windows((1.0, 0.5, 0.0), 4.0, 6) == (5, 6, 6)
    assert head_windows((1.0, 0.5, 0.0), 4.0, None, length=9) == (5, None, None)
    assert head_windows((1.0, 0.5), 0.0, None) is head_windows(None, 40.0, None) is None
    seen = attention_bias((1.0, 0.5, 0.0), (5, 9, None), 20, CPU)[0] > -torch.inf
    distance = torch.arange(20)[:, None] - torch.arange(20)
    for head, slope in enumerate((1.0, 0.5, 0.0)):
        assert torch.equal(seen[head], (distance >= 0) & (slope * distance <= 4.0))


def test_caches_follow_the_length():
    """A table made for one length is not used for another (report A5)."""
    for length in (16, 8, 24):
        assert attention_bias((1.0,), None, length, CPU).shape[-1] == length
        assert rotary_table(length, 8, 1e4, CPU)[0].shape == (length, 8)


def test_documents_close_with_end_of_text():
    tokens = torch.tensor([[5, 0, 6, 7, 0, 0, 8]])
    assert document_ids(tokens, 0).tolist() == [[0, 0, 1, 1, 1, 2, 3]]

"""Our model class of lm-evaluation-harness against its own `hf` on our export, and against the formulas."""

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from regdrop_titan.checkpoints.hf_tokenizer import write_tokenizer
from regdrop_titan.checkpoints.huggingface import export_huggingface
from regdrop_titan.evaluation import ruler, suites
from regdrop_titan.evaluation.lm import RegDropLM
from regdrop_titan.evaluation.subjects import InputError, checkpoint_subject

from .tiny_runs import write_questions, write_run

LENGTH = 1700  # tokens of RULER's samples: about the least that all six tasks fit in


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    write_run(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tasks(run, data):
    """`arc_easy` on local data, and two samples of each RULER task that needs none, with short answers."""
    loaded, left_out = suites.load_tasks(["arc_easy"], data)
    assert not left_out
    tokenizer = checkpoint_subject(run).tokenizer
    for name in ruler.WITHOUT_DATA:
        samples = ruler.documents(name, LENGTH, 2, tokenizer, None, seed=0)
        loaded[name] = ruler.build_task(name, LENGTH, samples)
        loaded[name].set_config("generation_kwargs", {"max_gen_toks": 12}, update=True)
    return loaded


@pytest.fixture(scope="module")
def theirs(run, tasks, tmp_path_factory):
    """What the harness's own class says of our export."""
    folder = tmp_path_factory.mktemp("export") / "model"
    subject = checkpoint_subject(run)
    export_huggingface(subject.load(), folder)
    write_tokenizer(subject.tokenizer, folder)
    lm = HFLM(str(folder), trust_remote_code=True, device="cpu", dtype="float32", batch_size=1, max_length=2048)
    return simple_evaluate(lm, tasks=list(tasks.values()), bootstrap_iters=0, task_manager=suites.task_manager())[
        "samples"
    ]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_says_what_hf_says_of_the_export(run, tasks, theirs, batch_size):
    """The same answers, and log-likelihoods to 1e-4, sample by sample, whatever the batch."""
    lm = RegDropLM(str(run / "checkpoint"), batch_size=batch_size, max_length=2048)
    ours = simple_evaluate(lm, tasks=list(tasks.values()), bootstrap_iters=0, task_manager=suites.task_manager())[
        "samples"
    ]
    assert set(ours) == set(theirs) == {"arc_easy", *ruler.WITHOUT_DATA}
    for name in ours:
        assert len(ours[name]) == len(theirs[name]) == (6 if name == "arc_easy" else 2)
        by_doc = {sample["doc_id"]: sample for sample in theirs[name]}
        for sample in ours[name]:
            other = by_doc[sample["doc_id"]]
            assert sample["arguments"] == other["arguments"]
            if name != "arc_easy":
                assert sample["filtered_resps"] == other["filtered_resps"] and sample["filtered_resps"][0]
                continue
            for (a, a_greedy), (b, b_greedy) in zip(sample["filtered_resps"], other["filtered_resps"], strict=True):
                assert a == pytest.approx(b, abs=1e-4) and a_greedy == b_greedy


def instances(kind, *arguments):
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


@torch.no_grad()
def reference(model, context, continuation):
    """The log-likelihood in float64, a token at a time."""
    model, total = model.double(), 0.0
    ids = context + continuation
    for i in range(len(context), len(ids)):
        total += model(torch.tensor([ids[:i]]))[0, -1].log_softmax(0)[ids[i]].item()
    return total


@pytest.mark.parametrize("options", [{}, {"exit_layer": 2}, {"skip_layers": "0+2"}, {"exit_layer": 0}])
def test_log_likelihoods(run, options):
    """Against the formula; an empty context is the end of text, exactly once."""
    lm = RegDropLM(str(run / "checkpoint"), batch_size=3, **options)
    pairs = [("The sky is", " blue."), ("", "Here we go"), ("The grass is green. The sun", " is"), ("A ", "stone")]
    found = lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    model = checkpoint_subject(run).load()
    kept = lm.layers if lm.layers is not None else range(3)
    model.layers = torch.nn.ModuleDict({str(i): model.layers[str(layer)] for i, layer in enumerate(kept)})
    encode = lm.text.encode
    for (context, continuation), (log_p, _) in zip(pairs, found, strict=True):
        whole = encode(context.rstrip() + " " * (context != context.rstrip()) + continuation).tolist()
        begin = encode(context.rstrip()).tolist()
        expected = reference(model, begin or [0], whole[len(begin) :])
        assert log_p == pytest.approx(expected, abs=1e-4)


def test_rolling_windows(run):
    """Every token once, each window behind the one before; without a limit in one."""
    text = "The grass is green. The sky is blue. Here we go. There and back again."
    lm = RegDropLM(str(run / "checkpoint"), batch_size=2, max_length=7)
    ids = lm.text.encode(text).tolist()
    assert len(ids) > 15
    (windowed,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)), disable_tqdm=True)
    model = checkpoint_subject(run).load()
    expected = 0.0
    for i, target in enumerate(ids):
        first = i // 7 * 7  # of the window that predicts token i; full windows are read where there are tokens before
        start = first if first + 7 <= len(ids) else len(ids) - 7
        expected += reference(model, [0, *ids][start : i + 1], [target])
    assert windowed == pytest.approx(expected, abs=1e-3)
    lm.max_length = 0
    (whole,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert whole == pytest.approx(reference(model, [0], ids), abs=1e-3)


def test_begin_of_text_stands_once(run):
    """None by default; with one, once, also where a template writes it."""
    name = str(run / "checkpoint")
    assert RegDropLM(name).tok_encode("The sky") == RegDropLM(name).text.encode("The sky").tolist()
    lm = RegDropLM(name, bos_token="<|end_of_text|>")
    plain = lm.text.encode("The sky").tolist()
    assert lm.tok_encode("The sky") == lm.tok_encode("<|end_of_text|>The sky") == [0, *plain]
    assert lm.tok_encode("The sky", add_special_tokens=False) == plain
    found = lm.loglikelihood(instances("loglikelihood", ("", "The sky"), ("<|end_of_text|>The", " sky")), True)
    model = checkpoint_subject(run).load()
    assert found[0][0] == pytest.approx(reference(model, [0], plain), abs=1e-4)
    the = lm.text.encode("The").tolist()
    assert found[1][0] == pytest.approx(reference(model, [0, *the], plain[len(the) :]), abs=1e-4)
    assert lm.head == [0]
    with pytest.raises(InputError, match="not a special token of"):
        RegDropLM(name, bos_token="<s>")


def test_nothing_is_cut_silently(run):
    """A prompt and its answer beyond the length are refused before any is computed, or cut and counted."""
    name = str(run / "checkpoint")
    prompt = "The grass is green. " * 6
    options = {"until": ["."], "max_gen_toks": 5}
    lm = RegDropLM(name, max_length=20)
    n = len(lm.tok_encode(prompt))
    request = instances("generate_until", (prompt, options), ("The", options))
    with pytest.raises(InputError, match=f"1 of 2 requests need more than max_length = 20 tokens, the longest {n + 5}"):
        lm.generate_until(request)
    with pytest.raises(InputError, match="1 of 1 requests need more"):
        lm.loglikelihood(instances("loglikelihood", (prompt, " blue")))
    cutting = RegDropLM(name, max_length=20, truncation=True)
    answer, _ = cutting.generate_until(request, disable_tqdm=True)
    assert cutting.cut == 1
    ids = cutting.tok_encode(prompt)[-15:]
    assert answer == cutting._answers([ids], ["."], 5)[0]
    kept = n + 5 - 20
    assert cutting._answers([cutting.tok_encode(prompt)[kept:]], ["."], 5)[0] == answer
    with pytest.raises(InputError, match="leaves no prompt beside 20 new tokens"):
        cutting.generate_until(instances("generate_until", ("The", {"max_gen_toks": 20})))
    with pytest.raises(InputError, match="only greedy"):
        lm.generate_until(instances("generate_until", ("The", {"do_sample": True, "temperature": 1.0})))


def test_stop_strings_and_end_of_text(run):
    """An answer ends before its stop string, and before the end of text."""
    lm = RegDropLM(str(run / "checkpoint"), max_length=0)

    def answers(until):
        options = {"until": until, "max_gen_toks": 30}
        prompts = ["The sky is blue.", "Here we go", "1. stone 2.", "VAR ABCDE = 12345"]
        return lm.generate_until(instances("generate_until", *((prompt, options) for prompt in prompts)), True)

    free = answers([])
    stop = max(free, key=len)[4:6]
    assert len(stop) == 2
    assert answers([stop]) == [answer.split(stop)[0] for answer in free] != free
    with torch.no_grad():  # a model that only says end of text
        lm.model.output.weight.zero_()
    assert lm.generate_until(instances("generate_until", ("The", {"max_gen_toks": 30})), True) == [""]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 4}, "exit_layer 4: must be in 0 ... 3"),
        ({"skip_layers": [3]}, "skip_layers 3: there are 0 ... 2"),
        ({"skip_layers": "a+1"}, "give indices joined by +"),
        ({"batch_size": "auto"}, "batch_size 'auto'"),
    ],
)
def test_bad_arguments(run, options, message):
    with pytest.raises(InputError, match=message.replace("+", r"\+").replace("...", r"\.\.\.")):
        RegDropLM(str(run / "checkpoint"), **options)

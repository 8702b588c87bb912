"""Teaching the embedded pair: what is learnt, that it can be stopped, and the whole path in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from semspec_local.errors import ConfigError
from semspec_local.lab.tiny.data import encode, make_tokenizer, solved
from semspec_local.lab.tiny.gguf import ASSISTANT, CONTROLS, END, USER, Shape, random_weights, write_gguf
from semspec_local.lab.world import problems
from semspec_local.llama.chat import ChatTemplate
from semspec_local.llama.model import LlamaModel

ROOT = Path(__file__).resolve().parent.parent
SHAPE = Shape(n_layer=2, n_embd=32, n_ff=64, n_head=2, file_type="F32")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pytest.importorskip("tokenizers", reason="the extra packages of the lab are not installed")
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", 1, n_problems=60)


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    weights = random_weights(SHAPE, tokenizer.get_vocab_size())
    write_gguf(path, weights, SHAPE, tokenizer, name="random", description="random weights")
    with LlamaModel(path) as loaded:
        yield loaded


def test_llama_cpp_reads_text_as_the_lessons_spell_it(tokenizer, model):
    """Or the models would be asked in another spelling than they were taught in."""
    vocabulary, chat = model.vocabulary, ChatTemplate(model)
    for number in range(30):
        question, steps = solved(7, number, "draft")
        (ids, _), *_ = encode(tokenizer, [(question, steps)])
        prompt = chat.render([{"role": "user", "content": question}]).tokens
        written = [token for text, _ in steps for token in vocabulary.encode(text)]
        assert [*prompt, *written, *vocabulary.eog_tokens] == ids.tolist()
    assert vocabulary.n_used == vocabulary.n_tokens == tokenizer.get_vocab_size()


def test_digits_are_tokens_of_their_own_and_any_text_can_be_spelled(tokenizer, model):
    vocabulary = model.vocabulary
    assert [vocabulary.piece(token) for token in vocabulary.encode("1234")] == [b"1", b"2", b"3", b"4"]
    for text in ("Größe\r\n\t日本", "<|user|> x <|end|>", "so.\n\nThen"):
        assert vocabulary.decode(vocabulary.encode(text)) == text
    controls = {tokenizer.token_to_id(name) for name in CONTROLS}
    assert not controls & set(vocabulary.encode("<|user|><|end|>"))


def test_own_steps_are_learnt_whole_of_others_the_numbers_and_of_slips_nothing(tokenizer):
    seen = set()
    for number in range(30):
        question, steps = solved(7, number, "target")
        seen |= {learnt for _, learnt in steps}
        ((ids, weights),) = encode(tokenizer, [(question, steps)])
        learn = weights > 0
        start = ids.tolist().index(tokenizer.token_to_id(ASSISTANT)) + 1
        assert ids[0] == tokenizer.token_to_id(USER) and ids[-1] == tokenizer.token_to_id(END)
        assert not learn[:start].any() and learn[-1]
        expected = {"all": str, "digits": lambda text: "".join(c for c in text if c.isdigit()), "nothing": lambda _: ""}
        texts = "".join(expected[learnt](text) for text, learnt in steps)
        assert tokenizer.decode(ids[start:-1][learn[start:-1]].tolist(), skip_special_tokens=False) == texts
    assert seen == {"all", "digits", "nothing"}


def test_a_system_message_is_refused(model):
    with pytest.raises(Exception, match="knows no system message"):
        ChatTemplate(model).render([{"role": "system", "content": "Think."}, {"role": "user", "content": "How many?"}])


@pytest.mark.case(16)
def test_torch_and_llama_cpp_compute_the_same(tokenizer, tmp_path):
    torch = pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")
    from semspec_local.config import SamplingConfig
    from semspec_local.lab.tiny.llama import Llama
    from semspec_local.llama.session import LlamaStepModel

    torch.manual_seed(0)
    net = Llama(SHAPE, tokenizer.get_vocab_size())
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    path = tmp_path / "net.gguf"
    write_gguf(path, net.arrays(), SHAPE, tokenizer, name="net", description="")
    ids = np.random.default_rng(0).integers(3, tokenizer.get_vocab_size(), 60)
    with torch.no_grad():
        logits = net(torch.from_numpy(ids[None]))[0] @ net.token_embd.weight.T
        expected = logits.log_softmax(-1)[np.arange(10, 59), ids[11:]].numpy()
    with LlamaStepModel(path, n_ctx=128, n_threads=1, sampling=SamplingConfig(temperature=0)) as model:
        model.prefill(ids[:11].tolist())
        got = model.score(ids[11:].tolist(), logprobs=True).logprobs
    np.testing.assert_allclose(got, expected, atol=0.02)


def test_a_grown_model_computes_what_the_small_one_does():
    torch = pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")
    from semspec_local.lab.tiny.llama import Llama, grown

    torch.manual_seed(0)
    small = Llama(SHAPE, 300)
    with torch.no_grad():
        for weight in small.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
        big = grown(small, Shape(n_layer=4, n_embd=64, n_ff=128, n_head=4, file_type="F32"), seed=1)
        ids = torch.randint(0, 300, (2, 40))
        before, after = (net(ids) @ net.token_embd.weight.T for net in (small, big))
    torch.testing.assert_close(after, before, atol=1e-3, rtol=1e-3)
    arrays = big.arrays()
    left, right = np.split(arrays["blk.0.ffn_up.weight"], 2, axis=1)
    assert not np.allclose(left, right)  # or both halves would stay equal for ever
    assert arrays["blk.0.ffn_down.weight"].any() and not arrays["blk.1.ffn_down.weight"].any()


def test_a_model_begins_as_a_copy_of_one_of_its_own_shape():
    torch = pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")
    from semspec_local.lab.tiny.llama import Llama, begun

    small = Llama(SHAPE, 300)
    copy = begun(small, replace(SHAPE, file_type="Q8_0"), seed=1)
    for one, other in zip(copy.parameters(), small.parameters()):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
        assert one is not other
    assert begun(small, Shape(n_layer=4, n_embd=64, n_ff=128, n_head=4, file_type="F32"), seed=1).shape.n_embd == 64


def test_slips_come_at_the_rate_of_the_plan():
    def share(rate: float) -> float:
        learnt = [what for n in range(300) for _, what in solved(3, n, "draft", slip_rate=rate)[1]]
        return learnt.count("nothing") / (learnt.count("nothing") + learnt.count("digits"))

    assert share(0.0) == 0
    assert share(0.4) == pytest.approx(0.4, abs=0.06)


def test_a_training_goes_on_from_its_own_checkpoint_and_from_no_other(tokenizer, tmp_path):
    torch = pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")
    from semspec_local.lab.tiny.train import Plan, Training, teach

    lessons = encode(tokenizer, [solved(1, number, "draft") for number in range(8)])
    plan = Plan(shape=SHAPE, hand="draft", slip_rate=0.1, n_lessons=8, n_short=0, batch_tokens=700, learning_rate=1e-3)
    checkpoint, said = tmp_path / "a.checkpoint", []

    def run(seed=1):
        training = Training(
            plan=plan,
            lessons=lessons,
            held_out=lessons[:2],
            n_vocab=tokenizer.get_vocab_size(),
            seed=seed,
            checkpoint=checkpoint,
            say=said.append,
        )
        return teach(training, n_processes=1)

    first, losses, seconds = run()
    assert losses and seconds > 0
    n_said = len(said)
    again, losses_again, _ = run()
    assert losses_again == losses and len(said) == n_said
    for one, other in zip(first.parameters(), again.parameters()):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
    with pytest.raises(ConfigError, match="another training"):
        run(seed=2)


def test_the_table_of_shapes_has_a_row_of_numbers_for_each(tokenizer):
    from semspec_local.lab.tiny.card import PREFILL_LENGTHS, shape_table

    wide = replace(SHAPE, n_embd=64, file_type="F16")
    head, rule, *rows = shape_table([SHAPE, wide], SHAPE, tokenizer, n_threads=1)
    assert len({line.count("|") for line in (head, rule, *rows)}) == 1
    assert [row.split(" | ")[0] for row in rows] == ["| 2 x 32 (64)", "| 2 x 64 (64)"]
    for row in rows:
        *numbers, n_threads, ceiling = row.strip("| ").split(" | ")[2:]
        assert len(numbers) == 1 + len(PREFILL_LENGTHS) and n_threads == "1"
        assert all(float(number) > 0 for number in (*numbers, ceiling))


def test_what_is_taught_is_never_asked():
    taught = {solved(seed, number, "draft")[0] for seed in range(4) for number in range(50)}
    assert not taught & {problem.question for seed in range(4) for problem in problems(seed, 50)}


@pytest.mark.slow
def test_the_whole_path_from_nothing_to_a_pair_that_runs(tmp_path):
    """`--quick`: minutes, and a pair of no worth; everything but the hours is there."""
    pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")
    out = tmp_path / "models" / "quick"
    command = [sys.executable, str(ROOT / "scripts/train_tiny_pair"), "--quick", "-t", "1"]
    command += ["--out", str(out), "--work", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    card = json.loads((out / "card.json").read_text())
    for name in ("stem", "target"):
        losses = card["models"][name]["losses"]
        assert losses[-1][2] < losses[0][1]
    for role in ("target", "draft"):
        facts = card["models"][role]
        assert facts["size_bytes"] == (out / f"{role}.gguf").stat().st_size
        assert 0 <= facts["solved_at_0"] <= 1
        assert facts["speeds"]["1"]["decode_ms"] > 0
    manifest = out.with_suffix(".toml")
    ask = [sys.executable, "-m", "semspec_local", "run", "--pair", str(manifest), "--policy", "loglik-ratio"]
    answered = subprocess.run(
        [*ask, "-n", "40", "-q", "--json", "How many?"], capture_output=True, text=True, check=False, env=os.environ
    )
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["usage"]

"""llama-server as an arm: a stand-in is started in its place, which knows its flags and answers as it does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REAL_CACHE
from gguf_factory import write_model

from semspec_local.bench import llama_server
from semspec_local.bench.arms import ArmRun, ArmSpec, make_arms, parse_arm
from semspec_local.bench.external import ServerArm, Throughput, ask_many, target_seed
from semspec_local.bench.llama_server import LlamaServer, ServerOptions
from semspec_local.bench.server_binary import built_server, find_llama_server
from semspec_local.config import MAX_SEED, ModelConfig, RunConfig, SamplingConfig
from semspec_local.errors import ConfigError, SemspecError
from semspec_local.llama.model import LlamaModel
from semspec_local.reasoner import Reasoner, Sources

QUESTION = "Anna has 14 shells. Anna finds 9 more shells. How many shells does Anna have?"
MODELS = ModelConfig(n_ctx=512, n_threads=2, n_threads_draft=1)
CONFIG = RunConfig(max_tokens=40, sampling=SamplingConfig(temperature=0.6, top_k=20, top_p=0.9))
HEAD = [72, 101, 108]
FAKE = """
import argparse, json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

folder = Path(__file__).parent
wish = json.loads((folder / "wish").read_text())
mode = wish.get("mode")
(folder / "started").open("a").write(json.dumps({"argv": sys.argv[1:], "env": sorted(os.environ)}) + "\\n")

parser = argparse.ArgumentParser(allow_abbrev=False)
for flag in ("m", "md", "t", "td", "ngl", "ngld", "np", "c"):
    parser.add_argument("-" + flag)
for flag in ("cache-ram", "spec-type", "spec-draft-n-max", "host", "port", "alias"):
    parser.add_argument("--" + flag)
parser.add_argument("--no-webui", action="store_true")
options = parser.parse_args()
print("loading", options.m, flush=True)
if mode == "dies":
    print("error: no room for the model\\ngoodbye", flush=True)
    sys.exit(3)
if mode == "port taken" and len((folder / "started").read_text().splitlines()) == 1:
    print("couldn't bind HTTP server socket", flush=True)
    sys.exit(1)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status, value):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if mode == "never ready":
            self.answer(503, {"error": {"message": "Loading model"}})
        elif self.path == "/health":
            self.answer(200, {"status": "ok"})
        else:
            self.answer(200, {"data": [{"id": "another" if mode == "another" else options.alias}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with (folder / "requests").open("a") as file:
            file.write(json.dumps(request) + "\\n")
        time.sleep(wish.get("sleep_s", 0))
        if mode == "crashes":
            print("segmentation fault, imagined", flush=True)
            os._exit(7)
        if mode == "hangs up":
            return
        if "status" in wish:
            self.answer(wish["status"], wish["body"].encode())
            return
        tokens = wish.get("tokens", [72, 101, 108])
        reply = {
            "tokens": tokens[: request["n_predict"]],
            "stop_type": "limit" if len(tokens) >= request["n_predict"] else "eos",
            "tokens_evaluated": len(request["prompt"]),
            "timings": {"cache_n": 0, "prompt_ms": 20.0, "predicted_ms": 30.0},
        }
        if options.md and mode != "drafts nothing":
            reply["timings"] |= {"draft_n": 6, "draft_n_accepted": 4}
        self.answer(200, reply | wish.get("reply", {}))


ThreadingHTTPServer((options.host, int(options.port)), Handler).serve_forever()
"""


class Fake:
    """The stand-in: what it shall do, and what it saw."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "llama-server"
        self.path.write_text(f"#!{sys.executable}\n{FAKE}")
        self.path.chmod(0o755)
        self.wishes()

    def wishes(self, **wish) -> None:
        (self.folder / "wish").write_text(json.dumps(wish))

    def seen(self, name: str) -> list[dict]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def fake(tmp_path):
    return Fake(tmp_path)


@pytest.fixture(scope="session")
def sources(tiny, tmp_path_factory):
    draft = write_model(tmp_path_factory.mktemp("coarse") / "coarse.gguf", quantization="Q4_0")
    return Sources(target=tiny("llama-unpadded"), draft=draft)


@pytest.fixture
def spell(sources):
    """Text to tokens, one for each character."""
    with LlamaModel(sources.target, weights=False) as model:
        yield lambda text: [token for character in text for token in model.vocabulary.encode(character)]


def server(fake: Fake, **options) -> LlamaServer:
    settings = ServerOptions(model=Path("model.gguf"), n_ctx=512, n_threads=2, n_threads_draft=1)
    return LlamaServer(fake.path, settings, **options)


def request(n: int = 5) -> dict:
    return {"prompt": [1, 2, 3], "n_predict": n}


def arm(fake: Fake, sources: Sources, name: str = "llama-server", config: RunConfig = CONFIG, **options) -> ServerArm:
    return ServerArm(name, fake.path, sources, config, MODELS, **options)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# -- names, and which binary ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n"), [("llama-server", 0), ("llama-server+draft", 3), ("llama-server+draft@8", 8)], ids=str
)
def test_a_name_says_what_to_run(name, n):
    assert parse_arm(name) == ArmSpec(name, "llama-server", n_draft=n)


@pytest.mark.parametrize("name", ["llama-server@3", "llama-server@", "llama-server+draft@0", "llama-server+draft@x"])
def test_a_name_that_says_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=r"stands alone|1 or more"):
        parse_arm(name)


def test_the_binary_is_the_given_one_or_the_named_or_the_built_or_one_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SEMSPEC_LLAMA_SERVER", raising=False)
    with pytest.raises(ConfigError, match=r"scripts/build_llama_server.*--llama-server PATH or SEMSPEC_LLAMA_SERVER"):
        find_llama_server()
    places = [tmp_path / "bin" / "llama-server", built_server(), tmp_path / "named", tmp_path / "given"]
    for path in places:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    assert find_llama_server(places[3]) == places[3]
    monkeypatch.setenv("SEMSPEC_LLAMA_SERVER", str(places[2]))
    assert find_llama_server() == places[2]
    monkeypatch.delenv("SEMSPEC_LLAMA_SERVER")
    assert find_llama_server() == places[1]
    places[1].unlink()
    assert find_llama_server() == places[0]


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), ("text", "cannot be executed")])
def test_a_named_binary_that_is_none_is_refused(tmp_path, monkeypatch, content, message):
    path = tmp_path / "server"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"--llama-server is .*{message}"):
        find_llama_server(path)
    monkeypatch.setenv("SEMSPEC_LLAMA_SERVER", str(path))
    with pytest.raises(ConfigError, match=f"SEMSPEC_LLAMA_SERVER is .*{message}"):
        find_llama_server()


def test_a_missing_binary_is_said_before_the_first_model_is_read(tmp_path):
    nowhere = Sources(target=tmp_path / "nothing.gguf")
    with (
        pytest.raises(ConfigError, match="no such file, wanted the llama-server binary"),
        make_arms(["target", "llama-server"], nowhere, llama_server=tmp_path / "none"),
    ):
        pass


# -- the process ------------------------------------------------------------------------------------


def test_it_is_started_asked_and_stopped(fake):
    with server(fake) as running:
        pid, port = running.pid, running._port
        assert pid is not None and answers(port)
        reply = running.complete(request())
        assert (reply.tokens, reply.stop_type, reply.n_prompt) == (HEAD, "eos", 3)
        assert (reply.prompt_s, reply.written_s, reply.n_drafted) == (0.02, 0.03, None)
        assert reply.wall_s > 0
        log = running._log
    assert not answers(port) and running.pid is None and not log.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(SemspecError, match="was stopped"):
        running.complete(request())


def test_the_command_line(fake, sources):
    with arm(fake, sources):
        pass
    with arm(fake, sources, "llama-server+draft@5", n_max=5, n_slots=3):
        pass
    alone, drafting = (" ".join(started["argv"]) for started in fake.seen("started"))
    assert f"-m {sources.target} -t 2 -ngl 0 -np 1 -c 512 --no-webui --cache-ram 0 --host 127.0.0.1 --port" in alone
    assert "-np 3 -c 1536" in drafting
    assert f"-md {sources.draft} --spec-type draft-simple --spec-draft-n-max 5 -td 1 -ngld 0" in drafting


def test_settings_of_the_users_own_servers_do_not_reach_it(fake, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "64")
    monkeypatch.setenv("LLAMA_API_KEY", "key")
    monkeypatch.setenv("LLAMA_CACHE", "kept")
    with server(fake):
        pass
    names = fake.seen("started")[0]["env"]
    assert "LLAMA_CACHE" in names and not {"LLAMA_ARG_CTX_SIZE", "LLAMA_API_KEY"} & set(names)


def test_one_that_ends_at_once_is_an_error_with_its_last_words(fake):
    fake.wishes(mode="dies")
    with (
        pytest.raises(SemspecError, match=r"exit code 3\): error: no room for the model ... goodbye$"),
        server(fake),
    ):
        pass


def test_one_that_does_not_know_our_flags_is_an_error_that_names_the_flag(fake):
    fake.path.write_text('#!/bin/sh\necho "error: invalid argument: $1"\nexit 1\n')
    with pytest.raises(SemspecError, match=r"exit code 1\): error: invalid argument: -m$"), server(fake):
        pass


def test_one_that_is_no_program_is_an_error(fake):
    fake.path.write_bytes(b"\x7fELF, but no more")
    with pytest.raises(SemspecError, match=r"[Ee]xec format error"), server(fake):
        pass


@pytest.mark.parametrize("mode", ["never ready", "another"])
def test_one_that_is_not_ready_in_time_is_stopped(fake, mode):
    fake.wishes(mode=mode)
    running = server(fake, start_timeout_s=1.0)
    with pytest.raises(SemspecError, match=r"not ready within 1 s: loading model.gguf"), running:
        pass
    assert running.pid is None and not answers(running._port)


def test_a_port_that_was_taken_in_between_is_given_up_for_another(fake):
    fake.wishes(mode="port taken")
    with server(fake) as running:
        assert running.complete(request()).tokens == HEAD
    first, second = (started["argv"][started["argv"].index("--port") + 1] for started in fake.seen("started"))
    assert first != second


def test_one_that_ends_while_it_answers_is_an_error_and_the_next_question_starts_another(fake):
    fake.wishes(mode="crashes")
    with server(fake) as running:
        with pytest.raises(SemspecError, match=r"ended while it answered \(exit code 7\): segmentation fault, imag"):
            running.complete(request())
        fake.wishes()
        assert running.complete(request()).tokens == HEAD
    assert len(fake.seen("started")) == 2


def test_one_that_hangs_is_stopped(fake):
    fake.wishes(sleep_s=60)
    with server(fake, request_timeout_s=0.3) as running:
        with pytest.raises(SemspecError, match=r"no answer within 0.3 s; it was stopped"):
            running.complete(request())
        assert running.pid is None


def test_one_that_does_not_stop_is_killed(fake, monkeypatch):
    monkeypatch.setattr(llama_server, "_STOP_TIMEOUT_S", 0.2)
    fake.wishes(mode="stubborn")
    with server(fake) as running:
        port = running._port
    assert not answers(port)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"status": 500, "body": '{"error": {"message": "out of luck"}}'}, "HTTP status 500: out of luck"),
        ({"status": 500, "body": "plain words"}, "HTTP status 500: 'plain words'"),
        ({"status": 200, "body": '{"tokens": [1'}, r"no completion as this program knows it .*: '\{\"tokens\": \[1'"),
        ({"status": 200, "body": "[]"}, "no completion"),
        ({"status": 200, "body": ""}, "no completion.*nothing"),
        ({"reply": {"timings": {}}}, "no completion.*prompt_ms"),
        ({"reply": {"stop_type": "none"}}, "stop_type is 'none', wanted one of eos, limit, word"),
        ({"mode": "hangs up"}, "broke off the connection"),
    ],
)
def test_a_bad_answer_is_an_error_and_the_server_goes_on(fake, wish, message):
    fake.wishes(**wish)
    with server(fake) as running:
        pid = running.pid
        with pytest.raises(SemspecError, match=message):
            running.complete(request())
        assert running.pid == pid


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_it_ends_when_its_parent_is_killed(fake):
    code = f"""
        import os, signal
        from pathlib import Path
        from semspec_local.bench.llama_server import LlamaServer, ServerOptions
        options = ServerOptions(model=Path("m"), n_ctx=512, n_threads=1, n_threads_draft=1)
        server = LlamaServer(Path({str(fake.path)!r}), options)
        server.start()
        print(server._port, server._folder.name, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    port, folder = done.stdout.split()
    deadline = time.monotonic() + 20
    while answers(int(port)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not answers(int(port))
    for path in Path(folder).iterdir():  # nobody was left to do it
        path.unlink()
    Path(folder).rmdir()


# -- the arm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "add-bos", "spm", "no-template"])
@pytest.mark.parametrize("system", [None, "Answer in one word."])
def test_it_reads_the_very_tokens_that_a_run_of_ours_reads(fake, tiny, model, system):
    if (model, system is None) == ("spm", False):
        system = None  # that template knows no system message
    sources = Sources(target=tiny(model), system=system)
    with arm(fake, sources) as external:
        external.run(QUESTION, 3)
    with Reasoner(sources, replace(CONFIG, policy="never"), MODELS) as reasoner:
        speculation = reasoner.start(QUESTION, seed=3)
    (sent,) = fake.seen("requests")
    assert sent["prompt"] == list(speculation.prompts.target)
    assert sent["seed"] == speculation._seeds[0] % (MAX_SEED + 1) == target_seed(3)


def test_it_samples_and_stops_as_a_run_of_ours_does(fake, sources):
    with arm(fake, sources, config=replace(CONFIG, stop=("END", "\n\n"))) as external:
        external.run(QUESTION, 0)
    (sent,) = fake.seen("requests")
    assert sent["samplers"] == ["top_k", "top_p", "temperature"]
    assert (sent["top_k"], sent["top_p"], sent["temperature"]) == (20, 0.9, 0.6)
    assert (sent["min_p"], sent["repeat_penalty"], sent["mirostat"], sent["cache_prompt"]) == (0, 1, 0, False)
    assert (sent["n_predict"], sent["stop"], sent["ignore_eos"]) == (40, ["END", "\n\n"], False)


def test_what_it_wrote_and_how_long_that_took(fake, sources, spell):
    fake.wishes(tokens=spell("Hel"))
    with arm(fake, sources) as external:
        run = external.run(QUESTION, 0)
        assert external.name == "llama-server" and external.calls_back is None
    assert (run.text, run.final, run.stop_reason, run.n_tokens) == ("Hel", "Hel", "eos", 3)
    assert run.prefill_s == run.ttft_s == 0.02 and run.wall_s > 0
    assert (run.counters, run.records, run.n_proposed, run.n_accepted) == (None, None, None, None)


def test_the_token_that_ended_generation_is_no_token_of_the_answer(fake, sources, spell):
    with LlamaModel(sources.target, weights=False) as model:
        end = min(model.vocabulary.eog_tokens)
    fake.wishes(tokens=[*spell("Hel"), end])
    with arm(fake, sources) as external:
        run = external.run(QUESTION, 0)
    assert (run.text, run.n_tokens, run.stop_reason) == ("Hel", 3, "eos")


def test_a_stop_string_and_what_follows_it_are_cut_off(fake, sources, spell):
    fake.wishes(tokens=spell("Hello END."), reply={"stop_type": "word", "stopping_word": "END"})
    with arm(fake, sources, config=replace(CONFIG, stop=("END",))) as external:
        run = external.run(QUESTION, 0)
    assert (run.text, run.n_tokens, run.stop_reason) == ("Hello ", 6, "stop")


def test_budget_and_context_are_told_apart(fake, sources):
    fake.wishes(tokens=[72] * 600)
    with arm(fake, sources) as external:
        run = external.run(QUESTION, 0)
        assert (run.n_tokens, run.stop_reason) == (40, "budget")
    with arm(fake, sources, config=RunConfig(max_tokens=2048)) as external:
        n_prompt = len(external.prompt(QUESTION).tokens)
        run = external.run(QUESTION, 0)
        assert (run.n_tokens, run.stop_reason) == (512 - n_prompt, "context_full")
        with pytest.raises(ConfigError, match=r"question is too long: .* the context holds 512"):
            external.run("word " * 600, 0)


def test_what_was_thought_is_no_part_of_the_answer(fake, sources, spell):
    fake.wishes(tokens=spell("<think>\nhm\n</think>\n\n4"))
    with arm(fake, sources) as external:
        run = external.run(QUESTION, 0)
    assert run.text.startswith("<think>") and run.final.strip() == "4"


@pytest.mark.parametrize(
    "reply", [{"tokens_evaluated": 99}, {"timings": {"cache_n": 7, "prompt_ms": 1, "predicted_ms": 1}}]
)
def test_a_prompt_that_was_not_read_as_it_is_is_an_error(fake, sources, reply):
    fake.wishes(reply=reply)
    with arm(fake, sources) as external, pytest.raises(SemspecError, match=r"read a prompt of .* all of them anew"):
        external.run(QUESTION, 0)


def test_drafted_tokens_are_counted(fake, sources):
    with make_arms(["llama-server+draft@2"], sources, CONFIG, MODELS, llama_server=fake.path) as (external,):
        run = external.run(QUESTION, 0)
    assert (run.n_proposed, run.n_accepted) == (6, 4)
    assert "--spec-draft-n-max 2" in " ".join(fake.seen("started")[0]["argv"])


def test_a_draft_that_is_not_used_is_an_error(fake, sources):
    fake.wishes(mode="drafts nothing", tokens=HEAD)
    with arm(fake, sources, "llama-server+draft", n_max=3) as external:
        assert external.run(QUESTION, 0).n_proposed == 0  # it may end before it could draft
        fake.wishes(mode="drafts nothing", tokens=HEAD * 2)
    with arm(fake, sources, "llama-server+draft", n_max=3) as external, pytest.raises(SemspecError, match="drafted no"):
        external.run(QUESTION, 0)


def test_what_it_cannot_do_is_said_at_once(fake, sources):
    with pytest.raises(ConfigError, match="needs a draft"):
        arm(fake, Sources(target=sources.target), "llama-server+draft", n_max=3)
    with pytest.raises(ConfigError, match="cannot close a model's thinking"):
        arm(fake, sources, config=RunConfig(think_budget=10))
    with pytest.raises(ConfigError, match="0 slots"):
        arm(fake, sources, n_slots=0)
    assert fake.seen("started") == []


# -- many at once -----------------------------------------------------------------------------------


def test_many_questions_in_flight(fake, sources):
    fake.wishes(sleep_s=0.3)
    questions = [(f"{QUESTION} ({i})", i) for i in range(4)]
    with arm(fake, sources, n_slots=4) as external:
        at_once = ask_many(external, questions)
        assert (at_once.n_in_flight, at_once.n_tokens, len(at_once.runs)) == (4, 12, 4)
        one_by_one = ask_many(external, questions, n_in_flight=1)
        assert one_by_one.wall_s >= 1.2 > at_once.wall_s
        with pytest.raises(ConfigError, match="0 questions in flight"):
            ask_many(external, questions, n_in_flight=0)
    assert sorted(sent["seed"] for sent in fake.seen("requests")[:4]) == sorted(target_seed(i) for i in range(4))


def test_one_failure_among_many_is_its_own(fake, sources):
    run = ArmRun(text="a", final="a", stop_reason="eos", wall_s=1.0, prefill_s=0.1, n_tokens=5)
    found = Throughput((run, SemspecError("no"), run), 2, 3.0)
    assert (found.n_tokens, found.runs) == (10, [run, run])
    fake.wishes(status=500, body="no")
    with arm(fake, sources) as external:
        outcomes = ask_many(external, [(QUESTION, 0), (QUESTION, 1)]).outcomes
    assert [type(outcome) for outcome in outcomes] == [SemspecError, SemspecError]


def test_an_interruption_stops_the_server_and_does_not_wait(fake, sources):
    fake.wishes(sleep_s=60)
    with arm(fake, sources, n_slots=2) as external:
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ask_many(external, [(QUESTION, i) for i in range(4)])
        assert time.monotonic() - start < 30
        assert external.server.pid is None
        timer.join()


# -- the true one -----------------------------------------------------------------------------------


@pytest.fixture
def true_server(monkeypatch) -> Path:
    """A llama-server on this machine; skips where there is none."""
    monkeypatch.setenv("SEMSPEC_CACHE", str(REAL_CACHE))
    try:
        return find_llama_server()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_the_true_server_writes_what_our_own_runtime_writes(true_server, sources, temperature):
    config = RunConfig(max_tokens=40, sampling=SamplingConfig(temperature=temperature))
    with make_arms(["target", "llama-server"], sources, config, MODELS, llama_server=true_server) as (ours, theirs):
        for seed in (0, 1):
            mine, other = ours.run(QUESTION, seed), theirs.run(QUESTION, seed)
            assert (other.text, other.n_tokens, other.stop_reason) == (mine.text, mine.n_tokens, mine.stop_reason)
            assert 0 < other.prefill_s < other.wall_s


def test_the_true_server_drafts(true_server, tiny):
    twins = Sources(target=tiny("llama-unpadded"), draft=tiny("llama-unpadded"))
    config = RunConfig(max_tokens=40, sampling=SamplingConfig(temperature=0.0))
    with make_arms(["llama-server+draft@3", "target"], twins, config, MODELS, llama_server=true_server) as (arm, ours):
        run = arm.run(QUESTION, 0)
        assert run.n_proposed > 0 and run.n_accepted > 0.8 * run.n_proposed
        assert run.text == ours.run(QUESTION, 0).text

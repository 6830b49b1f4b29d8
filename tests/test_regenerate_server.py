"""Answers of an OpenAI-compatible server: what is asked, what is kept, and that a stopped run goes on."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spectrain import chat_server
from spectrain.artifacts import read_json
from spectrain.config import CorpusConfig, RegenerateConfig, RunConfig
from spectrain.data.rendering import conversations
from spectrain.data.sources import open_sources
from spectrain.regenerate import regenerate

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


@pytest.fixture(autouse=True)
def no_proxy_no_wait(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(chat_server, "WAIT_S", 0.0)


@contextmanager
def serving(answer, models=("tiny",)):
    """A server whose answers are `answer(body, number)`: (status, choice). Yields address and bodies seen."""
    bodies, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, {"data": [{"id": name} for name in models]})

        def do_POST(self):
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                bodies.append(body)
                number = len(bodies)
            status, choice = answer(body, number)
            self.reply(status, {"choices": [choice], "usage": {"completion_tokens": 3}})

        def reply(self, status, value):
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def echo(body, number):
    """Answers a question by its words in capitals."""
    words = body["messages"][-1]["content"].upper()
    return 200, {
        "message": {"role": "assistant", "content": words, "tool_calls": []},
        "finish_reason": "stop",
    }


def user(text):
    return {"role": "user", "content": text}


def config_of(path, address, *, template_arguments=None, **settings):
    defaults = {"temperatures": [0.5], "max_new_tokens": 9, "batch": 3}
    return RunConfig(
        recipe="test",
        regenerate=RegenerateConfig(prompts=str(path), server=address, **(defaults | settings)),
        corpus=CorpusConfig(template_arguments=template_arguments or {}),
    )


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "turns": [f"ask {i}"]} for i in range(8)])


def test_each_request_says_how_to_sample_and_each_line_holds_the_answer(tmp_path, prompts):
    out = tmp_path / "out.jsonl"
    with serving(echo) as (address, bodies):
        config = config_of(
            prompts, address, template_arguments={"enable_thinking": False}, request={"top_k": 5}
        )
        regenerate(config, None, out)
    assert [row["messages"] for row in rows_of(out)] == [
        [user(f"ask {i}"), {"role": "assistant", "content": f"ASK {i}"}] for i in range(8)
    ]
    assert {(row["temperature"], row["finish_reason"]) for row in rows_of(out)} == {(0.5, "stop")}
    [body] = [body for body in bodies if body["messages"] == [user("ask 1")]]
    assert body == {
        "model": "tiny", "messages": [user("ask 1")], "temperature": 0.5, "top_p": 1.0, "max_tokens": 9,
        "seed": 16, "top_k": 5, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert len({body["seed"] for body in bodies}) == 8
    settings = read_json(tmp_path / "out.provenance.json")["settings"]
    kept = {
        key: settings[key] for key in ("target", "temperatures", "top_p", "max_new_tokens", "request", "seed")
    }
    assert kept == {
        "target": {"model": "tiny"}, "temperatures": [0.5], "top_p": 1.0, "max_new_tokens": 9,
        "request": {"top_k": 5}, "seed": 0,
    }  # fmt: skip


def test_tool_calls_and_reasoning_are_kept_and_sent_back(tmp_path):
    old = {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "old"}]}
    result = {"role": "tool", "content": "7C", "tool_call_id": "old"}
    row = {"id": "w", "messages": [user("Warm?"), old, result, {"role": "assistant", "content": "?"}]}
    path = write(tmp_path / "c.jsonl", [row | {"tools": TOOLS}])

    def answer(body, number):
        if number == 1:
            message = {"role": "assistant", "content": None, "reasoning": "Look.", "tool_calls": [CALL]}
            return 200, {"message": message, "finish_reason": "tool_calls"}
        return 200, {
            "message": {"content": "No.", "reasoning_content": "7 is cold."},
            "finish_reason": "length",
        }

    with serving(answer) as (address, bodies):
        regenerate(config_of(path, address), None, tmp_path / "out.jsonl")
    [kept] = rows_of(tmp_path / "out.jsonl")
    assert kept["messages"] == [
        user("Warm?"),
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "7C", "tool_call_id": "c1"},
        {"role": "assistant", "content": "No.", "reasoning_content": "7 is cold."},
    ]
    assert (kept["finish_reason"], kept["tools"]) == ("length", TOOLS)
    assert bodies[1]["messages"] == kept["messages"][:3] and bodies[1]["tools"] == TOOLS
    [conversation] = conversations(open_sources(str(tmp_path / "out.jsonl")))
    assert conversation.cut and conversation.messages[1]["tool_calls"][0]["function"]["name"] == "weather"


def test_a_stopped_run_asks_only_for_what_is_missing_and_ends_with_the_same_file(tmp_path, prompts):
    def refuses_the_fifth(body, number):
        return (400, {"error": "too long"}) if body["messages"] == [user("ask 4")] else echo(body, number)

    with serving(echo) as (address, _):
        regenerate(config_of(prompts, address), None, tmp_path / "whole.jsonl")
    out = tmp_path / "out.jsonl"
    with (
        serving(refuses_the_fifth) as (address, _),
        pytest.raises(
            ValueError, match=r"prompt p4: http.*/chat/completions: refused with status 400: .*too long"
        ),
    ):
        regenerate(config_of(prompts, address, batch=1), None, out)
    written = {row["id"] for row in rows_of(out)}
    assert written == {f"p{i}-t0.5" for i in range(4)}
    with serving(echo) as (address, bodies):  # at another address
        regenerate(config_of(prompts, address), None, out)
    assert sorted(body["messages"][0]["content"] for body in bodies) == [f"ask {i}" for i in range(4, 8)]
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_requests_are_under_way_at_the_same_time(tmp_path, prompts):
    meeting = threading.Barrier(3, timeout=30)  # breaks unless three requests are there at once

    def answer(body, number):
        if number <= 6:
            meeting.wait()
        return echo(body, number)

    with serving(answer) as (address, _):
        regenerate(config_of(prompts, address), None, tmp_path / "out.jsonl")
    assert len(rows_of(tmp_path / "out.jsonl")) == 8


def test_a_busy_server_is_asked_again_and_one_that_stays_busy_ends_the_run(tmp_path, prompts):
    with serving(lambda body, n: (503, {}) if n % 2 else echo(body, n)) as (address, _):
        regenerate(config_of(prompts, address, batch=1), None, tmp_path / "out.jsonl")
    assert len(rows_of(tmp_path / "out.jsonl")) == 8
    with (
        serving(lambda body, n: (503, {})) as (address, bodies),
        pytest.raises(
            OSError, match="no answer in 4 attempts .status 503.*the same command goes on from here"
        ),
    ):
        regenerate(config_of(prompts, address, batch=1), None, tmp_path / "other.jsonl")
    assert len(bodies) >= 4


@pytest.mark.parametrize(
    ("models", "model", "words"),
    [(("a", "b"), "", "regenerate.model='': .* has a, b"), (("a",), "c", "regenerate.model='c': .* has a")],
)
def test_a_model_that_is_not_clear_is_refused_with_those_there(tmp_path, prompts, models, model, words):
    with serving(echo, models) as (address, _), pytest.raises(ValueError, match=words):
        regenerate(config_of(prompts, address, model=model), None, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_an_answer_of_another_model_is_refused(tmp_path, prompts):
    for models, fails in ((("a",), False), (("b",), True)):
        with serving(echo, models) as (address, _):
            if fails:
                with pytest.raises(ValueError, match="other settings"):
                    regenerate(config_of(prompts, address), None, tmp_path / "out.jsonl")
            else:
                regenerate(config_of(prompts, address), None, tmp_path / "out.jsonl")


def test_settings_of_a_server_without_one_and_no_address_are_refused():
    with pytest.raises(ValueError, match="regenerate.model='x': no effect without regenerate.server"):
        RegenerateConfig(model="x")
    with pytest.raises(ValueError, match="regenerate.server='localhost:8000': expected an address"):
        chat_server.ChatServer.connect("localhost:8000", "", {})

"""The server of `watch`: what it answers and refuses, and what it says of a store that changes, is damaged or goes."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT
from typing import Any
from unittest import mock

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.pages import follower as following
from analysis.pages import trial_page
from analysis.pages.document import asset
from analysis.pages.follower import Follower
from analysis.pages.server import Server, serving
from harness.config import Trial
from tests.analysis import synthetic


@contextmanager
def served(out: Path) -> Iterator[Server]:
    """The server, answering."""
    with serving(out) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(realistic: Path) -> Iterator[Server]:
    with served(realistic) as server:
        yield server


def ask(
    server: Server, path: str = "/", method: str = "GET", host: str | None = None, body: bytes | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name in [f"127.0.0.1:{server.server_port}"] if host is None else host.split("|") if host else []:
            connection.putheader("Host", name)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def news(server: Server, version: int = 0) -> dict[str, Any]:
    """What is known once the store was looked at."""
    for _ in range(6000):
        found = json.loads(ask(server, f"/data/news?version={version}")[2])
        if found["version"] > 0 or found["message"]:
            return found
    raise AssertionError("the store was never looked at")


# --- what is answered --------------------------------------------------------------------------------------------


def test_it_listens_on_this_machine_alone(server: Server) -> None:
    assert server.socket.getsockname() == ("127.0.0.1", server.server_port)
    with socket.socket() as other:  # another address of the loopback network, of this machine too
        other.settimeout(5)
        assert other.connect_ex(("127.0.0.2", server.server_port)) != 0


HOSTS = ("evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "0.0.0.0:{port}")
HOSTS += ("127.0.0.1:{port}|evil.example", "localhost.evil.example:{port}")


@pytest.mark.parametrize("host", HOSTS)
def test_a_question_for_another_host_is_refused(server: Server, host: str) -> None:
    for path in ("/", "/data/news"):
        status, _, body = ask(server, path, host=host.format(port=server.server_port))
        assert (status, body) == (421, b"421 Misdirected Request\n")


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}"])
def test_its_own_names_are_answered(server: Server, host: str) -> None:
    assert ask(server, host=host.format(port=server.server_port))[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_nothing_but_get(server: Server, method: str) -> None:
    status, headers, _ = ask(server, method=method, body=b"x=1" if method in ("POST", "PUT", "PATCH") else None)
    assert status == 405 and headers["Allow"] == "GET"


PATHS = ("/../../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page.css/../../server.py")
PATHS += ("/page.css%00", "/stability-harness.json", "/store.zarr/zarr.json", "/trial.js/", "/page.html.j2", "/data/")
PATHS += ("/data/news/", "/?", "/[", "http://[", "/data/trial?id=../../../../etc/passwd", "/" + "x" * 5000)


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_to_a_file(server: Server, path: str) -> None:
    status, headers, body = ask(server, path)
    assert b"root:" not in body and b"import" not in body
    if path == "/?":
        assert status == 200
    elif path.startswith("/data/trial"):
        assert status == 500 and "no such trial" in json.loads(body)["error"] and len(body) < 1000
    else:
        assert status in (404, 414), path
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_every_answer_has_the_policy(server: Server) -> None:
    for path in ("/", "/plotly.js", "/data/news", "/nothing"):
        _, headers, _ = ask(server, path)
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert (
            policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and policy["connect-src"] == "'self'"
        )
        assert policy["frame-ancestors"] == "'none'" and "unsafe-eval" not in str(policy)
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and headers["Cache-Control"] == "no-store"
        assert not {"Access-Control-Allow-Origin", "Set-Cookie"} & set(headers)
    assert ask(server, "/plotly.js")[2].decode() == asset("plotly.js")


def test_a_port_that_is_taken_is_one_line(server: Server, realistic: Path, capsys) -> None:
    assert main(["watch", str(realistic), "--port", str(server.server_port)]) == 2
    captured = capsys.readouterr()
    assert (
        captured.err.startswith(f"error: --port={server.server_port}: cannot be had (")
        and captured.err.count("\n") == 1
    )


def test_strange_questions_are_answered(server: Server) -> None:
    news(server)
    for query in ("trials=", "trials=x,y&signal=loss", "signal=../x&trials=a", "", "trials=" + ",".join("ab" * 500)):
        status, _, body = ask(server, f"/data/curves?{query}")
        assert status == 200 and json.loads(body)["curves"] == {}
    for version in ("", "-1", "x", "9" * 30, "1e9", "%D9%A3"):
        assert ask(server, f"/data/news?version={version}")[0] == 200


# --- a store that changes ----------------------------------------------------------------------------------------


def packs() -> tuple[list[Trial], list[Trial]]:
    """The trials of two."""
    return [synthetic.make_trial(lr=lr) for lr in (1e-3, 1e-2)], [synthetic.make_trial(lr=lr) for lr in (1e-1, 3e-1)]


def test_what_moves_is_told(tmp_path: Path) -> None:
    first, second = packs()
    synthetic.write_pack(tmp_path, first)
    writer = synthetic.write_pack(tmp_path, second, steps_done=10, finish=False)
    follower = Follower(tmp_path)
    follower.look()
    told = follower.news(0)
    assert told["message"] == "" and told["moved"] == [trial.id for trial in reversed(second)]
    progress = told["progress"]
    assert (progress["asked"], progress["done"], progress["waiting"]) == (4, 2, 2)
    assert (progress["steps_done"], progress["steps"]) == (2 * 40 + 2 * 10, 4 * 40)
    columns, trials = told["overview"]["columns"], told["overview"]["trials"]
    latest = dict(zip(trials, columns["latest_loss"]["values"], strict=True))
    final = dict(zip(trials, columns["final_loss"]["values"], strict=True))
    assert latest[second[0].id] == pytest.approx(synthetic.flat_loss(second[0])[9]) and final[second[0].id] is None
    assert latest[first[0].id] == final[first[0].id] == pytest.approx(synthetic.flat_loss(first[0])[-1])

    before = follower.curves("loss", [second[0].id])["curves"][second[0].id]
    assert len(before["y"]) == 10
    follower.look()
    assert follower.news(told["version"]).get("overview") is None, "nothing has changed"
    more = {name: np.ones((2, 20, *writer.shape(name)[2:]), "f4") for name in writer.signals}
    writer.write(10, more | {"loss": np.full((2, 20), 7, "f4")})
    follower.look()
    after = follower.curves("loss", [second[0].id])["curves"][second[0].id]
    assert after["y"] == before["y"] + [7.0] * 20
    assert follower.news(0)["progress"]["steps_done"] == 2 * 40 + 2 * 30


def test_incidents_come_as_they_are_stored(tmp_path: Path) -> None:
    trial = synthetic.make_trial(steps=80)

    def loss(trial: Any) -> np.ndarray:
        return np.where(np.arange(80) >= 50, np.nan, np.linspace(4, 3, 80))

    synthetic.write_pack(tmp_path, [trial], loss, signals={"grad_norm": loss, "tokens": lambda t: np.arange(1.0, 81.0)})
    follower = Follower(tmp_path)
    follower.look()
    found = [one for one in follower.news(0)["incidents"] if "non-finite" in one["symptoms"]]
    assert [one["trial"] for one in found] == [trial.id] and found[0]["first"] <= 50 <= found[0]["last"]


def test_a_page_does_not_look_for_incidents_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes milliseconds a step: it has what was found, and says up to which step, or that none is known yet."""
    (trial, _), _ = packs()

    def loss(trial: Trial) -> np.ndarray:
        return np.where(np.arange(40) >= 15, np.nan, np.linspace(4, 3, 40))

    writer = synthetic.write_pack(tmp_path, [trial], loss, signals={"grad_norm": loss}, steps_done=20, finish=False)
    follower = Follower(tmp_path)
    follower.look(finds_incidents=False)
    slow = mock.Mock(wraps=trial_page.incidents_by_trial)
    monkeypatch.setattr(trial_page, "incidents_by_trial", slow)
    page = follower.trial(trial.id)["page"]
    assert page["incidents"] == [] and page["incidents_missing"] == "They are still being looked for."
    follower.look()
    page = follower.trial(trial.id)["page"]
    assert slow.call_count == 0 and page["incidents_missing"] == "" and page["incidents"]
    found = page["incidents"]
    writer.write(20, {name: np.ones((1, 20, *writer.shape(name)[2:]), "f4") for name in writer.signals})
    follower.look(finds_incidents=False)
    page = follower.trial(trial.id)["page"]
    assert page["incidents"] == found and page["incidents_missing"] == "Looked for up to step 20."
    follower.look()
    assert follower.trial(trial.id)["page"]["incidents_missing"] == "" and slow.call_count == 0
    # A row that has gone back has no more steps than before, and what was found of it may not hold any more.
    follower.store.signatures.clear()
    follower.look(finds_incidents=False)
    assert follower.trial(trial.id)["page"]["incidents_missing"] == "Looked for up to step 40."
    # Those of very many trials are not kept: such a page looks for its own.
    monkeypatch.setattr(following, "MOST_INCIDENTS", 0)
    follower.store.signatures.clear()
    follower.look()
    page = follower.trial(trial.id)["page"]
    assert slow.call_count == 1 and page["incidents"]


def test_how_far_a_sweep_is_does_not_wait_for_incidents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take seconds in long runs; then they are looked for a fifth of the time, and steps are told meanwhile."""
    _, second = packs()
    synthetic.write_pack(tmp_path, second, steps_done=10, finish=False)
    follower = Follower(tmp_path)
    told = []

    def found(pack: Any) -> Iterator[Any]:
        told.append(follower.news(0)["progress"]["steps_done"])
        time.sleep(0.05)
        yield from ()

    monkeypatch.setattr(follower, "_incidents_in", found)
    begun = time.monotonic()
    follower.look()
    assert told == [2 * 10] and follower._incidents_due - begun > 5 * 0.05 and follower._seen_in > 0
    follower.store.signatures.clear()  # it has changed
    follower.look(finds_incidents=False)
    assert len(told) == 1 and follower.news(0)["unread"] == 2


def test_a_row_that_goes_back_is_read_anew(tmp_path: Path) -> None:
    trials, _ = packs()
    writer = synthetic.write_pack(tmp_path, trials, steps_done=20, finish=False)
    follower = Follower(tmp_path)
    follower.look()
    assert len(follower.curves("loss", [trials[0].id])["curves"][trials[0].id]["y"]) == 20
    back = {name: np.full((2, 10, *writer.shape(name)[2:]), np.nan, "f4") for name in writer.signals}
    back["loss"][0, :5] = 9
    back["loss"][1] = 8
    writer.write(10, back)  # the first row is at step 15 again
    follower.look()
    told = follower.curves("loss", [trial.id for trial in trials])["curves"]
    assert told[trials[0].id]["y"][10:] == [9.0] * 5 and told[trials[0].id]["holes"] == []
    assert told[trials[1].id]["y"][10:] == [8.0] * 10


def test_a_block_that_is_half_written_is_not_there_yet(tmp_path: Path) -> None:
    """Signals of a block are written one after the other: a loss that is not there yet is no loss that was NaN."""
    trials, _ = packs()
    synthetic.write_pack(tmp_path, trials, steps_done=20, finish=False)
    folder = next((tmp_path / "store.zarr").glob("*/zarr.json")).parent
    before = (folder / "zarr.json").read_bytes()
    shutil.copy(folder / "tokens" / "c.0.1", folder / "tokens" / "c.0.2")  # steps 20 to 29
    follower = Follower(tmp_path)
    follower.look()
    assert (folder / "zarr.json").read_bytes() == before
    assert not [one for one in follower.news(0)["incidents"] if "finite" in one["detectors"]]
    assert follower.trial(trials[0].id)["curves"][trials[0].id]["tokens"]["of"] == 20


def test_a_pack_that_is_damaged_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    first, second = packs()
    synthetic.write_pack(tmp_path, first, pack="a" * 16)
    synthetic.write_pack(tmp_path, second, pack="b" * 16)
    with served(tmp_path) as server:
        assert news(server)["message"] == ""
    (tmp_path / "store.zarr" / ("b" * 16) / "zarr.json").write_text('{"attributes": {"created": ')
    chunk = next((tmp_path / "store.zarr" / ("a" * 16) / "loss").glob("c.0.*"))
    with served(tmp_path) as server:
        told = news(server)
        assert "bbbbbbbbbbbbbbbb" in told["message"] and "left out" in told["message"]
        assert told["overview"]["trials"] == [trial.id for trial in first]
        chunk.write_bytes(b"")
        status, _, body = ask(server, f"/data/curves?signal=loss&trials={first[0].id}")
        assert status == 500 and "is damaged" in json.loads(body)["error"]
        status, _, body = ask(server, f"/data/trial?id={first[0].id}")
        assert status == 500 and "is damaged" in json.loads(body)["error"]
        assert ask(server)[0] == 200


def test_a_folder_that_goes_is_told_and_what_was_seen_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, _ = packs()
    synthetic.write_pack(out, first)
    follower = Follower(out)
    follower.look()
    out.rename(tmp_path / "moved")
    follower.look()
    told = follower.news(0)
    assert "does not exist" in told["message"] and told["overview"]["trials"] == [trial.id for trial in first]
    synthetic.write_pack(out, first)  # another folder of that name
    follower.look()
    assert "was moved or removed meanwhile" in follower.news(0)["message"]


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"attributes": {"format": 6, "study": 7}}', "\x00" * 100, "[" * 10**5]
)
def test_a_store_of_nonsense_is_a_message(tmp_path: Path, content: str) -> None:
    trial = synthetic.make_trial()
    synthetic.write_pack(tmp_path, [trial])
    follower = Follower(tmp_path)
    follower.look()
    (tmp_path / "store.zarr" / "zarr.json").write_text(content)
    follower.look()
    told = follower.news(0)
    assert told["message"] and told["overview"]["trials"] == [trial.id]
    assert follower.trial(trial.id)["page"]["id"] == trial.id


def test_what_was_read_is_kept_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = packs()
    synthetic.write_pack(tmp_path, first)
    synthetic.write_pack(tmp_path, second)
    monkeypatch.setattr(following, "KEPT_BYTES", 3 * 2 * 40 * 4)
    follower = Follower(tmp_path)
    follower.look()
    for signal in ("loss", "grad_norm", "param_norm", "update_rms", "activation_rms"):
        for trial in (*first, *second):
            assert follower.curves(signal, [trial.id])["curves"][trial.id]["of"] == 40
    assert len(follower._signals) == 3
    many = [trial.id for trial in (*first, *second)] * 100
    assert len(follower.curves("loss", many)["curves"]) <= following.MOST_CURVES


BUSY = """
import sys
import torch
from analysis.pages.follower import Follower

def look(self, finds_incidents=True):
    while True:  # in C++, which wants the interpreter's lock every few milliseconds
        torch.ones(300, 300) @ torch.ones(300, 300)

Follower.look = look
from analysis.__main__ import main
sys.exit(main(["watch", sys.argv[1]]))
"""


def test_ctrl_c_ends_it_in_the_midst_of_a_look(realistic: Path) -> None:
    """At once, and without the abort with which Python's end tears a thread out of C++."""
    command = [sys.executable, "-c", BUSY, str(realistic)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout is not None
            address = re.search(r"http://127.0.0.1:(\d+)/", watch.stdout.readline())
            assert address is not None
            asking = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=60)
            asking.request("GET", "/data/news?version=0")
            with contextlib.suppress(OSError):
                asking.getresponse().read()
            time.sleep(0.5)
            watch.send_signal(SIGINT)
            out, err = watch.communicate(timeout=60)
        finally:
            watch.kill()
    assert (watch.returncode, out, err) == (130, "", "interrupted\n")

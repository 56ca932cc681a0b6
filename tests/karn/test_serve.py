"""Test what the server shows, to whom, and what it never gives: every route with and without the token."""

import io
import json
import re
import shutil
import zipfile
from urllib.parse import quote, urlencode

import pytest

from pages import EVIL, Page
from served import NAME, TOKEN, make_runs

pytest.importorskip("starlette", reason="the extra web is not installed")

from starlette.testclient import TestClient

from esper.cli import main
from esper.karn.reader import open_run
from esper.karn.serve.access import Door, read_token
from esper.karn.serve.app import create_app
from esper.karn.serve.library import Library, key_of

ADDRESS = "http://127.0.0.1:8712"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("served").resolve())


def client(folders, token=None, host="127.0.0.1", address=ADDRESS):
    door = Door(token, host, host == "127.0.0.1", 8712)
    return TestClient(create_app(Library(folders), door), address, follow_redirects=False)


@pytest.fixture(scope="module")
def browser(runs):
    return client([runs])


ROUTES = [route.path for route in create_app(Library([]), Door(None, "", True, 8712)).app.routes]
"""Every route of the application: one that is added is tested with the others."""
NAMES = {"assets": "serve.js", "files": "summary.json", "archives": "env-000.zip"}


def address_of(route, run):
    """Return an address of a route that is answered for a run; KeyError if a new route has a kind of name that NAMES lacks."""
    kind = route.split("/")[-2]
    address = route.format(key=key_of(run), name=NAMES[kind] if "{name}" in route else "")
    return f"{address}?run={key_of(run)}&run={key_of(run.parent / NAME)}" if route == "/compare" else address


def addresses_of(run):
    return [address_of(route, run) for route in ROUTES]


def test_every_route_answers_and_other_addresses_do_not(runs, browser):
    assert len(ROUTES) > 10
    for address in [*addresses_of(runs / "finished"), "/none", "/runs/none", "/assets/none"]:
        for method in ("GET", "HEAD"):
            assert browser.request(method, address).status_code == (404 if "none" in address else 200), address


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_answers_without_the_token(runs, route):
    address, guarded = address_of(route, runs / "finished"), client([runs], TOKEN, "0.0.0.0")
    mark = "&" if "?" in address else "?"
    in_address = [f"{address}{mark}{name}={TOKEN}" for name in ("token", "access_token", "authorization", "esper-8712")]
    for path in (address, *in_address, f"{address}#{TOKEN}", f"http://user:{TOKEN}@127.0.0.1:8712{address}"):
        for headers in (
            {},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": f"Bearer {TOKEN[:-1]}"},
            {"Authorization": "Bearer "},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": "Bearer é"},
            {"Cookie": f"esper-8712={TOKEN}"},
            {"Cookie": "esper-8712="},
        ):
            sent = {name: text.encode() for name, text in headers.items()}
            if "@" in path:
                sent |= {"Authorization": sent.get("Authorization", b"")}  # the client would make one of the address
            for method in ("GET", "HEAD"):
                answer = guarded.request(method, path, headers=sent)
                assert answer.status_code == 401, (path, headers)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert TOKEN not in answer.text
    assert guarded.get(address, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_the_form_of_the_token_gives_a_cookie_that_opens_every_route(runs):
    guarded = client([runs], TOKEN, "0.0.0.0")
    assert Page(guarded.get("/login").text).tags.count("form") == 1
    assert guarded.post("/login", data={"token": "wrong"}).status_code == 401
    assert guarded.post("/login", data={"token": "x" * 5000}).status_code == 413
    assert guarded.post("/login", data={"token": TOKEN}, headers={"Origin": "http://other"}).status_code == 403
    answer = guarded.post("/login", data={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    for address in addresses_of(runs / "finished"):
        assert guarded.get(address).status_code == 200


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//[x]", "http://℀"])
def test_an_origin_that_is_no_address_is_refused(runs, origin):
    guarded = client([runs], TOKEN, "0.0.0.0")
    answer = guarded.post("/login", data={"token": TOKEN}, headers={"Origin": origin.encode()})
    assert answer.status_code == 403
    assert answer.text.startswith("The form was sent from another site")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8712", "127.0.0.1.evil.example", "u@127.0.0.1", "", "::"]
)
def test_a_request_under_another_name_is_turned_away(runs, host):
    for address in addresses_of(runs / "finished"):
        assert client([runs]).get(address, headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8712", "127.0.0.1", "[::1]:8712"])
def test_a_request_under_a_name_of_this_machine_is_answered(runs, host):
    assert client([runs]).get("/", headers={"Host": host}).status_code == 200


def test_a_token_file_makes_a_token_that_loopback_needs_too(runs, tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    guarded = client([runs], read_token(tmp_path / "token"))
    assert guarded.get("/").status_code == 401
    assert guarded.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_only_get_is_answered(runs, browser):
    for address in [*addresses_of(runs / "finished"), "/login"]:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert browser.request(method, address).status_code == 405


UP = [
    "..",
    "%2e%2e",
    "..%2f..%2fsecret",
    "%2fetc%2fpasswd",
    "....//",
    "\\..\\",
    "%00",
    "secret",
    "a%0d%0aSet-Cookie:%20x=1",
]


@pytest.mark.parametrize("text", UP)
@pytest.mark.parametrize("route", ROUTES)
def test_no_text_in_an_address_leads_out_of_a_run_or_into_a_header(runs, browser, route, text):
    key = key_of(runs / "finished")
    (runs / "secret").write_text("a secret")
    for address in {route.replace("{key}", text).replace("{name}", text), route.format(key=key, name=text)}:
        answer = browser.get(f"{address}?run={text}&start={text}&q={text}&env={text}&op={text}")
        assert answer.status_code in (200, 404, 422)
        assert "a secret" not in answer.text
        assert "root:" not in answer.text
        assert "x=1" not in str(answer.headers)


@pytest.mark.parametrize("route", ROUTES)
def test_no_name_of_a_folder_gets_into_a_header(runs, tmp_path, monkeypatch, route):
    evil = 'a\r\nSet-Cookie: x=1\u202e\x1b";é'
    run = tmp_path / evil
    shutil.copytree(runs / "finished", run)
    shutil.copytree(runs / NAME, tmp_path / NAME)
    (run / "models" / "env-000").rename(run / "models" / evil)
    monkeypatch.setitem(NAMES, "archives", quote(f"{evil}.zip"))
    answer = client([tmp_path]).get(address_of(route, run))
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    assert all(text.isascii() and text.isprintable() for text in answer.headers.values())


def test_a_link_in_a_run_folder_is_not_followed(runs, tmp_path):
    run, secret = tmp_path / "r", tmp_path / "out"
    secret.mkdir()
    (secret / "summary.json").write_text('{"a": "hidden"}')
    run.mkdir()
    (run / "config.yaml").write_bytes((runs / "finished" / "config.yaml").read_bytes())
    for name in ("summary.json", "events.jsonl", "report.html"):
        (run / name).symlink_to(secret / "summary.json")
    (run / "models").symlink_to(secret, target_is_directory=True)
    (tmp_path / "linked").symlink_to(runs, target_is_directory=True)
    linked, key = client([tmp_path]), key_of(run.resolve())
    assert "1 run The newest first" in Page(linked.get("/").text).said
    for path in ("", "/content", "/decisions", "/decisions.jsonl", "/files/summary.json", "/files/events.jsonl"):
        answer = linked.get(f"/runs/{key}{path}")
        assert answer.status_code in (404, 422)
        assert "hidden" not in answer.text
    assert "summary.json" not in linked.get(f"/runs/{key}/files").text


@pytest.fixture
def replaceable(runs, tmp_path):
    """Make a run three folders deep that a browser has seen; return it, the browser, and a run that is not served."""
    outside, run = tmp_path / "outside", tmp_path / "served" / "a" / "b" / "run"
    for folder in (outside / "b" / "run", run):
        shutil.copytree(runs / "finished", folder)
    seen = client([tmp_path / "served"])
    assert all(seen.get(address).status_code == 200 for address in addresses_of(run) if "compare" not in address)
    return run, seen, outside


@pytest.mark.parametrize("level", [0, 1])
def test_a_run_that_becomes_a_link_is_not_followed_on_the_next_request(replaceable, level):
    run, seen, outside = replaceable
    replaced, other = ((run, outside / "b" / "run"), (run.parent, outside / "b"))[level]
    shutil.rmtree(replaced)
    replaced.symlink_to(other, target_is_directory=True)
    assert (run / "summary.json").exists()
    for address in addresses_of(run):
        if "/runs/" in address or "compare" in address:
            assert seen.get(address).status_code == 404, address
    assert "No run is here yet" in seen.get("/content").text


def test_a_run_that_was_deleted_is_not_found(replaceable):
    run, seen, _ = replaceable
    shutil.rmtree(run)
    for address in addresses_of(run):
        if "/runs/" in address:
            answer = seen.get(address)
            assert answer.status_code == 404, address
            assert "no such run" in answer.text
    assert "No run is here yet" in seen.get("/content").text


def test_a_damaged_line_is_said_before_a_download_of_decisions_begins(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "finished", run)
    with open(run / "events.jsonl", "a") as file:
        file.write('{"kind": "decision"}\n')
    answer = client([tmp_path]).get(f"/runs/{key_of(run.resolve())}/decisions.jsonl")
    assert answer.status_code == 422
    assert "This cannot be shown" in answer.text


def test_the_list_has_every_run_and_what_is_wrong_with_it(runs, browser):
    said = Page(browser.get("/").text).said
    assert "4 runs" in said
    assert re.search(r"deep/killed iris random-valid killed 3", said)
    assert re.search(r"damaged line 1 of .*events\.jsonl: not a row", said)
    began = [entry.began for entry in Library([runs]).entries()]
    assert began == sorted(began, reverse=True)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("q=KILL", ["deep/killed"]),
        ("q=random iris finished", ["finished"]),
        ("status=killed", ["deep/killed"]),
        ("task=iris&status=finished", ["finished", NAME]),
        ("controller=ppo", []),
    ],
)
def test_search_and_tags_select_runs(runs, browser, query, names):
    page = Page(browser.get(f"/?{query}").text)
    assert sorted(re.findall(r"/runs/(\w+)", str(page.attributes))) == sorted(key_of(runs / name) for name in names)


def test_a_run_that_begins_later_appears(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("esper.karn.serve.library.LOOK_EVERY", 0.0)
    later = client([tmp_path])
    first = later.get("/content")
    assert "No run is here yet" in first.text
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_bytes((runs / "finished" / "config.yaml").read_bytes())
    second = later.get("/content")
    assert "killed" in second.text
    assert first.headers["x-version"] != second.headers["x-version"]


def test_the_page_of_a_run_is_its_report(runs, browser):
    report = Page((runs / "finished" / "report.html").read_text())
    shown = Page(browser.get(f"/runs/{key_of(runs / 'finished')}").text)
    main = report.said[report.said.index("What was asked") : report.said.index("Written by Esper")]
    assert main.strip() in shown.said
    assert {"style", "onclick", "onload"} & {name for name, _ in shown.attributes} == set()


def test_names_that_a_user_gave_can_neither_run_nor_turn_the_text(runs, browser):
    key = key_of(runs / NAME)
    query = urlencode({"q": EVIL, "text": EVIL, "task": EVIL})
    for address in (f"/?{query}", f"/runs/{key}", f"/runs/{key}/decisions?{query}", f"/runs/{key}/files"):
        answer = browser.get(address)
        parsed = Page(answer.text)
        assert parsed.tags.count("script") == 2 + ('id="data"' in answer.text), address
        assert "onload" not in {name for name, _ in parsed.attributes}
        # a field of a form gives the text back as it came
        assert "\x1b" not in re.sub(r'value="[^"]*"', "", answer.text)
        assert "\u202e" not in re.sub(r'value="[^"]*"', "", answer.text)
        assert "alert(1)" in parsed.said or "?" in address
    name = browser.get(f"/runs/{key}/files/config.yaml").headers["content-disposition"]
    assert re.fullmatch(r'attachment; filename="[\w.-]+"', name)


FILTERS = [
    {},
    {"env": "1"},
    {"slot": "block0"},
    {"op": "GERMINATE", "carried_out": "yes"},
    {"op": "PRUNE"},
    {"carried_out": "no"},
    {"text": "NO"},
]


@pytest.mark.parametrize("chosen", FILTERS, ids=str)
def test_the_filter_gives_exactly_the_rows_of_the_journal(runs, browser, chosen):
    run, key = runs / "finished", key_of(runs / "finished")
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    rows = [(line, row) for line in lines if (row := json.loads(line))["kind"] == "decision"]
    assert {row["op"] for _, row in rows} >= {"GERMINATE", "PRUNE"}
    assert {row["carried_out"] for _, row in rows} == {True, False}
    wanted = [
        (line, row)
        for line, row in rows
        if all(str(row[name]) == chosen[name] for name in ("env", "slot", "op") if name in chosen)
        and chosen.get("carried_out") in (None, "yes" if row["carried_out"] else "no")
        and chosen.get("text", "").lower() in f"{row.get('why', '')}\n{row.get('refusal', '')}".lower()
    ]
    assert browser.get(f"/runs/{key}/decisions.jsonl", params=chosen).text == "".join(line for line, _ in wanted)
    page = browser.get(f"/runs/{key}/decisions", params=chosen).text
    assert re.findall(r'<tr><th scope="row">(\d+)</th>', page) == [str(row["seq"]) for _, row in wanted]


def test_many_decisions_come_in_parts(runs, browser, monkeypatch):
    monkeypatch.setattr("esper.karn.serve.pages.PART", 4)
    key, address, seen = key_of(runs / "finished"), "?start=0", []
    while address:
        text = browser.get(f"/runs/{key}/decisions{address}").text
        seen += re.findall(r'<tr><th scope="row">(\d+)</th>', text)
        later = re.search(r'href="(\?[^"]*)">Later', text)
        address = later and later[1].replace("&amp;", "&")
    assert seen == [str(row.seq) for row in open_run(runs / "finished").rows("decision")]


@pytest.mark.parametrize("query", ["env=x", "env=²", "op=WAIT", "carried_out=maybe", "start=-1"])
def test_a_field_that_cannot_be_is_answered_by_a_sentence(runs, browser, query):
    answer = browser.get(f"/runs/{key_of(runs / 'finished')}/decisions?{query}")
    assert answer.status_code == 422
    assert re.search(r"is '.+'; give", Page(answer.text).said)


def test_two_runs_are_compared_and_one_or_none_is_refused(runs, browser):
    keys = [key_of(runs / name) for name in ("finished", "deep/killed")]
    said = Page(browser.get(f"/compare?run={keys[0]}&run={keys[1]}").text).said
    assert "How the runs compare" in said
    assert "cannot be compared" in said
    for query in ("", f"run={keys[0]}", f"run={keys[0]}&run={keys[0]}"):
        assert "choose 2 to 16 in the list" in Page(browser.get(f"/compare?{query}").text).said
    assert browser.get("/compare?run=none&run=nothing").status_code == 404


def test_downloads_are_the_files(runs, browser):
    run, key = runs / "finished", key_of(runs / "finished")
    listed = re.findall(r'href="(/runs/\w+/(?:files|archives)/[^"]+)"', browser.get(f"/runs/{key}/files").text)
    assert len(listed) == 5 + 3
    for address in listed:
        answer, name = browser.get(address), address.rsplit("/", 1)[1]
        assert answer.headers["content-disposition"].startswith("attachment; ")
        if "/files/" in address:
            assert answer.content == (run / name).read_bytes()
            continue
        packed, folder = zipfile.ZipFile(io.BytesIO(answer.content)), run / "models" / name.removesuffix(".zip")
        assert sorted(packed.namelist()) == sorted(f"{folder.name}/{path.name}" for path in folder.iterdir())
        assert all(packed.read(entry) == (folder.parent / entry).read_bytes() for entry in packed.namelist())
    assert browser.get(f"/runs/{key}/files/checkpoints").status_code == 404


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere is not a folder"),
        ([".", "--port", "70000"], "--port is 70000"),
        ([".", "--host", "192.0.2.1"], "not an address of this machine"),
        ([".", "--token-file", "short"], "holds no token: write one line of at least 16"),
        ([".", "--token-file", "missing"], "missing: No such file"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line

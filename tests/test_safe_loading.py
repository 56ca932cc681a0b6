"""Check that what Esper reads is never executed, and leads nowhere: hostile files, and the sources themselves."""

import ast
import io
import json
import os
import resource
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.api import grow, load
from esper.cli import main
from esper.kasmina.network.export import MODEL, PROGRAM, TOPOLOGY
from esper.leyline.messages import InputError
from esper.store.files import NAMES as OWN
from esper.tamiyo.catalog import get_controller, trained
from esper.tamiyo.policy.controller import FACTS, WEIGHTS, Language, Policy, load_policy, save_policy
from esper.tasks.catalog import get_task
from esper.tasks.images import LARGEST, read_cifar10
from pictures import write_cifar
from populations import small_config

SOURCES = sorted((Path(__file__).parent.parent / "src" / "esper").rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "code", "imp"}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
NAMES = {
    "torch.load",
    "torch.export.load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "yaml.Loader",
    "yaml.FullLoader",
    "yaml.UnsafeLoader",
    "os.system",
    "os.popen",
    "ctypes.CDLL",
}


ALLOWED = {
    "runs/workers/transports.py": ["pickle"],  # what a process sends to those that it starts
    "commands/healing.py": ["torch.export.load"],  # the program that the user names to be healed
}
"""What SECURITY.md names as executed."""


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def reads_tensors_alone(call):
    """Return whether a call is torch.load with `weights_only=True`, whose unpickler makes tensors and plain values alone."""
    asked = [word.value for word in call.keywords if word.arg == "weights_only"]
    return dotted(call.func) == "torch.load" and [ast.unparse(value) for value in asked] == ["True"]


def executes(source):
    """Yield what a source has that could execute what it reads."""
    tree = ast.parse(source)
    of_tensors = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and reads_tensors_alone(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (name.name for name in node.names if name.name.split(".")[0] in MODULES)
            case ast.ImportFrom() if (node.module or "").split(".")[0] in MODULES:
                yield str(node.module)
            case ast.ImportFrom():
                yield from sorted({f"{node.module}.{name.name}" for name in node.names} & NAMES)
            case ast.Call() if isinstance(node.func, ast.Name) and node.func.id in CALLS:
                yield node.func.id
            case ast.Call() if dotted(node.func) in ("np.load", "numpy.load"):
                allowed = [word.value for word in node.keywords if word.arg == "allow_pickle"]
                if not (len(allowed) == 1 and isinstance(allowed[0], ast.Constant) and allowed[0].value is False):
                    yield "np.load"
            case ast.Call() if any(word.arg == "shell" for word in node.keywords):
                yield "shell"
            case ast.Attribute() if dotted(node) in NAMES and id(node) not in of_tensors:
                yield dotted(node)


def test_no_source_has_anything_that_executes_what_it_reads():
    found = {str(path.relative_to(SOURCES[0].parent)): list(executes(path.read_text())) for path in SOURCES}
    assert {path: calls for path, calls in found.items() if calls} == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.numpy_pickle",
        "eval('1')",
        "exec('1')",
        "import torch\ntorch.load(p)",
        "torch.load(p, weights_only=False)",
        "torch.load(p, weights_only=safe)",
        "from torch import load",
        "torch.export.load(p)",
        "from torch.export import load",
        "yaml.load(t, Loader=yaml.FullLoader)",
        "from yaml import unsafe_load",
        "np.load(p)",
        "np.load(p, allow_pickle=True)",
        "subprocess.run(c, shell=True)",
        "os.system(c)",
    ],
)
def test_what_executes_is_seen(source):
    assert list(executes(source))


def test_reading_a_module_in_evaluation_mode_is_not_taken_for_executing():
    assert list(executes("network.eval()\nnp.load(p, allow_pickle=False)\nyaml.safe_load(t)\nre.compile(t)")) == []
    assert list(executes("torch.load(p, weights_only=True)")) == []


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, sign):
        self.sign = sign

    def __reduce__(self):
        return (Path.touch, (self.sign,))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    config = small_config(task="iris", envs=2, steps=2, data={"batch_size": 16}, checkpoint={"every_steps": 1})
    grow(get_task("iris"), config, controller="heuristic", run=folder)
    return folder


@pytest.fixture
def run(ran, tmp_path):
    shutil.copytree(ran, tmp_path / "r")
    for path in (tmp_path / "r").glob("models/*/SHA256SUMS"):
        path.unlink()  # as someone who alters a file does
    return tmp_path / "r"


def esper(*arguments):
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


def sentence(read, *arguments, **named):
    with pytest.raises(InputError) as refused:
        read(*arguments, **named)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_program_that_is_a_bomb_is_neither_run_by_load_nor_by_export(run, tmp_path):
    sign = tmp_path / "sign"
    torch.save(Bomb(sign), run / "models" / "env-000" / PROGRAM)
    load(run / "models" / "env-000")
    assert esper("export", run, "--out", tmp_path / "out") == 0
    assert esper("resume", run) == 0
    written, x = torch.export.load(tmp_path / "out" / "env-000" / PROGRAM).module(), torch.randn(5, 4)
    torch.testing.assert_close(written(x), load(run / "models" / "env-000")(x))
    assert not sign.exists(), "the program is made anew from the weights"
    torch.load(run / "models" / "env-000" / PROGRAM, weights_only=False)
    assert sign.exists(), "the bomb works"


def test_a_model_that_is_a_bomb_is_refused_and_not_run(run, tmp_path):
    sign, folder = tmp_path / "sign", run / "models" / "env-000"
    torch.save({"segments.0.weight": Bomb(sign)}, folder / MODEL)
    assert str(folder / MODEL) in sentence(load, folder)
    assert not sign.exists()


def test_a_program_is_not_even_opened(run):
    folder = run / "models" / "env-000"
    (folder / PROGRAM).unlink()
    os.mkfifo(folder / PROGRAM)  # whoever opened it would wait
    load(folder)


@pytest.mark.parametrize("name", [MODEL, TOPOLOGY])
def test_a_network_whose_file_is_a_link_is_refused(run, name):
    path = run / "models" / "env-000" / name
    path.rename(run.parent / "elsewhere")
    path.symlink_to(run.parent / "elsewhere")
    assert f"{path} is a link" in sentence(load, path.parent)


@pytest.mark.parametrize(
    "name", [*OWN, "models/env-000", "models/env-000/model.pt2", ".summary.json.tmp", "events-cut-1.jsonl"]
)
def test_a_run_with_a_link_in_it_is_not_taken_up_and_what_it_leads_to_stays(run, tmp_path, capsys, name):
    (run / "summary.json").unlink()
    path, target = run / name, tmp_path / "precious"
    target.write_bytes(path.read_bytes() if path.is_file() else b"{}")
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    before = target.read_bytes()
    assert esper("resume", run) == 2
    assert f"{path} is a link, which is not followed" in capsys.readouterr().err
    assert target.read_bytes() == before


def test_links_that_are_none_of_espers_do_not_matter(run, capsys):
    (run / "notes").symlink_to(run.parent)
    assert esper("resume", run) == 0


@pytest.mark.parametrize("name", ["env-000", "env-000/model.pt2"])
def test_export_does_not_copy_what_a_link_leads_to(run, tmp_path, capsys, name):
    (tmp_path / "secret").write_text("secret")
    path = run / "models" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(tmp_path / "secret")
    assert esper("export", run, "--out", tmp_path / "out") == 2
    assert "is a link, which is not followed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("task: iris\ntask: wine\n", "names the key 'task' twice"),
        ("a: &a [1]\nb: *a\n", "holds an alias"),
        ("!!python/object/apply:os.system ['touch sign']", "is not valid YAML"),
        ("#" * (2**20 + 1), "more than any of its kind"),
    ],
)
def test_a_hostile_config_of_a_run_is_refused(run, capsys, monkeypatch, tmp_path, text, words):
    monkeypatch.chdir(tmp_path)
    (run / "config.yaml").write_text(text)
    assert esper("resume", run) == 2
    assert words in capsys.readouterr().err
    assert not Path("sign").exists()


@pytest.mark.parametrize("depth", [10, 900, 100_000])
def test_a_deeply_nested_summary_is_worked_out_again_or_printed_but_never_a_traceback(run, capsys, depth):
    (run / "summary.json").write_text('{"a":' * depth + "1" + "}" * depth)
    assert esper("resume", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "finished"


# Controllers.


@pytest.fixture
def controller(tmp_path):
    folder = tmp_path / "controller"
    save_policy(Policy.fresh(Language((), ("mlp-small",), (0, 1), (1.0,)), 0), folder)
    return folder


def rewrite(folder, change):
    """Change the JSON of a controller, as someone who knows of the checksum."""
    from esper.store.disk import checksum_of

    facts = json.loads((folder / FACTS).read_text())
    change(facts)
    (folder / FACTS).write_text(json.dumps(facts | {"checksum": checksum_of(facts)}))


def test_the_controller_that_is_damaged_below_was_good(controller):
    assert load_policy(controller).language.tempos == (0, 1)


@pytest.mark.parametrize("name", ["blueprints", "tempos", "targets"])
def test_a_language_that_asks_for_another_network_is_refused_before_one_is_built(controller, name):
    rewrite(controller, lambda facts: facts["language"].update({name: [0] * 200_000}))
    sentence(load_policy, controller)  # what a first refusal imports stands in memory from now on
    limit = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 20 * 2**20, limit[1]))
    try:
        said = sentence(load_policy, controller)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert "but the language has 20000" in said


def test_a_weight_too_many_and_one_of_another_kind_are_named(controller):
    import hashlib

    from safetensors.torch import load_file, save_file

    good = load_file(controller / WEIGHTS)
    for change, words in (
        ({"extra": torch.zeros(1)}, "extra"),
        ({"op.weight": good["op.weight"].double()}, "tensor op.weight is"),
    ):
        save_file(good | change, controller / WEIGHTS)
        digest = hashlib.sha256((controller / WEIGHTS).read_bytes()).hexdigest()
        rewrite(controller, lambda facts, digest=digest: facts.update(sha256=digest))
        assert words in sentence(load_policy, controller)


@pytest.mark.parametrize("depth", range(900, 1000, 7))
def test_a_deeply_nested_controller_is_one_sentence(controller, depth):
    text = (controller / FACTS).read_text().rstrip().removesuffix("}")
    (controller / FACTS).write_text(text + ', "origin": {"a": ' + "[" * depth + "]" * depth + "}}")
    sentence(load_policy, controller)


def test_a_link_to_a_controller_in_a_run_folder_is_refused_and_one_that_is_named_is_followed(controller, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "controller").symlink_to(controller)
    assert "is a link, which is not followed" in sentence(trained, str(tmp_path / "r"))
    assert "is a link, which is not followed" in sentence(get_controller, str(tmp_path / "r"), small_config())
    (tmp_path / "mine").symlink_to(controller)
    assert trained(str(tmp_path / "mine")) == tmp_path / "mine"


# Networks.


@pytest.mark.parametrize(
    "arguments",
    [
        {"inputs": 10**30, "width": 8, "hidden": [4], "outputs": 3},
        {"inputs": 4, "width": 10**9, "hidden": [4], "outputs": 3},
        {"inputs": 4, "width": 8, "hidden": [1] * 10**5, "outputs": 3},
    ],
)
def test_a_topology_whose_host_asks_for_more_than_any_is_refused_at_once(run, arguments):
    path = run / "models" / "env-000" / TOPOLOGY
    topology = json.loads(path.read_text())
    path.write_text(json.dumps(topology | {"host": {"name": "mlp", "arguments": arguments}}))
    assert "has a size over" in sentence(load, path.parent)


def test_many_seeds_that_fit_one_by_one_do_not_fit_together(run):
    folder = run / "models" / "env-000"
    topology = json.loads((folder / TOPOLOGY).read_text())
    seed = {
        "slot": "block0",
        "after": 1,
        "blueprint": "mlp-small",
        "blend": "add",
        "alpha": 1.0,
        "reads": 16,
        "writes": 16,
    }
    (folder / TOPOLOGY).write_text(json.dumps(topology | {"seeds": [seed] * 5000}))
    assert "does not fit the network" in sentence(load, folder)


# Kept figures and pictures.


def test_cifar_files_that_are_larger_than_the_published_ones_are_not_read(tmp_path):
    write_cifar(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    os.truncate(path, 2**40)
    assert f"{path} has more than 30,730,000 bytes" in sentence(read_cifar10, tmp_path)


def test_a_parquet_file_that_would_unpack_to_more_than_a_gibibyte_is_refused_before_it_is(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("PIL")
    (tmp_path / "cifar10").mkdir()
    picture = pyarrow.array([{"bytes": b"\0" * (2**20), "path": None}] * 64)
    table = pyarrow.table({"img": picture, "label": [0] * 64})
    path = tmp_path / "cifar10" / "train-00000-of-00001.parquet"
    with parquet.ParquetWriter(path, table.schema, compression="zstd", use_dictionary=False) as file:
        for _ in range(LARGEST // 2**26 + 1):
            file.write_table(table)
    shutil.copy(path, tmp_path / "cifar10" / "test-00000-of-00001.parquet")
    assert path.stat().st_size < 2**22
    assert "it says that it holds 1,088 rows of 1," in sentence(read_cifar10, tmp_path)


def test_kept_figures_that_would_unpack_to_more_than_any_are_refused(tmp_path, monkeypatch):
    from esper.runs.evaluation.contenders import named
    from esper.runs.evaluation.evaluation import Design, Runner

    design = Design(get_task("iris"), [{"steps": 1, "data": {"batch_size": 16}}], 1, "heldout", 0, 1)
    parts, runner = design.parts(named("never")), Runner(tmp_path)
    runner.play(parts)
    (path,) = tmp_path.glob("*.npz")
    with zipfile.ZipFile(path) as figures:
        content = {name: figures.read(name) for name in figures.namelist()}
    for claimed, held in ((2**60, 0), (2**27, 2**27)):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (claimed,)})
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as figures:
            for index, (name, data) in enumerate(content.items()):
                with figures.open(name, "w") as file:
                    file.write(header.getvalue() if not index else data)
                    for _ in range(0 if index else held * 8 // 2**24):
                        file.write(b"\0" * 2**24)
        assert "cannot be read as kept figures" in sentence(runner.play, parts)

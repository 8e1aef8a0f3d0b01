"""Files that others may have written end in one sentence that names them, whatever they say."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from osdp import DeviceInfo, ModelDesc, Plan, codec
from osdp.cli import main as cli
from osdp.cli import models as cli_models
from osdp.cluster.calibration.calibrate import Calibration
from osdp.cluster.calibration.measured_step import COLUMNS, read_steps
from osdp.cluster.file import load_cluster
from osdp.cluster.known_transformers import shape_of
from osdp.cluster.layer_profile import LayerProfile
from osdp.codec import parse_json, quote, read_text
from osdp.hardware.profile import Profile
from osdp.model.description import DTYPE_BYTES
from osdp.model.training import Training
from osdp.text import parse_bytes

#: Text, and what is said of it.
HOSTILE = {
    "[" * 100_000: "is nested deeper than 100 levels",
    "[" * 101 + "]" * 101: "is nested deeper than 100 levels",
    '{"a":' * 150 + "1" + "}" * 150: "is nested deeper than 100 levels",
    "9" * 10_000: "is too large: it has 10000 digits",
    '{"version": 1e999}': "the number 1e999 is too large",
    '{"version": NaN}': "NaN is not a JSON number",
    "[-Infinity]": "-Infinity is not a JSON number",
    '{"a": 1, "b": 2, "a": 3}': "'a' is written twice in one place",
    "": "line 1: Expecting value",
    '{"a": 1,\n3}': "line 2: Expecting property name",
    '{"a": "\x00"}': "line 1: Invalid control character",
    "\ufeff{}": "line 1: Unexpected UTF-8 BOM",
}

READERS: dict[str, Callable[[Path], Any]] = {
    "plan": Plan.load,
    "profile": Profile.load,
    "device": DeviceInfo.load,
    "description": ModelDesc.load,
    "calibration": Calibration.load,
    "layers": LayerProfile.load,
    "training": lambda path: codec.load(Training, path),
    "cluster": load_cluster,
    "shape": lambda path: shape_of(str(path)),
    "configuration": lambda path: cli_models.build(str(path), {}, 1, 1),
}


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and len(text) < 800, text
    return text


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_names_the_file_and_what_is_wrong(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    for text, message in HOSTILE.items():
        path.write_text(text, encoding="utf8")
        with pytest.raises(ValueError, match=r"given\.json") as caught:
            READERS[reader](path)
        assert message in one_line(caught.value), (text[:20], str(caught.value))
    for content in (b"\xff\xfe", b"\x00" * 10, b"[]", b'"text"', b"3", b"null", b"[[[]]]"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"given\.json") as caught:
            READERS[reader](path)
        one_line(caught.value)


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"/dev/zero: has more than 1000 bytes"):
        read_text("/dev/zero", largest=1000)
    path = tmp_path / "large.yaml"
    path.write_text("#" * 2**21)
    with pytest.raises(ValueError, match=r"large\.yaml: has more than 1048576 bytes"):
        load_cluster(path)


def test_what_the_library_writes_is_read() -> None:
    assert parse_json('{"a": [1, 2.5, "x", null, true], "b": {}}') == {
        "a": [1, 2.5, "x", None, True],
        "b": {},
    }
    assert parse_json("[" * 100 + "]" * 100)
    assert parse_json("9" * 40) == 10**40 - 1
    assert quote("a\n" * 999) == repr("a\n" * 999)[:99] + "'..."


def test_sizes_without_end_are_refused_at_once() -> None:
    for text in ("1e999999999 GiB", "1e99 B", f"{2**63} B", "1e99999999999999999999 B"):
        with pytest.raises(ValueError, match=r"a size must be less than 2\*\*63 bytes|exponent is too large"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a" * 200_000, "field larger than field limit"),
        (
            ",".join(COLUMNS) + "\n" + ",".join(["1", "9" * 5000, *["1"] * 9]),
            "line 2: 'global batch' is '9999",
        ),
        (
            ",".join(COLUMNS) + "\n" + ",".join(["1", "9" * 300, *["1"] * 9]),
            r"9'\.\.\., more than 10000000000",
        ),
        (",".join(COLUMNS) + "\n" + ",".join([*["1"] * 10, "1e999"]), "line 2: all numbers must be positive"),
        ("", "lacks the columns"),
    ],
)
def test_measured_steps_are_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"steps\.csv.*" + message) as caught:
        read_steps(path)
    one_line(caught.value)


# -- cluster files ------------------------------------------------------------------------------------------

NODE = "nodes:\n  - {gpu: A100, count: 1, devices: 4, network: 40 Gbit/s}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # These never ended, or filled the memory.
        ("nodes: &a\n- *a", r", line 2: \*a is an alias; write out its value"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nnodes: [*b, *b]", r", line 2: \*a is an alias"),
        (f"{NODE}base: &b {{count: 1}}\nother: {{<<: *b}}", r", line 4: \*b is an alias"),
        ("nodes: " + "[" * 101 + "]" * 101, r", line 1: is nested deeper than 100 levels"),
        ("[" * 50_000, r", line 1: is nested deeper than 100 levels"),
        (NODE.replace("count: 1", "count: " + "9" * 5000), r": Exceeds the limit \(4300"),
        (NODE.replace("count: 1", "count: 10000000"), r", line 2: nodes\[0\]\.count: must be at most 1e\+06"),
        (NODE.replace("count: 1", "count: .inf"), r"count: must be a positive whole number, got inf"),
        (
            NODE.replace("devices: 4", "devices: 4, latency: .nan"),
            r"latency: must be a positive number, got nan",
        ),
        (NODE.replace("40 Gbit", "1e999 Gbit"), r"network: must be a speed such as 40 Gbit/s"),
        (
            NODE.replace("devices: 4", "devices: 4, memory: 1e999999999 GiB"),
            r"memory: cannot read the size .*: its exponent is too large",
        ),
        (
            NODE + "gpus: {A: !!python/object/apply:os.system [ls]}",
            r", line 3: could not determine a construct",
        ),
        (
            NODE.replace("devices: 4", "devices: 4, price: {per_hour: 1, date: 2026-13-45, source: x}"),
            r": month must be in 1\.\.12",
        ),
        ("nodes: [\x01]", r"special characters are not allowed"),
        ("? [a, b]\n: c", r", line 1: found unhashable key"),
        ("nodes: 'a\n\n\nb'", r"nodes: must be a list of nodes"),
    ],
)
def test_cluster_files_are_refused_with_their_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf8")
    with pytest.raises(ValueError, match=r"cluster\.yaml.*" + message) as caught:
        load_cluster(path)
    one_line(caught.value)


# -- folders of osdp profile --------------------------------------------------------------------------------


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    if caught.value.code:
        raise RuntimeError(caught.value.code)


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that says its model was made by a module that lies in the working folder."""
    small = ["n_layer=2", "n_embd=32", "n_head=2", "vocab_size=64"]
    fields = [part for field in small for part in ("--set", field)]
    folder = tmp_path / "described"
    run(
        "profile",
        "gpt2",
        "--seq",
        "16",
        *fields,
        "--memory-limit",
        "1GiB",
        "--estimate",
        "--out",
        str(folder),
    )
    (tmp_path / "got").mkdir()
    (tmp_path / "got" / "evil.py").write_text(
        "from pathlib import Path\n"
        "Path('ran').touch()\n"
        "def make():\n"
        "    from osdp.cli import models as cli_models\n"
        f"    return cli_models.build('gpt2', cli_models.parse_fields({small}), 1, 16)\n"
    )
    source = json.loads((folder / "source.json").read_text())
    (folder / "source.json").write_text(json.dumps({**source, "model": "got.evil:make", "fields": []}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_code_that_a_folder_names_runs_only_if_it_is_trusted(described: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(NODE.replace("network", "link: 230 GB/s, network"))
    on_cluster = [
        "cluster", "plan", "--model", "described", "--cluster", str(cluster), "--global-batch", "4",
        "--set", "heads=2", "--set", "causal=true", "--reserve", "1MiB", "--micro-batch", "1", "--pp", "2",
        "--tp", "1",
    ]  # fmt: skip
    refusal = (
        r"error: building the model of .*described runs the function got\.evil:make, imported from the "
        r"current folder .*: if you trust that code, pass --trust-code \(in Python: trust_code=True\)"
    )
    for arguments in (["plan", str(described), "--pp", "2"], [*on_cluster, "--out", "plan.json"]):
        with pytest.raises(RuntimeError, match=refusal):
            run(*arguments)
    with pytest.raises(ValueError, match=refusal[7:]):
        cli_models.load_described_model(described)
    # What needs no model needs no trust.
    run("plan", str(described), "--out", "whole.json")
    run(*on_cluster)
    assert not Path("ran").exists()
    run("plan", str(described), "--pp", "2", "--trust-code", "--out", "stages.json")
    assert Path("ran").exists()
    assert len(Plan.load("stages.json").stages) == 2


def test_kernels_that_a_folder_names_are_not_fetched(described: Path) -> None:
    # Transformers takes an attention from the hub, and runs it, if its name has a slash.
    source = codec.load(cli_models.ModelSource, described / "source.json")
    for field in (
        "_attn_implementation=kernels-of/evil",
        r'_attn_implementation="kernels-of\u002fevil"',
        'text_config={"_attn_implementation": "kernels:evil"}',
    ):
        named = dataclasses.replace(source, model="gpt2", fields=("n_layer=2", field))
        codec.save(named, described / "source.json")
        with pytest.raises(
            ValueError, match=r"runs code that transformers downloads for '.*_attn_implementation"
        ):
            cli_models.load_described_model(described)
    named = dataclasses.replace(source, model="gpt2", fields=("_attn_implementation=eager",))
    codec.save(named, described / "source.json")
    assert cli_models.load_described_model(described)


def test_kernels_that_a_configuration_beside_it_names_are_not_fetched(described: Path) -> None:
    """What the folder sets was looked at, and not the file that it names."""
    source = codec.load(cli_models.ModelSource, described / "source.json")
    evil = described / "evil.json"
    evil.write_text('{"model_type": "gpt2", "_attn_implementation": "kernels-of/evil"}')
    codec.save(dataclasses.replace(source, model=str(evil), fields=()), described / "source.json")
    with pytest.raises(ValueError, match=r"runs code that transformers downloads for 'evil\.json'"):
        cli_models.load_described_model(described)


def test_classes_that_a_configuration_names_are_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Transformers asks at the terminal whether to run the code of a class that it does not have.
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "who/ever--evil.Model"}}')
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="references custom code contained in who/ever"):
        cli_models.build(str(path), {}, 1, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"Source must be an object, got \[\]"),
        ({"model": 3, "fields": [], "batch": 1, "seq": 1}, r"Source\.model must be a str, got 3"),
        ({"model": "gpt2", "fields": "x", "batch": 1, "seq": 1}, r"Source\.fields must be a list, got 'x'"),
        (
            {"model": "gpt2", "fields": [], "batch": 10**9, "seq": 10**9},
            r"batch=1000000000, seq=1000000000 and tp=1 must be at least 1, and a batch may have at most ",
        ),
        (
            {"model": "gpt2", "fields": [], "batch": 0, "seq": 1},
            r"batch=0, seq=1 and tp=1 must be at least 1",
        ),
        ({"model": "gpt2", "fields": [], "batch": 1, "seq": 1, "run": 1}, r"unknown fields \['run'\]"),
    ],
)
def test_a_folder_that_says_nonsense_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "source.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"source\.json: .*" + message):
        cli_models.load_described_model(tmp_path)


def test_a_dtype_is_one_of_those_there_are(tmp_path: Path) -> None:
    # It is looked up in torch by its name.
    path = tmp_path / "training.json"
    codec.save(Training(local_batch=1, param_dtype="bfloat16"), path)
    path.write_text(path.read_text().replace("bfloat16", "load"))
    with pytest.raises(
        ValueError, match=f"param_dtype 'load' is unknown; there are {', '.join(DTYPE_BYTES)}"
    ):
        codec.load(Training, path)

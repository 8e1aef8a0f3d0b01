"""Cluster files: YAML or JSON descriptions of nodes, read into a :class:`osdp.cluster.hardware.Cluster`.

::

    nodes:
      - gpu: A100            # a name in osdp/cluster/gpus.json, or in gpus: below
        count: 1             # number of such nodes
        devices: 4           # GPUs per node
        network: 40 Gbit/s   # of the whole node, as it is specified
        network_share: 0.6   # optional: the part of it that large collectives reach; otherwise 0.9
        adapters: 8          # optional: network adapters; otherwise as few as possible, of 400 Gbit/s each
        name: our A100       # optional: distinguishes groups of nodes with the same GPU
        memory: 80 GiB       # optional: of each device, if it differs from the data file
        link: 230 GB/s       # optional: bandwidth of collectives between two devices, in one direction
        latency: 6.0e-6      # optional: seconds per step of a collective inside the node
        network_latency: 1.4e-5   # optional: the same between nodes
        price: {per_hour: 10.5, date: 2026-01-31, source: our contract}   # optional: to plan by cost
    gpus:                    # optional: kinds that are not in the data file, or that replace one there
      # optional: best_tflops, that of its best measured matrix product, attention_share and
      # cudnn_attention_share, the parts of tflops that FlashAttention and cuDNN's attention reach, and
      # link_share, the part of link that large all-reduces reach, and switched, the fewest devices of a
      # node that a switch joins: of fewer each two have a part of link
      Mine: {tflops: 100, memory: 24 GiB, memory_bandwidth: 600 GB/s, link: 32 GB/s}
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

from osdp.cluster.hardware import (
    ATTENTION_SHARE,
    BEST_SHARE,
    Cluster,
    Gpu,
    NetworkLink,
    NodeGroup,
    NodeType,
    Price,
)
from osdp.codec import DEEPEST, parse_json, quote, read_text
from osdp.text import parse_bytes, parse_rate

#: Fraction of the specified bandwidth that large collectives reach. Inside a node, where the GPU's data has
#: no link_share of its own: an all-reduce of 1 GiB on 8 A100 took 8.19 ms, 229 of 300 GB/s (NCCL times
#: published with vTrain, Bang et al., MICRO 2024). Between nodes: Calculon's systems with InfiniBand (Isaev
#: et al., SC 2023); 86 of 100 GB/s were measured on two nodes (NVIDIA/nccl-tests issue 175, 2023-10-29), but
#: 30 of 50 on four with AWS's EFA (NVIDIA/nccl issue 527, 2022-07-25): give ``network_share: 0.6`` there. TCP
#: reached 4 to 6 of 12.5 GB/s (issue 450, 2021-01-05) and 15 to 23 of 32 Gbit/s (issue 209, 2019-06-04): 0.5.
LINK_SHARE, NETWORK_SHARE = 0.76, 0.9

#: Seconds per step of a collective in addition to its bytes. Inside a node: of the 92.8 us of 1 MiB on 8 A100
#: in the same data, the 32 us of any all-reduce (osdp.cluster.cost.rates) and 8 us of bytes leave 53 for 14
#: steps.
#: Between nodes: NCCL's own estimate of a ring step over the network (src/graph/tuning.cc, hwLatencies of
#: NET, ring, Simple).
STEP_LATENCY, NETWORK_LATENCY = 4e-6, 14e-6

#: Maximum size of a cluster file in bytes; one entry can describe a thousand nodes.
_LARGEST = 2**20

#: Maximum number of nodes of a kind, and of devices per node.
_MOST = 10**6

_NODE_FIELDS = (
    "gpu",
    "count",
    "devices",
    "network",
    "network_share",
    "adapters",
    "link",
    "latency",
    "network_latency",
    "memory",
    "price",
    "name",
)
_GPU_FIELDS = (
    "tflops",
    "best_tflops",
    "attention_share",
    "cudnn_attention_share",
    "memory",
    "memory_bandwidth",
    "multiprocessors",
    "bfloat16",
    "link",
    "link_kind",
    "link_share",
    "switched",
    "source",
)
_PRICE_FIELDS = ("per_hour", "date", "source")


@dataclass(frozen=True)
class _Place:
    """A part of the file: its value, and for error messages its name and the line of each of its fields."""

    value: Any
    name: str
    file: str
    lines: Mapping[tuple[str | int, ...], int]
    path: tuple[str | int, ...] = ()

    def at(self, key: str | int) -> "_Place":
        """The field or list element ``key`` of this part."""
        name = f"{self.name}[{key}]" if isinstance(key, int) else f"{self.name}.{key}".lstrip(".")
        return _Place(self.value[key], name, self.file, self.lines, (*self.path, key))

    def wrong(self, message: str) -> ValueError:
        """An error that names the file, this part, and its line or that of the nearest part around it."""
        line = next(
            (
                self.lines[self.path[:end]]
                for end in range(len(self.path), -1, -1)
                if self.path[:end] in self.lines
            ),
            None,
        )
        where = f"{self.file}, line {line}" if line else self.file
        return ValueError(f"{where}: {self.name or 'the file'}: {message}")

    def fields(self, known: Sequence[str], needed: Sequence[str]) -> Mapping[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong(f"must have the fields {', '.join(needed)}, got {quote(self.value)}")
        for field in self.value:
            if field not in known:
                raise self.at(field).wrong(
                    f"unknown field; there are {', '.join(known)}{_nearest(field, known)}"
                )
        if missing := [field for field in needed if field not in self.value]:
            raise self.wrong(f"{', '.join(missing)} missing; no default is assumed, please specify it")
        return self.value

    def number(self, *, whole: bool = False) -> float:
        value = self.value
        if (
            isinstance(value, bool)
            or not isinstance(value, int if whole else (int, float))
            or not 0 < value < math.inf
        ):
            raise self.wrong(f"must be a positive {'whole ' if whole else ''}number, got {quote(value)}")
        most = _MOST if whole else 1e30
        if value > most:
            raise self.wrong(f"must be at most {most:g}, got {quote(value)}")
        return value

    def share(self) -> float:
        share = self.number()
        if share > 1:
            raise self.wrong(f"must be a share of at most 1, got {quote(self.value)}")
        return share

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong(f"must be true or false, got {quote(self.value)}")
        return self.value

    def rate(self) -> float:
        try:
            return parse_rate(str(self.value))
        except ValueError as error:
            raise self.wrong(str(error)) from error

    def size(self) -> int:
        if not isinstance(self.value, str) or self.value.strip().isdigit():
            raise self.wrong(f"must be a size with its unit such as 80 GiB, got {quote(self.value)}")
        try:
            return parse_bytes(self.value)
        except (TypeError, ValueError) as error:
            raise self.wrong(str(error)) from error


def load_cluster(path: str | Path) -> Cluster:
    """Load a cluster file.

    Args:
        path: YAML, or JSON if it ends in ``.json``: in the format above, or as written by
            :meth:`osdp.cluster.hardware.Cluster.save`.

    Raises:
        ValueError: The file is malformed, or a field is missing or unknown; the message has line and field.
        ImportError: It is YAML and PyYAML is not installed.
    """
    file = str(path)
    text = read_text(path, _LARGEST)
    plain, lines = (_json(text, file), {}) if file.endswith(".json") else _yaml(text, file)
    if isinstance(plain, dict) and "groups" in plain:  # written by Cluster.save
        from osdp import codec

        return codec.load(Cluster, path)
    root = _Place(plain, "", file, lines)
    given = root.fields(("nodes", "gpus"), ("nodes",))
    gpus = {name: _Place(spec, name, "osdp/cluster/gpus.json", {}) for name, spec in known_gpus().items()}
    if "gpus" in given:
        own = root.at("gpus")
        if not isinstance(own.value, dict):
            raise own.wrong(f"must be names with their specs, got {quote(own.value)}")
        gpus |= {str(name): own.at(name) for name in own.fields(tuple(own.value or ()), ())}
    nodes = root.at("nodes")
    if not isinstance(nodes.value, list) or not nodes.value:
        raise nodes.wrong("must be a list of nodes, each with gpu, count, devices and network")
    try:
        return Cluster(tuple(_group(nodes.at(index), gpus) for index in range(len(nodes.value))))
    except ValueError as error:
        raise error if str(error).startswith(file) else nodes.wrong(str(error)) from error


def known_gpus() -> dict[str, dict[str, Any]]:
    """GPU specifications that ship with the library, by name."""
    text = resources.files("osdp").joinpath("cluster/gpus.json").read_text(encoding="utf8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def make_gpu(name: str, spec: Mapping[str, Any]) -> Gpu:
    """A GPU from its specification, in the format of cluster files.

    Args:
        name: Name of the GPU.
        spec: Fields as under ``gpus:`` of a cluster file.

    Raises:
        ValueError: A field is missing or malformed.
    """
    return _gpu(name, _Place(spec, name, "specs", {}))


def node_of(fields: Mapping[str, Any], where: str) -> NodeType:
    """A kind of node with a GPU of the data file.

    Args:
        fields: Fields as under ``nodes:`` of a cluster file.
        where: What they were read from, for messages.

    Raises:
        ValueError: A field is missing or malformed, or the GPU is unknown.
    """
    gpus = {name: _Place(spec, name, "osdp/cluster/gpus.json", {}) for name, spec in known_gpus().items()}
    return _group(_Place(fields, "", where, {}), gpus).node


def _group(node: _Place, gpus: Mapping[str, _Place]) -> NodeGroup:
    fields = node.fields(_NODE_FIELDS, ("gpu", "count", "devices", "network"))
    name = _gpu_called(str(fields["gpu"]), gpus)
    if name not in gpus:
        raise node.at("gpu").wrong(
            f"unknown GPU {quote(name)}; there are {', '.join(gpus)}, and others can be described under "
            f"gpus: of a cluster file{_nearest(name, tuple(gpus))}"
        )
    spec = gpus[name]
    gpu = _gpu(name, spec)
    if "memory" in fields:
        gpu = replace(gpu, memory=node.at("memory").size())
    devices = int(node.at("devices").number(whole=True))
    if "link" in fields:
        link = node.at("link").rate()
    elif "link" in spec.value:
        share = spec.at("link_share").share() if "link_share" in spec.value else LINK_SHARE
        link = spec.at("link").rate() * share
    elif devices == 1:
        link = gpu.memory_bandwidth
    else:
        raise node.wrong(
            f"link missing: the bandwidth between the {devices} devices of a node is unknown; add link: "
            "such as 230 GB/s"
        )
    switched = int(spec.at("switched").number(whole=True)) if "switched" in spec.value else 1
    latency = node.at("latency").number() if "latency" in fields else STEP_LATENCY
    far = node.at("network_latency").number() if "network_latency" in fields else NETWORK_LATENCY
    reached = node.at("network_share").share() if "network_share" in fields else NETWORK_SHARE
    network = node.at("network").rate() * reached
    adapters = int(node.at("adapters").number(whole=True)) if "adapters" in fields else 0
    kind = NodeType(
        name=str(fields.get("name", name)),
        gpu=gpu,
        devices=devices,
        inside=NetworkLink(link, latency),
        outside=NetworkLink(network, far),
        price=_price(node.at("price")) if "price" in fields else None,
        adapters=adapters,
        # A link that is given is that between two devices.
        mesh="link" not in fields and devices < switched,
    )
    return NodeGroup(kind, int(node.at("count").number(whole=True)))


def _gpu(name: str, spec: _Place) -> Gpu:
    fields = spec.fields(_GPU_FIELDS, ("tflops", "memory", "memory_bandwidth"))
    tflops = spec.at("tflops").number()
    best = spec.at("best_tflops").number() / tflops if "best_tflops" in fields else BEST_SHARE
    several = fields.get("multiprocessors", 0) != 0
    multiprocessors = int(spec.at("multiprocessors").number(whole=True)) if several else 0
    # What limits matrix products below an A100's share, such as power, limits attention as much.
    attention = ATTENTION_SHARE * min(best / BEST_SHARE, 1.0)
    return Gpu(
        name=name,
        flops=tflops * 1e12,
        memory=spec.at("memory").size(),
        memory_bandwidth=spec.at("memory_bandwidth").rate(),
        multiprocessors=multiprocessors,
        source=str(fields.get("source", "")),
        best_share=best,
        attention_share=spec.at("attention_share").share() if "attention_share" in fields else attention,
        bfloat16=spec.at("bfloat16").flag() if "bfloat16" in fields else True,
        cudnn_attention_share=spec.at("cudnn_attention_share").share()
        if "cudnn_attention_share" in fields
        else None,
    )


def _price(price: _Place) -> Price:
    fields = price.fields(_PRICE_FIELDS, _PRICE_FIELDS)
    try:
        date.fromisoformat(str(fields["date"]))
    except ValueError as error:
        raise price.at("date").wrong(
            f"must be a day such as 2026-01-31, got {quote(fields['date'])}"
        ) from error
    return Price(price.at("per_hour").number(), str(fields["date"]), str(fields["source"]))


#: What drivers print around the name of a GPU: ``"NVIDIA A100-SXM4-40GB"``, ``"NVIDIA H100 80GB HBM3"``.
_AS_PRINTED = re.compile(
    r"^(?:(?:NVIDIA|AMD|Instinct|Tesla|GeForce)\b\s*)+|[\s-]*\b(?:SXM\d?|HBM\d\w*)\b", re.IGNORECASE
)


def _gpu_called(name: str, gpus: Mapping[str, _Place]) -> str:
    """Name in the data file, of which ``name`` may differ by case, spaces and memory: ``"a100 40 GB"``."""
    if name in gpus:
        return name
    name = _AS_PRINTED.sub("", name)
    if name in gpus:
        return name

    def matching(text: str) -> str | None:
        found = [gpu for gpu in gpus if _plain_name(gpu) == _plain_name(text)]
        return found[0] if len(found) == 1 else None

    told = re.fullmatch(r"(.+?)[\s-]*\b(\d+)\s*GB", name, re.IGNORECASE)
    base = None if told is None else matching(told[1])
    if matching(name) is not None or told is None or base is None:
        return matching(name) or name
    # Drivers keep some of what is sold: a T4 of 16 GB has 15 GiB.
    share = gpus[base].at("memory").size() / (int(told[2]) * 2**30)
    return base if 0.9 < share <= 1 else name


def _plain_name(gpu: str) -> str:
    return re.sub(r"[\s-]", "", gpu).lower()


def _nearest(name: Any, known: Sequence[str]) -> str:
    same = [other for other in known if other.lower() == str(name).lower()]
    close = same or difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _json(text: str, file: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        separator = ", " if str(error).startswith("line ") else ": "
        raise ValueError(f"{file}{separator}{error}") from error


class _Refused(ValueError):
    """Valid YAML that cluster files do not support."""


def _require_simple(events: Iterable[Any], file: str) -> None:
    """Refuse aliases and deep nesting, by which a short file can expand without end."""
    depth = 0
    for event in events:
        kind, line = type(event).__name__, event.start_mark.line + 1
        if kind == "AliasEvent":
            raise _Refused(f"{file}, line {line}: *{event.anchor} is an alias; write out its value")
        depth += kind.endswith("StartEvent") and kind[:4] in ("Sequ", "Mapp")
        depth -= kind.endswith("EndEvent") and kind[:4] in ("Sequ", "Mapp")
        if depth > DEEPEST:
            raise _Refused(f"{file}, line {line}: is nested deeper than {DEEPEST} levels")


def _yaml(text: str, file: str) -> tuple[Any, dict[tuple[str | int, ...], int]]:
    """The content of a YAML file, and the line of every field by its path."""
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "cluster files in YAML need PyYAML: pip install 'osdp[cli]', or write JSON"
        ) from error
    try:
        _require_simple(yaml.parse(text, Loader=yaml.SafeLoader), file)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        plain = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{file}{line}: {problem}") from error
    except _Refused:
        raise
    except ValueError as error:  # days that do not exist, numbers with thousands of digits
        raise ValueError(f"{file}: {error}") from error
    # YAML keeps the last of repeated fields silently, so that the node tree is walked for them, too.
    lines: dict[tuple[str | int, ...], int] = {}
    todo: list[tuple[tuple[str | int, ...], Any]] = [((), root)] if root is not None else []
    while todo:
        path, node = todo.pop()
        lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if (*path, key.value) in lines:
                    raise ValueError(
                        f"{file}, line {key.start_mark.line + 1}: {key.value} is written twice in one place"
                    )
                lines[(*path, key.value)] = key.start_mark.line + 1
                todo.append(((*path, key.value), value))
        elif isinstance(node, yaml.SequenceNode):
            todo += [((*path, index), value) for index, value in enumerate(node.value)]
    return plain, lines

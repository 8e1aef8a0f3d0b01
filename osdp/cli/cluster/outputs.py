"""Output files of ``osdp cluster plan``."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from osdp.cluster.measured_layout import MEASURED, PLANNED


@dataclass(frozen=True, kw_only=True)
class OutputFiles:
    """Options for output files, in addition to what is printed."""

    csv: Annotated[Path | None, Option(help="write the table as CSV")] = None
    json: Annotated[Path | None, Option(help="write the table as JSON")] = None
    plot: Annotated[Path | None, Option(help="plot time and cost, as PNG or HTML")] = None
    report: Annotated[
        Path | None, Option(help="write a page about the best layout: what was decided and why, as HTML")
    ] = None
    out: Annotated[
        Path | None,
        Option(
            help="write the best layout as a plan that OSDP runs, with launch scripts and configurations of "
            "other frameworks in the same folder"
        ),
    ] = None
    measure: Annotated[
        Path | None,
        Option(
            help="folder for the layouts that a measurement should decide between, each with the launch "
            "script that measures it"
        ),
    ] = None
    export: Annotated[
        Path | None,
        Option(help="folder for the best layout as configurations of Megatron-LM, DeepSpeed and others"),
    ] = None

    @property
    def runs(self) -> bool:
        """Whether plans that osdp runs are written."""
        return self.out is not None or self.measure is not None

    def check(self) -> None:
        """Check before the search that all files can be written.

        Raises:
            ValueError: A folder does not exist, or a plot has an unknown format; all faults are listed.
        """
        files = {
            "csv": self.csv,
            "json": self.json,
            "plot": self.plot,
            "report": self.report,
            "out": self.out,
            "measure": self.measure,
            "export": self.export,
        }
        faults = [
            f"--{name} {path}: folder {path.parent} does not exist"
            for name, path in files.items()
            if path is not None and not path.parent.is_dir()
        ]
        faults += [
            f"--{name} {path}: is a file, not a folder"
            for name, path in (("export", self.export), ("measure", self.measure))
            if path is not None and path.exists() and not path.is_dir()
        ]
        if self.measure is not None and (found := sorted(self.measure.glob(f"row*/{MEASURED}"))):
            faults.append(
                f"--measure {self.measure}: has measured {', '.join(file.parent.name for file in found)}, "
                "which would be lost: name another folder, or delete it"
            )
        if self.measure is not None:
            faults += [
                f"--measure {self.measure}: {path.name} in it is not of an earlier call (no {PLANNED}): "
                "name another folder"
                for path in sorted(self.measure.glob("row*"))
                if re.fullmatch(r"row\d+", path.name) and not (path / PLANNED).exists()
            ]
        places: dict[Path, list[str]] = {}
        for name, path in files.items():
            if path is not None and name not in ("measure", "export"):
                places.setdefault(path.resolve(), []).append(f"--{name}")
        faults += [
            f"{' and '.join(names)} are one file, {path}" for path, names in places.items() if len(names) > 1
        ]
        if self.plot is not None and self.plot.suffix not in (".png", ".html"):
            faults.append(f"--plot {self.plot}: must end in .png or .html")
        if faults:
            raise ValueError("; ".join(faults))

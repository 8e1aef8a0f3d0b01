"""Where the answers of ``osdp cluster plan`` go."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option


@dataclass(frozen=True, kw_only=True)
class OutputFiles:
    """Options that say where answers go, beside what is printed."""

    csv: Annotated[Path | None, Option(help="table as CSV")] = None
    json: Annotated[Path | None, Option(help="table as JSON")] = None
    plot: Annotated[Path | None, Option(help="time and cost, PNG or HTML")] = None
    out: Annotated[
        Path | None, Option(help="the best plan as one that runs, and beside it what starts it elsewhere")
    ] = None

    def check(self) -> None:
        """Refuse what cannot be written, before anything is searched; all faults at once."""
        files = {"csv": self.csv, "json": self.json, "plot": self.plot, "out": self.out}
        faults = [
            f"--{name} {path}: there is no folder {path.parent}"
            for name, path in files.items()
            if path is not None and not path.parent.is_dir()
        ]
        if self.plot is not None and self.plot.suffix not in (".png", ".html"):
            faults.append(f"--plot {self.plot}: pictures are .png or .html")
        if faults:
            raise ValueError("; ".join(faults))

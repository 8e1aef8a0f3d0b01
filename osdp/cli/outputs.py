"""Where the answers of ``osdp plan --cluster`` go."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class OutputFiles:
    """Where answers go, beside what is printed.

    Attributes:
        csv: Table as CSV.
        json: Table as JSON.
        plot: Time and cost as a picture.
        out: The best plan as one that runs, with how to start it and what other frameworks read.
        steps: Of the whole training, for its cost.
    """

    csv: Path | None = None
    json: Path | None = None
    plot: Path | None = None
    out: Path | None = None
    steps: int | None = None

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

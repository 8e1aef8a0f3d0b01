"""Prints the path of the counter; see the package for what it is for."""

from benchmarks.support.live_bytes import NoCompilerError, preload

try:
    print(preload()["LD_PRELOAD"])
except NoCompilerError as error:
    raise SystemExit(f"peaks of CPU memory will not be measured: {error}") from error

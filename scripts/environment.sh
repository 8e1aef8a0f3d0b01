# Sourced by the other scripts: makes .venv at the project's root, once, and puts it first in PATH.
# Needs Python >= 3.11; torch is installed only where there is none, and always before what depends on it.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
TORCH="torch==2.13.0"
STAMP="$VENV/.installed"

fail() {
    echo "error: $*" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 found; install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

has_torch() {
    "$1" -c 'import sys, torch; sys.exit(not (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14))' >/dev/null 2>&1
}

is_outside_venvs() {
    "$1" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' >/dev/null 2>&1
}

make_venv() {
    local python site=""
    python="$(find_python)"
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        fail "$python lacks the venv module; on Debian and Ubuntu: apt install python3-venv"
    # A torch that is already on the machine is the one built for its GPUs; that of another virtual
    # environment would not come along.
    if has_torch "$python" && is_outside_venvs "$python"; then site="--system-site-packages"; fi
    "$python" -m venv --clear $site "$VENV" || fail "$python could not create $VENV"
}

pip_install() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check "$@" >>"$VENV/install.log" 2>&1 ||
        fail "pip could not install $* (is there a network?); see $VENV/install.log"
}

wanted() {
    cat "$ROOT/setup.py" "$ROOT/pyproject.toml" "$ROOT/scripts/environment.sh" | cksum
    echo "$ROOT"
}

install() {
    is_new_enough "$VENV/bin/python" || make_venv
    echo "installing into $VENV (once; the log is install.log in it)"
    has_torch "$VENV/bin/python" || pip_install "$TORCH"
    pip_install --editable "$ROOT[dev]"
    wanted >"$STAMP"
}

[ ! -L "$VENV" ] || fail "$VENV is a link: installing there would change another checkout; remove it"
if ! is_new_enough "$VENV/bin/python" || [ "$(cat "$STAMP" 2>/dev/null)" != "$(wanted)" ]; then install; fi
export PATH="$VENV/bin:$PATH"
# The training programs are modules of the project's root, whatever the directory one starts them from.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

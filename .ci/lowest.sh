#!/usr/bin/env bash
# Unit and CLI tests with the oldest versions that pyproject.toml allows: each direct dependency at its lower bound, the
# oldest Python that there is (3.10, if this machine has it), and without the `train` extra.
#
#   lowest.sh [PYTEST OPTIONS]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}/lowest
uv=(${UV:-"${VENV:-.venv}/bin/uv"})

python=""
for name in python3.10 "$HOME"/.pyenv/versions/3.10.*/bin/python python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python python3; do
  found=$(command -v "$name" || true)
  # A shim of pyenv is there for a version that is not chosen, too: only what runs counts.
  if [ -n "$found" ] && "$found" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    python=$found
    break
  fi
done
[ -n "$python" ] || { echo "error: no Python from 3.10 on was found" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info >= (3, 11))' || echo "Python 3.10 was not found: $python is the oldest"

"${uv[@]}" venv --quiet --clear --python "$python" "$venv"
# Bounds are those of the package; what runs the tests is not bound by it.
"${uv[@]}" pip install --quiet --python "$venv/bin/python" --resolution lowest-direct --editable .
"${uv[@]}" pip freeze --quiet --exclude-editable --python "$venv/bin/python" > "$venv/lowest.txt"
"${uv[@]}" pip install --quiet --python "$venv/bin/python" --constraint "$venv/lowest.txt" \
  pytest pytest-xdist pytest-timeout hypothesis pyte jsonschema cryptography uv
echo "$("$venv/bin/python" -V), $(grep -E '^(typer|click|pydantic|jinja2|paramiko|pyyaml|rich)==' "$venv/lowest.txt" | tr '\n' ' ')"
# Tests that need torch or numpy say so by importorskip or by the mark `torch`; those of the repository itself need the
# tools for development.
"$venv/bin/python" -m pytest tests/unit tests/golden tests/cli -q -m "not slow and not torch" \
  --ignore tests/unit/runtime --ignore tests/unit/benchmarks --ignore tests/unit/test_architecture.py \
  --ignore tests/unit/test_repository.py --ignore tests/unit/test_readme.py --ignore tests/unit/test_pictures.py \
  -n auto --dist loadfile -p no:cacheprovider "$@"
